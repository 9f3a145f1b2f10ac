"""How often a message that goes into ``Board.handle`` returns to a file of the manager that it has left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager.core import board
from tests import granted
from tests.manager.world import World
from tests.walk import walking


def command_that_begins_a_switch(world: World) -> Callable[[], object]:
    a, _ = world.fill("a", "b")
    world.tick(30)
    return lambda: world.wish(a)


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
    command_that_begins_a_switch: 24,
    signal_that_begins_a_switch: 22,
    job_that_ends_a_switch: 17,
    pod_that_gets_a_seat: 14,
    pods_of_which_one_exited: 16,
}
"""What each takes today; the aim is 12."""


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
