"""What a scenario promises, and when it has not kept it."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kybernate.dev.demo import scenario
from kybernate.dev.demo.report import agreement, build, show, unequal
from kybernate.dev.demo.session import Demo
from kybernate.dev.demo.simulated import Played, SwitchCosts, simulated, stretch
from kybernate.dev.demo.watch import ObservedStep, ObservedSwitch
from kybernate.dev.stack.options import check
from kybernate.lab.traces import Arrival
from kybernate.policy import Decision, GroupView
from kybernate.policy.kyb import KybBalanced
from kybernate.seat import SeatState as S
from kybernate.topology import peers
from tests.demo.test_command import run
from tests.demo.test_report import sample, tally


def played(wait: float, *, moves: int, **changes: Any) -> dict[str, Any]:
    switches = [ObservedSwitch("G1", "s", "m", {}, way="map")] * moves
    return build(tally(sample(wait=wait)), switches, 0, 24.0, 10.0) | changes


def test_both_runs_get_the_same_arrivals_and_only_one_group_is_asked() -> None:
    first, again = scenario.own_arrivals(Demo(seed=3)), scenario.own_arrivals(Demo(seed=3))
    assert first == again != scenario.own_arrivals(Demo(seed=4))
    assert {arrival.model for arrival in first} == set(scenario.HOT)
    assert len(scenario.own_arrivals(Demo(duration=60))) < len(first) == scenario.REQUESTS


@pytest.mark.parametrize(
    ("bound", "pooled", "why"),
    [
        (played(10.0, moves=0), played(5.0, moves=3), []),
        (played(10.0, moves=0), played(8.0, moves=3), ["the mean wait fell by 20% and not by 25%"]),
        (played(10.0, moves=0), played(5.0, moves=0), ["no seat moved"]),
        (played(10.0, moves=2), played(5.0, moves=3), ["bound seats moved"]),
        (played(10.0, moves=0, violations=1), played(5.0, moves=3), ["with bound seats: 1 violations"]),
        (played(0.0, moves=0), played(0.0, moves=3), ["the mean wait fell by 0% and not by 25%"]),
    ],
)
def test_it_passes_when_the_wait_fell_and_nothing_went_wrong_in_either_run(
    bound: dict[str, Any], pooled: dict[str, Any], why: list[str]
) -> None:
    result = scenario.compared(bound, pooled)
    assert scenario.failures(result) == why
    assert (result["moves"], result["without_pooled"]) == (pooled["moves"], bound)


def test_a_workload_of_ones_own_promises_no_fall_but_bound_seats_may_not_move() -> None:
    assert scenario.failures(scenario.compared(played(5.0, moves=0), played(5.0, moves=0), None)) == []
    assert scenario.failures(scenario.compared(played(5.0, moves=1), played(4.0, moves=1), None)) == [
        "bound seats moved"
    ]


def test_a_comparison_shows_both_runs_and_what_the_simulator_expected() -> None:
    expected = {
        "simulated_wait_mean_without_s": 9.0,
        "simulated_wait_range_without_s": [8.0, 10.0],
        "simulated_wait_mean_s": 4.5,
        "simulated_wait_range_s": [4.0, 5.0],
        "simulated_wait_fall": 0.5,
        "simulated_wait_fall_range": [0.4, 0.6],
        "simulated_moves": 3,
    }
    console = Console(width=120, file=io.StringIO())
    show(scenario.compared(played(10.0, moves=0), played(4.0, moves=3), None) | expected, console)
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (live,) = (row for row in rows if "│ mean wait s" in row)
    (simulated,) = (row for row in rows if "simulated mean wait s" in row)
    assert [cell.strip() for cell in live.split("│")[2:5]] == ["10.00", "4.00", "-60.0%"]
    assert [cell.strip() for cell in simulated.split("│")[2:5]] == ["9.00", "4.50", "-50.0%"]
    (ranges,) = (row for row in rows if "│ of single simulations" in row)
    assert [cell.strip() for cell in ranges.split("│")[2:5]] == ["8.00 … 10.00", "4.00 … 5.00", "-60.0% … -40.0%"]


def compared(bound: float, pooled: float, *single: tuple[float, float], requests: int = 1) -> dict[str, Any]:
    """A comparison with single simulations of (bound, pooled)."""
    first, second = ([pair[which] for pair in single] for which in (0, 1))
    result = scenario.compared(played(bound, moves=0), played(pooled, moves=3), None)
    expected = {"simulated_waits_without_s": first, "simulated_waits_s": second, "run": "seed 1"}
    return result | expected | scenario.spread(first, second) | {"requests": requests, "ok": requests}


def test_several_comparisons_are_one_over_all_their_requests() -> None:
    runs = [compared(10.0, 4.0, (9.0, 4.0), (11.0, 4.0)), compared(2.0, 1.0, (2.0, 1.5), (2.0, 0.5), requests=3)]
    found = scenario.total(runs)
    assert (found["requests"], found["moves"], found["runs"]) == (4, 6, runs)
    assert (found["wait_mean_without_s"], found["wait_mean_s"], found["wait_fall"]) == (4.0, 1.75, 0.5625)
    assert (found["simulated_wait_mean_without_s"], found["simulated_wait_mean_s"]) == (4.0, 1.75)
    assert found["simulated_wait_fall_range"] == [round(1 - 8.5 / 15, 4), round(1 - 5.5 / 17, 4)]
    assert scenario.failures(found) == []
    broken = runs[1]["without_pooled"] | {"violations": 2}
    lost = scenario.total([runs[0], runs[1] | {"errors": 1, "without_pooled": broken}])
    assert scenario.failures(lost) == ["run 2: 1 errors", "run 2: with bound seats: 2 violations"]
    assert (lost["errors"], lost["retryable"], lost["violations"]) == (1, 0, 2)
    console = Console(width=80, file=io.StringIO())
    show(found, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (row,) = (line for line in text.splitlines() if line.startswith(" all"))
    assert row.split()[1:6] == ["4", "4.00", "1.75", "-56.2%", "-56.2%"]
    assert text.count(" seed 1 ") == 2
    assert "0 errors, 0 retryable, 0 violations" in text
    assert agreement(found) in " ".join(text.split())


@pytest.mark.parametrize(
    ("pooled", "says"),
    [
        (5.4, "0.92 times the simulated one: within 10% of it, and inside"),
        (4.4, "1.12 times the simulated one: not within 10% of it, and inside"),
        (6.5, "0.70 times the simulated one: not within 10% of it, and outside"),
    ],
)
def test_whether_the_live_gain_is_the_simulated_one(pooled: float, says: str) -> None:
    assert says in agreement(compared(10.0, pooled, (10.0, 4.0), (10.0, 6.0)))
    assert agreement(scenario.compared(played(10.0, moves=0), played(4.0, moves=0))) == ""
    assert agreement(compared(10.0, pooled, (10.0, 10.5), (10.0, 11.0))) == "", "the simulator expects no gain"


def groups(*peers: str, active: str = "") -> list[dict[str, Any]]:
    """G0 with seats a and b, G1 with seat c, as ``kyb why`` shows them."""
    rows = {"tier": "standard", "weight": 1.0, "slo_seconds": 20.0, "service_seconds": 2.0}
    seats = {"G0": "ab", "G1": "c"}
    return [
        {
            "group": name,
            "peers": [peer for peer in peers if peer != name],
            "seats": [
                rows | {"seat": one, "model": one, "state": "active" if one == active else "parked"} for one in members
            ],
        }
        for name, members in seats.items()
    ]


ARRIVALS = tuple(Arrival(30.0 * number, "ab"[number % 2], 10, 60) for number in range(20))
STEPS = (
    ObservedStep("a", S.ACTIVE, S.DRAINING, 9.0),
    *[ObservedStep("a", S.DRAINING, S.PARKING, seconds) for seconds in (0.05, 0.05, 0.2)],  # nothing was in flight
    *[ObservedStep("b", S.DRAINING, S.PARKING, 3.0)] * 9,
    ObservedStep("a", S.DRAINING, S.ACTIVE, 7.0),  # called off
    ObservedStep("a", S.PARKING, S.PARKED, 0.4),
    ObservedStep("b", S.PARKED, S.ACTIVATING, 50.0),
    ObservedStep("b", S.ACTIVATING, S.ACTIVE, 0.5),
)


def watching(seen: list[GroupView]) -> KybBalanced:
    """A policy that keeps what it is shown."""

    class Watching(KybBalanced):
        def decide(self, view: GroupView) -> Decision:
            seen.append(view)
            return super().decide(view)

    return Watching()


def test_the_simulator_plays_the_arrivals_with_the_costs_that_were_seen() -> None:
    run = Played(ARRIVALS, groups(), groups(), STEPS, 10.0)
    assert stretch(run) == pytest.approx(2.0 / (60 / 60 + 10 / 8000))
    (bound,) = simulated(run, KybBalanced())
    assert bound.wait[0] == pytest.approx(5.0)  # activating: 0.5 · 10
    assert max(bound.wait) == pytest.approx(10.0)  # and closing and parking: (0.1 + 0.4) · 10
    seen: list[GroupView] = []
    (slower,) = simulated(replace(run, control_seconds=0.2), watching(seen))
    assert slower.wait[0] == pytest.approx(5.2)  # and until the decision, and after the activation
    assert {seat.activate_seconds for view in seen for seat in view.seats} == {5.0}  # which no manager learns
    (pooled,) = simulated(replace(run, before=groups("G0", "G1")), KybBalanced())
    assert (bound.counters["moves"], pooled.counters["moves"]) == (0, 1)  # b goes to G1, where nothing is asked


def test_the_simulator_begins_with_the_seats_that_were_active() -> None:
    (parked,) = simulated(Played(ARRIVALS, groups(), groups(), STEPS, 10.0), KybBalanced())
    (active,) = simulated(Played(ARRIVALS, groups(active="a"), groups(), STEPS, 10.0), KybBalanced())
    assert (parked.wait[0], active.wait[0]) == (pytest.approx(5.0), 0.0)


def test_the_simulator_begins_with_what_the_manager_had_learned() -> None:
    known = {"park_seconds": 4.0, "activate_seconds": 3.0, "rate_fast": 0.1, "rate_slow": 0.2}
    before = [group | {"seats": [seat | known for seat in group["seats"]]} for group in groups()]
    run, first = Played(ARRIVALS, before, groups(), STEPS, 10.0), []
    for one in (run, replace(run, asked=6, observed_seconds=60.0)):
        seen: list[GroupView] = []
        simulated(one, watching(seen))
        first.append(seen[0].seats[0])
    unasked, asked = first
    assert (unasked.park_seconds, unasked.activate_seconds, unasked.rate_fast) == (pytest.approx(5.0), 5.0, 0.0)
    assert (asked.park_seconds, asked.activate_seconds, asked.service_seconds) == (4.0, 3.0, 2.0)
    assert (asked.rate_fast, asked.rate_slow) == pytest.approx((0.1, 0.2))


def test_the_simulated_costs_spread_as_those_that_were_seen() -> None:
    steps = (*STEPS, ObservedStep("b", S.ACTIVATING, S.ACTIVE, 1.5))
    run = Played(ARRIVALS, groups(), groups(), steps, 10.0)
    first, second = simulated(run, KybBalanced(), seeds=2)
    assert first.wait != second.wait
    assert [one.wait for one in simulated(run, KybBalanced(), seeds=2)] == [first.wait, second.wait]


def test_both_runs_of_a_comparison_are_simulated_with_the_same_costs() -> None:
    slow = tuple(one._replace(seconds=2 * one.seconds) for one in STEPS)
    first, second = (Played(ARRIVALS, groups(), groups(), steps, 10.0) for steps in (STEPS, slow))
    found = scenario._expected(KybBalanced(), [first, second])
    assert found["simulated_wait_fall"] == 0.0, "nothing but the costs of switches differs"
    assert found["switch_costs_s"] == [10.0, 20.0]
    assert "10.0 s in the first run and 20.0 s in the second" in unequal(found)
    assert unequal({"switch_costs_s": [10.0, 11.0]}) == ""


def test_packing_is_compared_with_one_slot() -> None:
    first, packed = played(10.0, moves=0), played(4.0, moves=0)
    result = scenario.compared(first, packed, scenario.DemoScenario.PACKED)
    assert (result["packing"], result["without_packing"]) == (True, first)
    assert scenario.failures(result) == []
    crowded = scenario.compared(first, played(9.0, moves=0), scenario.DemoScenario.PACKED)
    assert scenario.failures(crowded) == ["the mean wait fell by 10% and not by 25%"]
    broken = scenario.compared(played(10.0, moves=0, violations=1), packed, scenario.DemoScenario.PACKED)
    assert scenario.failures(broken) == ["with one slot: 1 violations"]
    assert {one.model for one in scenario.own_arrivals(Demo(), scenario.DemoScenario.PACKED)} == set(scenario.SIZES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare-bound", "--chaos"), "--compare-bound starts its own two stacks"),
        (("--compare-bound", "--routers", "2"), "are for a demo without --scenario and --compare-bound"),
        (("--scenario", "hot-group", "--router", "http://x"), "brings its own stack and workload"),
        (("--scenario", "hot-pair", "--chaos", "--runs", "2"), "--chaos plays a scenario alone"),
        (("--scenario", "hot-mig", "--backend", "mixed"), "the driver cannot checkpoint MIG instances"),
        (("--runs", "2"), "--runs is for --scenario and --compare-bound"),
        (("--compare-bound", "--runs", "2", "--trace", "x.csv"), "say how long each is with --duration"),
    ],
)
def test_what_does_not_go_together_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_chaos_plays_a_scenario_alone_and_it_passes_when_seats_moved() -> None:
    result = {"requests": 4, "ok": 4, "errors": 0, "retryable": 1, "violations": 0, "moves": 2, "scenario": "hot-pair"}
    played = result | {"chaos": {"failures": []}}
    assert scenario.failures(played) == []
    assert scenario.failures(played | {"moves": 0}) == ["no seat moved"]
    assert scenario.failures(played | {"chaos": {"failures": ["router did not come back"]}}) == [
        "router did not come back"
    ]


@pytest.mark.parametrize(
    ("which", "groups"),
    [("hot-pair", ["G01", "G23"]), ("hot-quad", ["G0123", "G4567"]), ("hot-mig", ["G0", "G1"])],
)
def test_the_groups_of_a_scenario_are_one_pool_of_two(which: str, groups: list[str], tmp_path: Path) -> None:
    found = check(scenario.build_options(scenario.DemoScenario(which), Demo(), tmp_path, 24.0)).topology.groups
    assert [group.name for group in found] == groups
    assert [len(one) for one in peers(found).values()] == [1, 1]


@pytest.mark.parametrize(
    ("which", "backend", "moves"),
    [("hot-group", None, False), ("hot-group", "sglang", True), ("hot-pair", None, True), ("packed", "vllm", False)],
)
def test_engines_that_the_driver_does_not_move_start_on_the_other_group(
    which: str, backend: str | None, moves: bool, tmp_path: Path
) -> None:
    """With --backend no seat of hot-group could move, so that it never passed."""
    options = scenario.build_options(scenario.DemoScenario(which), Demo(backend=backend), tmp_path, 24.0)
    assert options.pods is not None
    for pod in yaml.safe_load_all(options.pods.read_text()):
        assert (pod["spec"]["containers"][0]["command"][0] == scenario.KYB_RUN[0]) is moves


@pytest.mark.parametrize(("waking", "loses_copy", "move"), [(2.0, True, 10.0), (None, False, 0.0)])
def test_a_move_by_a_restart_costs_what_a_start_takes_longer_than_what_brings_a_seat_back(
    waking: float | None, loses_copy: bool, move: float
) -> None:
    """Without a sleep a seat starts in any case."""
    woken = [] if waking is None else [ObservedStep("a", S.ACTIVATING, S.ACTIVE, waking)]
    steps = (*woken, ObservedStep("c", S.STARTING, S.ACTIVE, 12.0), ObservedStep("b", S.PARKING, S.BACKOFF, 1.0))
    costs = SwitchCosts(Played((), (), (), steps, 1.0))
    assert (costs.loses_copy, costs.move_seconds, costs.park_seconds) == (loses_copy, move, 1.0)
