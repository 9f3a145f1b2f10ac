"""The exact optimum: the published figures, and how near the rules and policies come."""

import functools

import pytest

from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.studies import mdp
from kybernate.lab.studies.mdp import LongestFirst, Optimal
from kybernate.policy import KybBalanced

# Queues are cut shorter than in bench/bench_bounds.py, which is why the tolerance is a few percent.
CASES = {
    "0.06/s": (mdp.WaitCase(mdp.zipf(0.06), limit=6), 6.87),
    "0.12/s": (mdp.WaitCase(mdp.zipf(0.12), limit=6), 10.46),
    "0.30/s": (mdp.WaitCase(mdp.zipf(0.30), limit=9), 17.05),
    "moves of 10 s": (mdp.WaitCase(mdp.zipf(0.12), park=10.0, restore=10.0, limit=8), 31.05),
    "decodes of 30 s": (mdp.WaitCase(mdp.zipf(0.12), service=30.0, limit=11), 83.0),
}


@functools.cache
def optimum(name: str) -> mdp.WaitSolution:
    return mdp.solve(CASES[name][0], tolerance=3e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_optimum_is_the_published_one(name: str) -> None:
    assert optimum(name).mean_wait == pytest.approx(CASES[name][1], rel=0.02)


def test_what_the_optimum_does() -> None:
    best = optimum("0.12/s")
    # The longest queue goes first, of equal ones the colder; nothing is restored before anybody waits.
    assert best.restores((1, 3, 2)) == 1
    assert best.restores((2, 2, 2)) == 2
    assert best.restores((0, 0, 0)) is None
    # A busy seat keeps admitting, an empty one leaves at once; an idle one stays only where the next request is likely.
    assert not best.leaves(0, 1, (0, 3, 2))
    assert best.leaves(0, 0, (0, 1, 0))
    assert [best.leaves(seat, 0, (0, 0, 0)) for seat in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    ("rule", "ratio"),
    [
        (LongestFirst(idle="park", ties="hotter"), 1.043),
        (LongestFirst(idle="keep", ties="hotter"), 1.056),
        (LongestFirst("longer", idle="keep", ties="hotter"), 1.152),
        (LongestFirst("first", idle="keep", ties="hotter"), 1.448),
        (LongestFirst(), 1.0),
    ],
)
def test_plain_rules_are_as_far_from_the_optimum_as_published(rule: LongestFirst, ratio: float) -> None:
    case = CASES["0.12/s"][0]
    assert mdp.ratio(case, rule, optimum("0.12/s"), tolerance=3e-3) == pytest.approx(ratio, abs=0.012)


@pytest.mark.parametrize("name", CASES)
def test_the_default_policy_is_near_the_optimum(name: str) -> None:
    near = 1.10 if name == "decodes of 30 s" else 1.02
    assert mdp.ratio(CASES[name][0], KybBalanced(), optimum(name), tolerance=3e-3) <= near


def test_the_simulator_and_the_exact_model_agree() -> None:
    # The optimum's rules played event by event, with real ages; parks and restores vary as Erlang-2 does.
    best = optimum("0.12/s")
    outcome = run(mdp.played(best.case, 6000, seed=1), Optimal(best), RunOptions(seed=1, jitter=0.5**0.5))
    assert sum(outcome.wait) / len(outcome.wait) == pytest.approx(best.mean_wait, rel=0.07)
