"""All interleavings of a small configuration: from each state on the way of one switch, so deep, with so many faults.

Two GPUs with a group and a seat each, and one group of both (2 ⊃ 1) with two seats. The seat of GPU 0 serves, one of
both GPUs is parked and has a request waiting, so a switch begins. Two states are equal if they differ only in the
identifiers of messages and in the numbers, not the order, of epochs.
"""

import hashlib
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.exploration.machine import ViolationError
from tests.exploration.search import Found
from tests.exploration.settle import fair_second, rest
from tests.exploration.world import SHAPES, Action, Setup, World

SMALL = Setup(SHAPES["pair"], "impatient", routers=1)
LEFT_OUT = ("call", "finish", "create", "time", "k-call", "gpus", "gate", "watch", "look", "tick", "ask")
"""What others begin, and observations that time brings: they would only make the same states later."""


@dataclass
class Exhausted:
    """The result. ``complete``: every state up to the depth was expanded."""

    depth: int
    budget: int
    starts: int
    states: int
    transitions: int
    found: Found | None
    seconds: float
    complete: bool

    def __str__(self) -> str:
        how = "all" if self.complete else "not all (time was over)"
        return (
            f"{how} interleavings from {self.starts} states of a switch, {self.depth} actions deep, "
            f"{self.budget} faults: {self.states} states, {self.transitions} transitions, {self.seconds:.0f} s"
        )


def prepared() -> World:
    """All seats were started once; a request for the seat of both GPUs arrives while the first one serves."""
    world = World(SMALL)
    first, _, both, _ = world.seats
    router = next(world.living())
    wanted = [both, first]
    for _ in range(600):
        fair_second(world)
        if world.model_of(wanted[0]) in router.served:
            wanted.pop(0)
        if not wanted:
            break
        if world.model_of(wanted[0]) not in router.models.values():
            router.call(world.model_of(wanted[0]), world.manager_name)
    else:
        raise AssertionError(f"{wanted} did not serve")
    for _ in range(8):
        fair_second(world)
    rest(world)
    router.call(world.model_of(both), world.manager_name)
    return world


def way(world: World) -> Iterator[tuple[bytes, tuple[Action, ...]]]:
    """The states on the way of the switch without faults, with the actions that lead there; until the request is
    answered by its engine."""
    router, done = next(world.living()), []
    for _ in range(400):
        yield pickle.dumps(world), tuple(done)
        if router.forwarded:
            return
        for action in [*choices(world)[:-1], ("gate",), ("look",), ("tick",), ("time", 0.5)]:
            if world.do(action):
                done.append(action)
                if action[0] not in ("look", "tick"):
                    break
    raise AssertionError("the switch of the small configuration does not end")


def choices(world: World) -> list[Action]:
    """What happens next, without faults: every message, step and answer, or half a second."""
    found = [action for _, action in world.possible() if action[0] not in LEFT_OUT]
    return [*dict.fromkeys(found), ("time", 0.5)]


def faults(world: World) -> list[Action]:
    """Crashes of each part and between durable steps, an engine that ends, a pod that is deleted, a lost message."""
    found: list[Action] = [("crash-manager",), ("crash-checkpointer",)]
    if world.manager is None:
        found = [("start-manager", 0.0, ""), ("start-manager", -3600.0, "ledger")]
    elif world.manager.crash_after is None:
        found += [("crash-after", 0), ("crash-after", 1)]
    if world.checkpointer is None:
        found += [("start-checkpointer", ""), ("start-checkpointer", "journal")]
    found += [("crash-engine", cid) for cid in world.machine.engines]
    found += [("force", uid) for uid in world.kubelet.api]
    return found + [("drop", *link) for link in world.bus.waiting()]


def exhaust(*, depth: int, budget: int, seconds: float = 1e9, every: int = 1) -> Exhausted:
    """All orders of ``choices`` and at most ``budget`` of ``faults``. ``every``: only each so-manieth start. What is
    down comes back without counting as a fault."""
    began, transitions = time.monotonic(), 0
    starts = list(way(prepared()))[::every]
    seen: dict[bytes, int] = {}
    frontier = [(state, path, budget) for state, path in starts]
    for level in range(depth):
        following = []
        for state, path, left in frontier:
            if time.monotonic() - began > seconds:
                return Exhausted(
                    level, budget, len(starts), len(seen), transitions, None, time.monotonic() - began, False
                )
            for action, after in _options(pickle.loads(state), left):
                world: World = pickle.loads(state)
                transitions += 1
                try:
                    if not world.do(action):
                        continue
                except Exception as error:
                    text = str(error) if isinstance(error, ViolationError) else f"{type(error).__name__}: {error}"
                    found = Found(0, SMALL, (*path, action), text, transitions, False)
                    took = time.monotonic() - began
                    return Exhausted(level + 1, budget, len(starts), len(seen), transitions, found, took, False)
                mark = fingerprint(world)
                if seen.get(mark, -1) < after:
                    seen[mark] = after
                    following.append((pickle.dumps(world), (*path, action), after))
        frontier = following
    return Exhausted(depth, budget, len(starts), len(seen), transitions, None, time.monotonic() - began, True)


def _options(world: World, left: int) -> list[tuple[Action, int]]:
    options = [(one, left) for one in choices(world)]
    for one in faults(world):
        back = str(one[0]).startswith("start-")
        if back or left:
            options.append((one, left if back else left - 1))
    return options


# --- equal states -----------------------------------------------------------------------------------------------------

_VOLATILE = re.compile(r"(?:id|at|started)='?[0-9a-f.]+'?,? ?|0x[0-9a-f]+")
_BIG = re.compile(r"\d{12,}")


def fingerprint(world: World) -> bytes:
    """A state, without identifiers of messages; epochs count by their order only."""
    parts = [world.machine.engines, world.kubelet.pods, world.kubelet.api, world.kubelet.mirror]
    parts += [world.kubelet.folders, world.kubelet.changes, world.kubelet.resources, world.kubelet.calls, world.disk]
    parts += [world.bus, world.file, world.clock, world.truth.closed, world.truth.fence, world.stalled_until]
    if world.manager is not None:
        manager, node = world.manager, world.manager.board.node
        parts += [manager.inbox, manager.questions, manager.dirty, manager.calling, manager.crash_after]
        parts += [node.seats, node.switches, node.claims, node.levels, node.routers, node.epoch, node.bus_up]
        parts += [[(group.backoff, group.wake) for group in node.groups.values()], node.recovered]
    if world.checkpointer is not None:
        one = world.checkpointer
        parts += [one.runs, one.releases, one.reserved, one.reports, one.trouble, one.lands]
    for router in world.living():
        of = [router.models, router.forwarded, router.querying, router.commands, router.reads, router.wants_read]
        parts += [of, router.beaten, router.traffic.table.upstreams, router.traffic.trust.__dict__]
    text = _VOLATILE.sub("", repr(parts))
    order = {number: str(n) for n, number in enumerate(sorted(set(_BIG.findall(text)), key=int))}
    text = _BIG.sub(lambda found: f"#{order[found[0]]}", text)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
