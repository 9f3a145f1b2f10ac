"""Seats that rest are looked at: evidence that one holds nothing is of one moment. An engine that lives may be called
past the router, and something else may compute in its container. Pure.

The driver's list by container, which is read anyway, is compared with what a seat may keep. One that has more in two
reads in a row holds its GPUs: beside others it is ended, else it is active, and is parked like any other.
"""

from collections.abc import Mapping

from kybernate.engines import ENGINE_BACKENDS
from kybernate.footprint import most_residue
from kybernate.seat import SeatState
from kybernate.sizes import format_bytes
from services.gpu_manager.core import view
from services.gpu_manager.core.facts import Promise, Trigger
from services.gpu_manager.core.inputs import ForeignProcessesSeen, Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState, Woke

S, T = SeatState, Trigger

TOLERANCE_BYTES = 256 * 2**20
"""What a container may hold on a GPU beyond that: contexts of tools that look at it. A guess."""


def containers(node: NodeState) -> frozenset[str]:
    """Those of the seats that rest."""
    return frozenset(seat.durable.container_id for seat in node.seats.values() if _rests(node, seat))


def awake(node: NodeState, seen: ForeignProcessesSeen) -> list[ManagedSeat]:
    """The resting seats that hold more than they may, since before the reading began."""
    resting = [seat for seat in node.seats.values() if seen.held.get(seat.durable.container_id) and _rests(node, seat)]
    return [seat for seat in resting if seen.since > seat.entered_wall and _above(seat, seen)]


def look(node: NodeState, seen: ForeignProcessesSeen, now: Now) -> None:
    """What follows for each of them: with room on these GPUs it is active, else it is ended and starts cold."""
    for seat in awake(node, seen):
        held = _above(seat, seen)
        pool = (seat.group, *(node.groups[seat.group.name].peers))
        seat.group = next((group for group in pool if held.keys() & {*group.uuids, *group.physical}), seat.group)
        text = (
            f"{format_bytes(sum(held.values()))} of GPU memory are in use in its container while it rests: it was "
            "called past the router, or something computes in its container"
        )
        room = view.room(node, seat)
        if not room:
            seat.learn(conflict=True)
        serves = room and seat.acts_as is S.PARKED
        if serves:
            seat.usage.active_since = seat.usage.busy = now.model
        else:
            text = f"{text}; it is ended"
        times = node.woke[seat.id].times if seat.id in node.woke else 0
        node.woke[seat.id] = Woke(seat.model, times + 1, now.unix, text)
        node.transition(seat, T.WOKE if serves else T.FOUND, now, reason=text)


def _rests(node: NodeState, seat: ManagedSeat) -> bool:
    """It holds nothing by evidence, and no job has it that may change this."""
    if seat.pod is None or not seat.durable.container_id or seat.facts.promise is Promise.DROPS:
        return False
    comes = any(one.incoming == seat.id and one.job.sent is not None for one in node.switches.values())
    return seat.state in (S.PARKED, S.WAITING, S.BACKOFF) and not comes


def _above(seat: ManagedSeat, seen: ForeignProcessesSeen) -> Mapping[str, int]:
    """The bytes by GPU, where they are more than it may keep there."""
    held = seen.held.get(seat.durable.container_id, {})
    return {gpu: size for gpu, size in held.items() if size > _kept(seat, gpu) + TOLERANCE_BYTES}


def _kept(seat: ManagedSeat, gpu: str) -> int:
    """What its processes may keep there: as measured at its park; nothing without a process."""
    if seat.acts_as is not S.PARKED:
        return 0
    if seat.durable.measured or seat.backend not in ENGINE_BACKENDS:
        return seat.residue_on(gpu)
    return most_residue(seat.size // len(seat.group.gpus))
