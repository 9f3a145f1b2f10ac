"""The certificate: it encloses the optimum, and refutes results that are better than possible."""

import dataclasses
import itertools

import pytest

from kybernate.lab.baselines import POLICIES
from kybernate.lab.bounds import certificate as bounds
from kybernate.lab.bounds.certificate import BoundCertificate, certificate
from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.model import Scenario, SimGroup
from tests.simulate.bounds.tiny import exact, random_scenario


@pytest.mark.timeout(150)  # the first of a new checkout compiles the searches
@pytest.mark.parametrize("objective", ["wait", "slo"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_schedules_lies_between_the_bounds(seed: int, objective: str) -> None:
    scenario = random_scenario(seed)
    found = certificate(scenario, seconds_budget=2.0, objective=objective)  # type: ignore[arg-type]
    count = len(scenario.at)
    best = exact(scenario, objective=objective) / count
    reactive = exact(scenario, reactive=True, objective=objective) / count
    assert found.lower_bound <= best + 1e-9
    assert found.best_feasible == pytest.approx(best)
    assert found.reactive_lower_bound <= reactive + 1e-9
    assert found.reactive == pytest.approx(reactive)
    assert best <= reactive + 1e-9


def test_the_bound_is_tight_when_seats_hardly_compete() -> None:
    lone = dataclasses.replace(random_scenario(3), seat=(0,) * 6)
    found = certificate(lone, seconds_budget=2.0)
    assert found.bracket == 0.0 or found.best_feasible - found.lower_bound < 0.1  # a cell of the grid


@pytest.fixture(scope="module")
def busy() -> tuple[Scenario, BoundCertificate]:
    """Sixty requests that come faster than seats can take turns."""
    scenario = random_scenario(42, requests=60, seats=4)
    scenario = dataclasses.replace(scenario, at=tuple(6 * at for at in scenario.at), duration=240.0)
    return scenario, certificate(scenario, seconds_budget=4.0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_is_better_than_the_bound(name: str, busy: tuple[Scenario, BoundCertificate]) -> None:
    scenario, found = busy
    outcome = run(scenario, POLICIES[name]())
    assert found.value(outcome) >= found.reactive_lower_bound
    assert found.refutes(found.value(outcome)) is None
    assert "at most" in found.distance(found.value(outcome))


def test_a_policy_that_cheats_is_caught(busy: tuple[Scenario, BoundCertificate]) -> None:
    scenario, found = busy
    free = tuple(dataclasses.replace(seat, park_seconds=0.0, activate_seconds=0.0) for seat in scenario.seats)
    cheating = run(dataclasses.replace(scenario, seats=free), POLICIES["longest-queue"]())
    refuted = found.refutes(found.value(cheating))
    assert refuted is not None
    assert "better than possible" in refuted
    assert found.distance(found.value(cheating)) == refuted


def test_what_is_left_out_is_noticed(busy: tuple[Scenario, BoundCertificate]) -> None:
    scenario, found = busy
    outcome = run(scenario, POLICIES["longest-queue"]())
    with pytest.raises(ValueError, match="59 requests"):
        found.value(dataclasses.replace(outcome, wait=outcome.wait[1:]))


def test_schedules_keep_the_rules(busy: tuple[Scenario, BoundCertificate]) -> None:
    scenario, found = busy
    for schedule in (found.schedule, found.reactive_schedule):
        visits = sorted(schedule.visits, key=lambda visit: visit.begun)
        assert all(later.begun >= earlier.gone - 1e-9 for earlier, later in itertools.pairwise(visits))
        for request, wait in enumerate(schedule.wait):
            admitted = scenario.at[request] + wait
            visit = [
                v for v in visits if v.seat == scenario.seat[request] and v.active - 1e-9 <= admitted <= v.closed + 1e-9
            ]
            assert visit, f"request {request} was admitted while its seat was closed"
            assert (
                visit[0].gone
                >= admitted + scenario.service[request] + scenario.seats[visit[0].seat].park_seconds - 1e-9
            )
    for visit in found.reactive_schedule.visits:
        waiting = [
            request
            for request, wait in enumerate(found.reactive_schedule.wait)
            if scenario.seat[request] == visit.seat
            and scenario.at[request] <= visit.begun + 1e-9
            and scenario.at[request] + wait >= visit.active - 1e-9
        ]
        assert waiting, f"{visit} began to restore without a waiting request"


@pytest.mark.parametrize("cap", [1, 2])
def test_a_cap_makes_only_the_schedule_worse(cap: int) -> None:
    for seed in (1, 2):
        scenario = random_scenario(seed, requests=14, seats=2)
        narrow = dataclasses.replace(scenario, cap=cap)
        found = certificate(narrow, seconds_budget=1.0)
        assert found.lower_bound <= found.best_feasible
        for name in ("exhaustive", "kyb-balanced", "longest-queue", "fifo-switch"):
            assert found.refutes(found.value(run(narrow, POLICIES[name]()))) is None


@pytest.mark.parametrize("soft", [None, 1.0])
def test_several_slots_and_groups(soft: float | None) -> None:
    scenario = random_scenario(7, requests=40, seats=4)
    seats = tuple(dataclasses.replace(seat, group="AB"[i % 2]) for i, seat in enumerate(scenario.seats))
    groups = (SimGroup("A", slots=2), SimGroup("B"))
    several = dataclasses.replace(scenario, seats=seats, groups=groups, move_seconds=soft)
    found = certificate(several, seconds_budget=3.0)
    assert 0 < found.lower_bound <= found.best_feasible <= found.reactive
    for name in ("exhaustive", "kyb-balanced", "longest-queue"):
        assert found.refutes(found.value(run(several, POLICIES[name]()))) is None
    one = certificate(dataclasses.replace(scenario, name="one"), seconds_budget=2.0)
    assert found.lower_bound <= one.best_feasible


def test_a_scenario_without_requests_has_no_bound() -> None:
    with pytest.raises(ValueError, match="no requests"):
        certificate(dataclasses.replace(random_scenario(1), at=(), seat=(), service=()))


def test_a_scenario_too_large_is_refused_before_memory_runs_out() -> None:
    scenario = dataclasses.replace(random_scenario(1), duration=1e9)
    with pytest.raises(ValueError, match="cut out a window"):
        certificate(scenario)


def test_the_text_says_both_sides(busy: tuple[Scenario, BoundCertificate]) -> None:
    scenario, found = busy
    assert f"{found.lower_bound:.2f} s mean wait" in found.text
    assert all(seat.name in found.text for seat in scenario.seats)
    late = bounds.measured(scenario, found.schedule.wait, "slo")
    assert 0 <= late <= 1
