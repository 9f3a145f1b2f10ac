"""Groups whose seats share memory in the simulator and in the plan."""

from dataclasses import replace
from statistics import fmean

import pytest

from kybernate.lab.plan import Goal, plan
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.model import SimGroup
from kybernate.lab.simulate.node import HARDWARE, Node, node_seats, sized_seats
from kybernate.lab.simulate.scenarios import reference
from kybernate.policy import POLICIES, KybBalanced
from tests.simulate.cases import scenario, seat

GB = 10**9


def poisson_wait(slots: int, memory_gb: int) -> float:
    group = SimGroup("G0", slots, memory_gb * GB)
    hours = (replace(reference("poisson", window), groups=(group,)) for window in range(2))
    return fmean(wait for hour in hours for wait in run(hour, KybBalanced()).wait)


def test_a_third_slot_that_no_seat_fits_into_is_not_worse_than_two() -> None:
    assert poisson_wait(3, 80) <= 1.001 * poisson_wait(2, 80)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_large_seat_among_small_ones_that_are_always_busy(name: str) -> None:
    seats = [seat("big", vram_bytes=70), *(seat(f"s{n}", vram_bytes=20) for n in range(3))]
    rows = [(5.0, 0, 4.0), *((float(at), 1 + at % 3, 4.0) for at in range(90))]
    outcome = run(scenario(rows, seats, [SimGroup("A", 4, 80)]), POLICIES[name]())
    big = next(visit for visit in outcome.visits if visit.seat == 0)
    beside = [one for one in outcome.visits if one is not big and one.begun < big.gone and one.gone > big.begun]
    assert not beside
    assert outcome.counters["refused"] == 0


def test_seats_side_by_side_slow_each_other_by_the_given_share() -> None:
    seats = [seat("a", park=0.0, activate=0.0, vram_bytes=40), seat("b", park=0.0, activate=0.0, vram_bytes=40)]
    played = scenario([(0.0, 0, 10.0), (5.0, 1, 2.0)], seats, [SimGroup("A", 2, 80)])
    alone, shared = run(played, KybBalanced()), run(played, KybBalanced(), RunOptions(sharing=0.5))
    assert alone.finished == pytest.approx((10.0, 7.0))
    assert shared.finished == pytest.approx((11.0, 8.0))  # 3 s side by side: 2 s of work each


def test_the_plan_has_a_row_for_seats_that_share_memory() -> None:
    seats = [seat(name, vram_bytes=30) for name in "abc"]
    played = scenario([(float(at), at % 3, 1.0) for at in range(60)], seats)
    found = {one.name: one for one in plan(played, Goal(share=0.9, memory_bytes=100))}
    assert (found["packed"].groups, found["packed"].slots) == (1, 3)
    assert found["packed"].wait_mean_s < found["seats"].wait_mean_s or found["seats"].groups > 1


def test_room_for_kv_caches_takes_memory_and_time_to_move() -> None:
    cost, none, some = HARDWARE["fast"], Node(cap=8), Node(cap=8, kv_bytes=2 * GB)
    plain, roomy = (node_seats(("a",), {"a": 1.0}, node)[0] for node in (none, some))
    assert roomy.vram_bytes == plain.vram_bytes + 16 * GB == roomy.host_bytes
    assert roomy.park_seconds == pytest.approx(Node().cost.park_seconds(roomy.vram_bytes))
    assert sized_seats(("a",), cost, {"a": GB}, GB)[0].vram_bytes == 2 * GB
