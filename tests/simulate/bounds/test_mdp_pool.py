"""A small pool solved exactly, and how near the rules come."""

from kybernate.lab.baselines import POLICIES
from kybernate.lab.studies.mdp import WaitCase, zipf
from kybernate.lab.studies.mdp import solve as solve_group
from kybernate.lab.studies.mdp_pool import PoolCase, evaluate, solve
from kybernate.policy import KybBalanced

CASE = PoolCase(zipf(0.06, 3), limit=1)


def test_keep_or_park_of_the_pool_is_nearer_to_the_optimum_than_plain_rules() -> None:
    best = solve(CASE).mean_wait
    own, ttl, exhaustive = (
        evaluate(CASE, policy, 2 * best).mean_wait / best
        for policy in (KybBalanced(), POLICIES["exhaustive-ttl"](), POLICIES["exhaustive"]())
    )
    assert 1.0 <= own < exhaustive < ttl


def test_two_groups_wait_less_than_one() -> None:
    group = solve_group(WaitCase(CASE.rates, limit=CASE.limit)).mean_wait
    assert 0 < solve(CASE, ahead=True).mean_wait <= 1.01 * solve(CASE).mean_wait < group
