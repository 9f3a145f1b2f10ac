"""Each row of the list: a case in which it arises, and what removes it."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from kybernate.messages import (
    ActivateSeat,
    CommandReply,
    DrainNode,
    MigrateSeat,
    ParkSeat,
    PinSeat,
    ResumeNode,
    UnpinSeat,
)
from kybernate.policy.rules import Quantum
from kybernate.seat import SeatState as S
from services.gpu_manager.core import obstacles
from services.gpu_manager.core.inputs import (
    BusChanged,
    ForeignProcess,
    ForeignProcessesSeen,
    WallTime,
)
from services.gpu_manager.core.obstacles import ROWS
from services.gpu_manager.core.state import Lane
from tests.manager.texts import of_effects, of_node, with_ids
from tests.manager.world import World, booted, make_group, nested, pooled


class Case(NamedTuple):
    """The row holds for this seat on this group."""

    world: World
    seat: str
    group: int = 0


Cases = Iterator[Case]
CASES: dict[int, Callable[[], Cases]] = {}
"""By number of the row: a story that yields when the row holds, and then ends it."""


def case(nr: int, made: Callable[[], World] = booted) -> Callable[[Callable[[World], Cases]], None]:
    def add(story: Callable[[World], Cases]) -> None:
        CASES[nr] = lambda: story(made())

    return add


@case(100)
def drained(world: World) -> Cases:
    (a,) = world.fill("a")
    world.order(DrainNode, group="G0")
    world.finish()
    yield Case(world, a)
    world.order(ResumeNode, group="G0")


@case(110)
def foreign(world: World) -> Cases:
    a, _ = world.fill("a", "b")
    world.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 1, "x"),)))
    yield Case(world, a)
    world.receive(ForeignProcessesSeen(()))


@case(120)
def broken(world: World) -> Cases:
    a, _ = world.fill("a", "b")
    world.node.broken = {"GPU-0": "two groups"}
    yield Case(world, a)
    world.tick()


@case(130)
def refused(world: World) -> Cases:
    a = world.seat(0, 0)
    world.pod(a, "a")
    whole = world.pods[a]
    world.pods[a] = replace(whole, resources=("kyb.ai/a", "kyb.ai/b"))
    world.look()
    yield Case(world, a)
    world.pods[a] = whole
    world.look()


@case(140)
def quarantined(world: World) -> Cases:
    a, b = world.drained_switch()
    world.progress(world.job(), "quarantined", "pending")
    yield Case(world, a)
    world.look_at(b, "active")


@case(150, pooled)
def immovable(world: World) -> Cases:
    (a,) = world.fill("a")
    world.annotate(a, rebalance="false")
    yield Case(world, a, group=1)
    world.annotate(a, rebalance="true")


@case(170)
def pinned(world: World) -> Cases:
    a, b = world.fill("a", "b")
    world.command(PinSeat, b)
    yield Case(world, a)
    world.command(UnpinSeat, b)


@case(220, pooled)
def unlocated(world: World) -> Cases:
    a, b = world.fill("a", "b")
    world.managed(b).learn(unlocated=True)
    yield Case(world, a)
    world.managed(b).learn(unlocated=False)


@case(225)
def failed(world: World) -> Cases:
    a = world.seat(0, 0)
    world.serve(a, "a")
    for _ in range(2):
        world.managed(a).failed("exited with code 1", world.now)
    world.exit(a)
    yield Case(world, a)
    world.command(ActivateSeat, a)


@case(230)
def container(world: World) -> Cases:
    _, b = world.fill("a", "b")
    world.exit(b)
    assert world.state(b) is S.BACKOFF
    yield Case(world, b)
    world.call(b)


@case(235)
def unmade(world: World) -> Cases:
    a = world.seat(0, 0)
    world.pod(a, "a")
    world.shows(a, waits="port 9001 of 127.0.0.1 is taken")
    yield Case(world, a)
    world.shows(a, waits="")


@case(240)
def start_gate(world: World) -> Cases:
    a = world.seat(0, 0)
    world.pod(a, "a")
    yield Case(world, a)
    world.call(a)


@case(250)
def idle(world: World) -> Cases:
    a, _ = world.fill("a", "b")
    yield Case(world, a)
    world.traffic(a, waiting=1)


@case(260)
def routers(world: World) -> Cases:
    a, _ = world.fill("a", "b")
    world.receive(BusChanged(False))
    yield Case(world, a)
    world.receive(BusChanged(True))
    world.beat()
    world.tick(5)


@case(270)
def pause(world: World) -> Cases:
    a, _ = world.drained_switch()
    world.progress(world.job(), "active", "pending")
    yield Case(world, a)
    world.tick(1)


@case(280, lambda: nested(policy=Quantum(5.0, 1.0)))
def barrier(world: World) -> Cases:
    (pair,) = world.fill("p", group=2)
    (a,), (b,) = world.fill("a", group=0), world.fill("b", group=1)
    for seat in (a, b):
        world.traffic(seat, in_flight=1)
    world.later(60)
    world.switch(a, pair, oldest=500.0)
    world.progress(world.job())
    yield Case(world, a)
    world.traffic(pair)


@case(290)
def switch(world: World) -> Cases:
    a, _ = world.drained_switch()
    yield Case(world, a)
    world.finish()


@case(295, lambda: booted(*(make_group(f"G{n}", [n], 2) for n in range(2))))
def lanes(world: World) -> Cases:
    (a, _), (c, _) = (world.fill(f"a{n}", f"b{n}", group=n) for n in range(2))
    world.tick(30)
    world.configure(lanes=(Lane(frozenset({"GPU-0", "GPU-1"}), 1),))
    world.traffic(a, waiting=1)
    yield Case(world, c, group=1)
    world.finish()


@case(300)
def rests(world: World) -> Cases:
    a, b = world.drained_switch()
    world.progress(world.job(), activate="parked")
    world.traffic(b, waiting=1)
    yield Case(world, a)
    world.managed(a).backoff.activation.until = WallTime(0.0)


@case(310, pooled)
def stays(world: World) -> Cases:
    (a,) = world.fill("a")
    world.managed(a).backoff.move.until = WallTime(world.wall + 10)
    yield Case(world, a, group=1)
    world.tick(11)


@case(320, pooled)
def moving(world: World) -> Cases:
    a, _ = world.fill("a", "b")
    world.fill("c", group=1)
    world.order(MigrateSeat, seat=a, to="G1")
    yield Case(world, a)
    world.finish()


@case(330)
def unproven(world: World) -> Cases:
    a, b = world.fill("a", "b")
    world.vanish(b)
    yield Case(world, a)
    world.end_processes(b)


@case(340)
def starting(world: World) -> Cases:
    (a,) = world.fill("a")
    b = world.seat(0, 1)
    world.tick(10)
    world.at_gate(b, "b")
    world.finish()
    world.start(b)
    yield Case(world, a)
    world.healthy(b)


@case(350, lambda: nested(policy=Quantum(5.0, 1.0)))
def unparked(world: World) -> Cases:
    (pair,) = world.fill("p", group=2)
    (a,) = world.fill("a", group=0)
    world.managed(a).backoff.park.until = WallTime(world.wall + 10)
    yield Case(world, pair, group=2)
    world.tick(11)


@case(355)
def no_call(world: World) -> Cases:
    _, b = world.fill("a", "b")
    world.command(PinSeat, b)
    c = world.seat(0, 2)
    world.at_gate(c, "c")
    world.wall += 30
    yield Case(world, c)
    world.call(c)


@case(360, lambda: booted(policy=Quantum(30.0, 5.0)))
def policy(world: World) -> Cases:
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    world.tick(10)
    world.traffic(a, waiting=1)
    yield Case(world, a)
    world.later(25)
    world.tick(1)


@case(370)
def room(world: World) -> Cases:
    a, b = world.fill("a", "b")
    yield Case(world, a)
    world.command(ParkSeat, b)
    world.finish()


def test_each_row_has_one_number_and_a_case() -> None:
    numbers = [row.nr for row in ROWS]
    assert numbers == sorted({*numbers})
    assert numbers == list(CASES)


@pytest.mark.parametrize("nr", CASES)
def test_a_row_arises_and_is_removed(nr: int) -> None:
    story = CASES[nr]()
    world, seat, group = next(story)

    def holds() -> bool:
        found = obstacles.obstacles(world.node, world.managed(seat), world.groups[group], world.now)
        return nr in {one.row.nr for one in found}

    assert holds()
    assert with_ids(of_node(world)) == []
    next(story, None)
    assert not holds()
    assert with_ids(of_node(world)) == []


def test_the_id_of_a_seat_in_a_text_is_found(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.node.broken = {"GPU-0": f"{a} holds too much"}
    assert with_ids(of_node(world))
    assert with_ids(of_effects([CommandReply(accepted=False, reason=f"{a} is pinned")]))


def test_no_text_of_a_seat_names_what_a_box_has_not() -> None:
    """A stack of one machine has no kubelet to look at, and no kubectl."""
    named = []
    for file in sorted(Path("services/gpu_manager/core").rglob("*.py")):
        tree = ast.parse(file.read_text())
        columns = (one for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for one in node.decorator_list)
        beside = {id(one) for column in columns for one in ast.walk(column)}
        beside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named += [n.value for n in texts if id(n) not in beside and ("kubelet" in n.value or "kubectl" in n.value)]
    assert named == []
