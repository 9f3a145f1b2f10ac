"""Each row of the list: a case in which it arises, and what removes it."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

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

Act = Callable[[], object]


@dataclass
class Case:
    """After it was made, the row holds for the seat on the group; after ``ends`` it does not."""

    seat: str
    ends: Act
    group: int = 0


def _drained() -> tuple[World, Case]:
    world = booted()
    (a,) = world.fill("a")
    world.order(DrainNode, group="G0")
    world.finish()
    return world, Case(a, lambda: world.order(ResumeNode, group="G0"))


def _foreign() -> tuple[World, Case]:
    world = booted()
    a, _ = world.fill("a", "b")
    world.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 1, "x"),)))
    return world, Case(a, lambda: world.receive(ForeignProcessesSeen(())))


def _broken() -> tuple[World, Case]:
    world = booted()
    a, _ = world.fill("a", "b")
    world.node.broken = {"GPU-0": "two groups"}
    return world, Case(a, world.tick)


def _refused() -> tuple[World, Case]:
    world = booted()
    a = world.seat(0, 0)
    world.pod(a, "a")
    whole = world.pods[a]
    world.pods[a] = replace(whole, resources=("kyb.ai/a", "kyb.ai/b"))
    world.look()

    def mended() -> None:
        world.pods[a] = whole
        world.look()

    return world, Case(a, mended)


def _quarantined() -> tuple[World, Case]:
    world = booted()
    a, b = world.drained_switch()
    world.progress(world.job(), "quarantined", "pending")
    return world, Case(a, lambda: world.look_at(b, "active"))


def _immovable() -> tuple[World, Case]:
    world = pooled()
    (a,) = world.fill("a")
    world.annotate(a, rebalance="false")
    return world, Case(a, lambda: world.annotate(a, rebalance="true"), group=1)


def _pinned() -> tuple[World, Case]:
    world = booted()
    a, b = world.fill("a", "b")
    world.command(PinSeat, b)
    return world, Case(a, lambda: world.command(UnpinSeat, b))


def _unlocated() -> tuple[World, Case]:
    world = pooled()
    a, b = world.fill("a", "b")
    world.managed(b).learn(unlocated=True)
    return world, Case(a, lambda: world.managed(b).learn(unlocated=False))


def _failed() -> tuple[World, Case]:
    world = booted()
    a = world.seat(0, 0)
    world.serve(a, "a")
    for _ in range(2):
        world.managed(a).failed("exited with code 1", world.now)
    world.exit(a)
    return world, Case(a, lambda: world.command(ActivateSeat, a))


def _container() -> tuple[World, Case]:
    world = booted()
    _, b = world.fill("a", "b")
    world.exit(b)
    assert world.state(b) is S.BACKOFF
    return world, Case(b, lambda: world.call(b))


def _start_gate() -> tuple[World, Case]:
    world = booted()
    a = world.seat(0, 0)
    world.pod(a, "a")
    return world, Case(a, lambda: world.call(a))


def _idle() -> tuple[World, Case]:
    world = booted()
    a, _ = world.fill("a", "b")
    return world, Case(a, lambda: world.traffic(a, waiting=1))


def _routers() -> tuple[World, Case]:
    world = booted()
    a, _ = world.fill("a", "b")
    world.receive(BusChanged(False))

    def back() -> None:
        world.receive(BusChanged(True))
        world.beat()
        world.tick(5)

    return world, Case(a, back)


def _pause() -> tuple[World, Case]:
    world = booted()
    a, _ = world.drained_switch()
    world.progress(world.job(), "active", "pending")
    return world, Case(a, lambda: world.tick(1))


def _barrier() -> tuple[World, Case]:
    world = nested(policy=Quantum(5.0, 1.0))
    (pair,) = world.fill("p", group=2)
    (a,), (b,) = world.fill("a", group=0), world.fill("b", group=1)
    for seat in (a, b):
        world.traffic(seat, in_flight=1)
    world.tick(60)
    world.beat()
    world.traffic(pair, waiting=1, oldest=500.0)
    world.quiet(a)
    world.progress(world.job())
    return world, Case(a, lambda: world.traffic(pair))


def _switch() -> tuple[World, Case]:
    world = booted()
    a, _ = world.drained_switch()
    return world, Case(a, world.finish)


def _lanes() -> tuple[World, Case]:
    world = booted(*(make_group(f"G{n}", [n], 2) for n in range(2)))
    (a, _), (c, _) = (world.fill(f"a{n}", f"b{n}", group=n) for n in range(2))
    world.tick(30)
    world.configure(lanes=(Lane(frozenset({"GPU-0", "GPU-1"}), 1),))
    world.traffic(a, waiting=1)
    return world, Case(c, world.finish, group=1)


def _rests() -> tuple[World, Case]:
    world = booted()
    a, b = world.drained_switch()
    world.progress(world.job(), activate="parked")
    world.traffic(b, waiting=1)
    return world, Case(a, lambda: setattr(world.managed(a).backoff.activation, "until", WallTime(0.0)))


def _stays() -> tuple[World, Case]:
    world = pooled()
    (a,) = world.fill("a")
    world.managed(a).backoff.move.until = WallTime(world.wall + 10)
    return world, Case(a, lambda: world.tick(11), group=1)


def _moving() -> tuple[World, Case]:
    world = pooled()
    a, _ = world.fill("a", "b")
    world.fill("c", group=1)
    world.order(MigrateSeat, seat=a, to="G1")
    return world, Case(a, world.finish)


def _unproven() -> tuple[World, Case]:
    world = booted()
    a, b = world.fill("a", "b")
    world.vanish(b)
    return world, Case(a, lambda: world.end_processes(b))


def _starting() -> tuple[World, Case]:
    world = booted()
    (a,) = world.fill("a")
    b = world.seat(0, 1)
    world.tick(10)
    world.pod(b, "b")
    world.call(b)
    world.finish()
    world.start(b)
    return world, Case(a, lambda: world.healthy(b))


def _unparked() -> tuple[World, Case]:
    world = nested(policy=Quantum(5.0, 1.0))
    (pair,) = world.fill("p", group=2)
    (a,) = world.fill("a", group=0)
    world.managed(a).backoff.park.until = WallTime(world.wall + 10)
    return world, Case(pair, lambda: world.tick(11), group=2)


def _no_call() -> tuple[World, Case]:
    world = booted()
    _, b = world.fill("a", "b")
    world.command(PinSeat, b)
    c = world.seat(0, 2)
    world.pod(c, "c")
    world.call(c)
    world.wall += 30
    return world, Case(c, lambda: world.call(c))


def _policy() -> tuple[World, Case]:
    world = booted(policy=Quantum(30.0, 5.0))
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    world.tick(10)
    world.traffic(a, waiting=1)

    def turn() -> None:
        world.tick(25)
        world.beat()
        world.tick(1)

    return world, Case(a, turn)


def _room() -> tuple[World, Case]:
    world = booted()
    a, b = world.fill("a", "b")

    def parked() -> None:
        world.command(ParkSeat, b)
        world.finish()

    return world, Case(a, parked)


CASES: dict[int, Callable[[], tuple[World, Case]]] = {
    100: _drained,
    110: _foreign,
    120: _broken,
    130: _refused,
    140: _quarantined,
    150: _immovable,
    170: _pinned,
    220: _unlocated,
    225: _failed,
    230: _container,
    240: _start_gate,
    250: _idle,
    260: _routers,
    270: _pause,
    280: _barrier,
    290: _switch,
    295: _lanes,
    300: _rests,
    310: _stays,
    320: _moving,
    330: _unproven,
    340: _starting,
    350: _unparked,
    355: _no_call,
    360: _policy,
    370: _room,
}


def test_each_row_has_one_number_and_a_case() -> None:
    numbers = [row.nr for row in ROWS]
    assert numbers == sorted({*numbers})
    assert numbers == list(CASES)


@pytest.mark.parametrize("nr", CASES)
def test_a_row_arises_and_is_removed(nr: int) -> None:
    world, case = CASES[nr]()

    def holds() -> bool:
        found = obstacles.obstacles(world.node, world.managed(case.seat), world.groups[case.group], world.now)
        return nr in {one.row.nr for one in found}

    assert holds()
    assert with_ids(of_node(world)) == []
    case.ends()
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
