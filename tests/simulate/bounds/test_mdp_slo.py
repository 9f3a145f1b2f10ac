"""The exact optimum for requests within their SLO: that it is one, and how near the policies come."""

import functools
import random

import numpy as np
import pytest

from kybernate.lab.studies import mdp_slo
from kybernate.lab.studies.mdp import zipf
from kybernate.lab.studies.mdp_slo import Patterns, Steps
from kybernate.policy import POLICIES, KybSlo

SMALL = mdp_slo.SloCase(zipf(0.12), step=5.0, slo_steps=3, in_flight=6)
"""Steps as coarse as this make it cheap: 4,096 states of the queues."""


@functools.cache
def optimum() -> mdp_slo.SloSolution:
    return mdp_slo.solve(SMALL)


@functools.cache
def reached(policy: str) -> mdp_slo.SloSolution:
    return mdp_slo.evaluate(SMALL, POLICIES[policy]())


def test_the_slo_policy_is_near_the_optimum() -> None:
    assert reached("kyb-slo").attained >= 0.98 * optimum().attained


@pytest.mark.parametrize("policy", ["kyb-slo", "kyb-balanced", "exhaustive"])
def test_no_policy_is_better_than_the_optimum(policy: str) -> None:
    assert reached(policy).attained <= optimum().attained + optimum().error + reached(policy).error


def test_what_the_optimum_does() -> None:
    best = optimum()
    oldest, youngest, lost = 0b100, 0b001, 0b1000
    assert best.restores((oldest, youngest, 0)) == 0  # who would miss it by waiting goes first, who can wait waits
    assert best.restores((0, lost, oldest)) == 2  # and before those who have missed it
    assert best.restores((0, 0, 0)) is None
    assert not best.leaves(0, 1, (youngest, 0))
    assert best.leaves(0, 0, (youngest, 0))
    assert [best.leaves(seat, 0, (0, 0)) for seat in (1, 2)] == [True, True]


def test_a_pattern_ages_bit_by_bit() -> None:
    patterns = Patterns(3)
    for pattern in range(patterns.count):
        waiting = {age for age in range(3) if pattern >> age & 1}
        lost = bool(pattern & patterns.lost) or 2 in waiting
        later = int(patterns.follows[patterns.aged[pattern]])
        assert {age for age in range(3) if later >> age & 1} == {age + 1 for age in waiting if age < 2}
        assert bool(later & patterns.lost) == lost
        assert patterns.saved[pattern] == len(waiting)
        assert patterns.served[pattern] == len(waiting) + bool(pattern & patterns.lost)


@pytest.mark.parametrize("policy", ["optimum", "kyb-slo"])
def test_the_model_played_step_by_step_agrees(policy: str) -> None:
    solution = optimum() if policy == "optimum" else reached(policy)
    assert _played(solution, steps=25_000) == pytest.approx(solution.attained, abs=0.02)


def _played(solution: mdp_slo.SloSolution, steps: int) -> float:
    """The model's text in plain code: share within the SLO. Everybody who has missed it counts as one request."""
    case, chance = solution.case, random.Random(5)
    seats = range(len(case.rates))
    ages: list[set[int]] = [set() for _ in seats]
    lost = [False for _ in seats]
    came = met = in_flight = 0
    holder, phase = -1, "empty"
    for _ in range(steps):
        in_flight = sum(chance.random() >= case.ends for _ in range(in_flight))
        for seat in seats:
            aged = {age + 1 for age in ages[seat]}
            if seat == holder and phase == "restores":
                met += len(aged)
                in_flight = min(len(aged) + lost[seat], case.in_flight)
                aged, lost[seat], phase = set(), False, "active"
            lost[seat] |= case.slo_steps in aged
            ages[seat] = aged - {case.slo_steps}
            if chance.random() < case.chances[seat]:
                came += 1
                if seat == holder and phase == "active":
                    met, in_flight = met + 1, min(in_flight + 1, case.in_flight)
                else:
                    ages[seat].add(0)
        if phase == "drains":
            phase = "parks" if in_flight == 0 else "drains"
            continue
        waiting = tuple(sum(1 << age for age in ages[seat]) | lost[seat] << case.slo_steps for seat in seats)
        others = waiting[:holder] + waiting[holder + 1 :]
        if phase == "active" and solution.leaves(holder, in_flight, others):
            phase = "drains" if in_flight else "parks"
            continue
        if phase == "parks":
            holder, phase = -1, "empty"
        if phase == "empty" and (incoming := solution.restores(waiting)) is not None:
            holder, phase = incoming, "restores"
    return met / came


def test_steps_for_the_simulator_keep_to_the_grid() -> None:
    scenario = mdp_slo.played(SMALL, 400, seed=1)
    counts = np.bincount(scenario.seat, minlength=3) / 400
    assert counts == pytest.approx(SMALL.chances, abs=0.07)
    assert all(abs(at / SMALL.step - round(at / SMALL.step)) < 1e-5 for at in scenario.at)
    assert np.mean(scenario.service) == pytest.approx(SMALL.service, rel=0.15)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rates": (0.1,)}, "two seats"),
        ({"rates": (0.1, 0.0)}, "above 0"),
        ({"step": 6.0}, "step of 6"),
        ({"slo_steps": 9}, "in_flight 9"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mdp_slo.SloCase(**({"rates": (0.1, 0.1)} | wrong))  # type: ignore[arg-type]


def test_closing_for_a_policy_is_what_it_says() -> None:
    view = Steps(SMALL.rates, SMALL.service, SMALL.step, SMALL.slo_steps)
    assert view.leaves(KybSlo(), 1, 0, (0b001, 0))
    assert not view.leaves(KybSlo(close_ratio=0.0), 1, 2, (0b001, 0))
    assert view.restores(KybSlo(), (0, 0b010, 0)) == 1
