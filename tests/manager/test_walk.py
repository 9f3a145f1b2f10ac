"""How often a message that goes into ``Board.handle`` returns to a file of the manager that it has left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.messages import MigrateSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core import board
from tests import granted
from tests.manager.world import World, booted, make_group
from tests.walk import walking


def command_that_begins_a_switch(world: World) -> Callable[[], object]:
    a, _ = world.fill("a", "b")
    world.tick(30)
    return lambda: world.wish(a)


def command_that_moves_a_pair(_: World) -> Callable[[], object]:
    """Its seat is parked, and the other pair of GPUs is free: one message, up to the job."""
    world = booted(*(make_group(f"G{n}{n + 1}", [n, n + 1], 2, rebalance=True) for n in (0, 2)))
    a, _ = world.fill("a", "b")
    world.tick(30)

    def order() -> None:
        world.order(MigrateSeat, seat=a, to="G23")
        assert world.state(a) is S.MIGRATING

    return order


def signal_that_begins_a_switch(world: World) -> Callable[[], object]:
    a, _ = world.fill("a", "b")
    world.tick(30)
    return lambda: world.traffic(a, waiting=1, oldest=3.0)


def job_that_ends_a_switch(world: World) -> Callable[[], object]:
    a, b = world.fill("a", "b")
    world.tick(30)
    world.switch(b, a)
    job = world.journaled()
    assert world.state(b) is S.PARKING
    return lambda: world.progress(job)


def pod_that_gets_a_seat(world: World) -> Callable[[], object]:
    return lambda: world.pod(world.seat(0, 0), "a")


def pods_of_which_one_exited(world: World) -> Callable[[], object]:
    _, b = world.fill("a", "b")
    return lambda: world.exit(b)


MOST_RETURNS = {
    command_that_begins_a_switch: 15,
    command_that_moves_a_pair: 20,
    signal_that_begins_a_switch: 13,
    job_that_ends_a_switch: 17,
    pod_that_gets_a_seat: 12,
    pods_of_which_one_exited: 13,
}
"""What each takes today."""


@pytest.mark.parametrize("story", MOST_RETURNS, ids=lambda story: story.__name__)
def test_a_message_seldom_returns_to_a_file_that_it_has_left(
    world: World, monkeypatch: pytest.MonkeyPatch, story: Callable[[World], Callable[[], object]]
) -> None:
    act = story(world)
    monkeypatch.setattr(granted, "LOOKS", False)

    with walking(Path(board.__file__).parents[1], entry="Board.handle") as walk:
        act()

    assert walk.files[0] == "board"
    assert walk.returns <= MOST_RETURNS[story], " → ".join(walk.files)
