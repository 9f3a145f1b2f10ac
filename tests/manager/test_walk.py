"""How often a message that goes into ``Board.handle`` returns to a file that it has left.

The walk is the one of a reader: follow the calls in the order in which they happen, and read each function once. Only
calls into another file count, and only in the files that decide, from ``board`` down to ``view``: the records below
them (``state`` and what it is made of) are the vocabulary, read once. A return is a call into a file that the walk was
in before; coming back to the caller is none, since the reader has not left its page. ``docs/architecture.md`` draws it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from kybernate.messages import JobReply
from kybernate.seat import SeatState as S
from services.gpu_manager import board
from services.gpu_manager.inputs import JobAnswered
from tests.manager.world import World

DECIDING = {"board", "allocations", "commands", "recovery", "arbiter", "switch", "late_binding", "rehearsal", "view"}
FOLDER = Path(board.__file__).parent
MOST_RETURNS = 4


class Walk:
    """The files that a message visits, in order; consecutive visits to one file are one visit."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._stack: list[str | None] = []
        self._read: set[object] = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            name = path.stem if path.parent == FOLDER and path.stem in DECIDING else None
            caller = next((file for file in reversed(self._stack) if file is not None), None)
            if name is not None and name != caller and frame.f_code not in self._read:
                self._visit(name)
            self._read.add(frame.f_code)
            self._stack.append(name)
        elif event == "return" and self._stack:
            self._stack.pop()

    def _visit(self, name: str) -> None:
        if not self.files or self.files[-1] != name:
            self.files.append(name)

    @property
    def returns(self) -> int:
        return len(self.files) - len(set(self.files))


@contextmanager
def walking() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk.profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def signal_that_begins_a_switch(world: World) -> Callable[[], object]:
    a, _ = world.fill("a", "b")
    world.tick(30)
    return lambda: world.traffic(a, waiting=1, oldest=3.0)


def job_that_ends_a_switch(world: World) -> Callable[[], object]:
    a, b = world.fill("a", "b")
    world.tick(30)
    world.traffic(a, waiting=1)
    world.quiet(b)
    job = world.job()
    world.receive(JobAnswered(job.op, JobReply(accepted=True)))
    assert world.state(b) is S.PARKING
    return lambda: world.progress(job)


def pod_that_gets_a_seat(world: World) -> Callable[[], object]:
    return lambda: world.pod(world.seat(0, 0), "a")


def pods_of_which_one_exited(world: World) -> Callable[[], object]:
    _, b = world.fill("a", "b")
    return lambda: world.exit(b)


@pytest.mark.parametrize(
    "story",
    [signal_that_begins_a_switch, job_that_ends_a_switch, pod_that_gets_a_seat, pods_of_which_one_exited],
    ids=lambda story: story.__name__,
)
def test_a_message_seldom_returns_to_a_file_that_it_has_left(
    world: World, story: Callable[[World], Callable[[], object]]
) -> None:
    act = story(world)

    with walking() as walk:
        act()

    assert walk.files[0] == "board"
    assert walk.returns <= MOST_RETURNS, " → ".join(walk.files)
