"""A rider's row about a seat or a pair holds at each door: the seat gets no GPU, and none leaves for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kybernate.policy import Decision, GroupView, KybBalanced, Stay, Switch
from kybernate.seat import SeatState as S
from services.gpu_manager.core import obstacles
from services.gpu_manager.core.obstacles import ROWS, Ask, row
from services.gpu_manager.core.riders import RIDERS
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import Rider, by_hook
from services.gpu_manager.live_policy import GuardedPolicy
from tests.manager.world import World, booted, make_group


@dataclass(frozen=True)
class Longest:
    """The longest wait goes next, whatever the list says of it."""

    def decide(self, view: GroupView) -> Decision:
        waiting = [seat for seat in view.seats if seat.wait_seconds is not None]
        if not waiting:
            return Stay(None, "no demand")
        victim = next((seat.seat for seat in view.holders() if not seat.in_flight), None)
        return Switch(min(waiting, key=lambda seat: seat.turn).seat, victim, "the longest wait")


class Quota(Rider):
    """A model has used up its GPU hours: its seat is not activated."""

    def __init__(self, nr: int, subject: str) -> None:
        self.model = ""

        @row(nr, "quota", subject, "operator", "midnight")
        def quota(ask: Ask) -> Stage | None:
            """Used up."""
            return Stage("quota", "its hours are used up") if ask.of and ask.of.model == self.model else None


@contextmanager
def rows_kept() -> Iterator[None]:
    """Rows that are made meanwhile are in the list until the end."""
    before = list(ROWS)
    obstacles.counted.cache_clear()
    try:
        yield
    finally:
        ROWS[:] = before
        obstacles.counted.cache_clear()


@pytest.fixture(
    params=[(165, "seat"), (245, "seat"), (275, "seat"), (345, "pair"), (375, "seat")], ids=lambda one: f"{one[0]}"
)
def quota(request: pytest.FixtureRequest) -> Iterator[Quota]:
    with rows_kept():
        yield Quota(*request.param)


@pytest.fixture
def late() -> Iterator[Quota]:
    """One whose row may begin to hold at any time."""
    with rows_kept():
        yield Quota(275, "seat")


@pytest.fixture(params=[KybBalanced(), GuardedPolicy("longest", Longest())], ids=["ours", "one that does not know"])
def world(request: pytest.FixtureRequest) -> World:
    return booted(policy=request.param)


def test_a_seat_against_whose_row_nothing_helps_stays_parked_and_the_holder_serves_on(
    quota: Quota, world: World
) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, quota))
    quota.model = world.managed(a).model
    world.tick(30)
    world.traffic(a, waiting=1, oldest=5.0)
    for _ in range(5):
        world.tick(1)
        assert (world.state(a), world.state(b), world.node.switches) == (S.PARKED, S.ACTIVE, {})


def test_no_holder_leaves_for_it_even_if_a_careless_policy_says_so(quota: Quota) -> None:
    world = booted(policy=Longest())
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, quota))
    quota.model = world.managed(a).model
    world.tick(30)
    world.traffic(a, waiting=1, oldest=5.0)
    assert (world.state(a), world.state(b), world.node.switches) == (S.PARKED, S.ACTIVE, {})
    assert world.node.groups["G0"].why == "its hours are used up"


def test_a_drain_is_called_off_once_the_seat_that_it_is_for_may_not_come(late: Quota, world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, late))
    world.tick(30)
    world.traffic(a, waiting=1, oldest=5.0)
    assert world.state(b) is S.DRAINING
    late.model = world.managed(a).model
    world.tick(1)
    assert (world.state(a), world.state(b), world.node.switches) == (S.PARKED, S.ACTIVE, {})


def test_another_seat_takes_the_turn_of_one_that_may_not_come(late: Quota, world: World) -> None:
    a, b = world.fill("a", "b")
    c = world.seat(0, 2)
    world.pod(c, "c")
    world.node.riders = by_hook((*RIDERS, late))
    late.model = world.managed(a).model
    world.tick(30)
    world.traffic(a, waiting=9, oldest=90.0)
    assert world.state(b) is S.ACTIVE
    world.call(c)
    world.traffic(c, waiting=1)
    world.finish()
    assert (world.state(a), world.state(b), world.state(c)) == (S.PARKED, S.PARKED, S.STARTING)


def test_gpus_are_not_cleared_for_a_seat_that_may_not_come(late: Quota) -> None:
    world = booted(make_group("G01", [0, 1], 1), make_group("G0", [0], 1), make_group("G1", [1], 1))
    ((large,), (small,), (other,)) = (world.fill(name, group=n) for n, name in enumerate(("large", "small", "other")))
    world.node.riders = by_hook((*RIDERS, late))
    late.model = "large"
    world.tick(30)
    world.traffic(large, waiting=3, oldest=60.0)
    world.tick(1)
    assert [world.state(one) for one in (large, small, other)] == [S.PARKED, S.ACTIVE, S.ACTIVE]
    late.model = ""
    world.tick(1)
    assert (world.state(small), world.state(other), [*world.node.claims]) == (S.DRAINING, S.DRAINING, ["G01"])
    late.model = "large"
    world.tick(1)
    assert (world.state(small), world.state(other), world.node.claims) == (S.ACTIVE, S.ACTIVE, {})
