"""Permissions to start: until when one may lead to a process, and what shows that none comes of it any more. Pure.

The hold of a start ends by ``over`` alone. kyb-run forks, and its child looks at the end of the permission as the last
thing before it becomes the engine: kyb-run without a child after that end is proof, and a container that is gone is
proof at once. kubelet's way has no such end, as the container runtime does not know it: the pods show no container
after the time that kubelet and runtime may take, counted while kubelet answers.
"""

from kybernate.messages import SeatProgress
from services.gpu_manager.core.facts import Process, Ticket
from services.gpu_manager.core.inputs import Now, StartCall, WallTime
from services.gpu_manager.core.managed_seat import ManagedSeat

INSIDE_SECONDS = 30.0
"""Wall: how long kyb-run may take from its ticket to its engine. It needs milliseconds; a busy machine seconds."""
KUBELET_SECONDS = 270.0
"""The same of kubelet's way: its call, and a runtime may take two minutes each to create and to start a container."""
LONGEST_GAP_SECONDS = 10.0
"""Wall: between two reads of the pods kubelet counts as answering for at most so long."""


def opened(seat: ManagedSeat, call: StartCall, now: Now) -> WallTime:
    """A permission is given to this call now; returns its end."""
    gate = seat.gate
    gate.given, gate.given_call, gate.answered_seconds = now.wall, call.since, 0.0
    gate.expires = now.wall + (INSIDE_SECONDS if call.inside else KUBELET_SECONDS)
    return gate.expires


def recovered(seat: ManagedSeat, end: WallTime, now: Now) -> None:
    """A manager has started: what it does not know of the permission lasts from now on. ``end``: as its folder says."""
    gate = seat.gate
    gate.given, gate.answered_seconds = now.wall, 0.0
    latest = now.wall + (INSIDE_SECONDS if seat.starts_inside else KUBELET_SECONDS)
    gate.expires = min(end, latest)


def answered(seat: ManagedSeat, gap: float, now: Now) -> None:
    """kubelet has answered, ``gap`` wall seconds after its answer before, and showed what the seat's pod has."""
    seat.gate.answered_seconds += max(0.0, min(gap, LONGEST_GAP_SECONDS, now.wall - seat.gate.given))


def inherited(seat: ManagedSeat, former: ManagedSeat) -> None:
    """The open ticket of the former owner may be this one's."""
    gate = former.gate
    seat.gate.given, seat.gate.expires, seat.gate.answered_seconds = gate.given, gate.expires, gate.answered_seconds


def used(seat: ManagedSeat) -> None:
    """A process of it was seen: nothing else comes of it."""
    seat.gate.expires = WallTime(0.0)


def shows_none(seat: ManagedSeat, seen: SeatProgress, asked_at: WallTime) -> bool:
    """True if an answer "gone" shows that nothing of the seat lives, nor comes of a permission of kyb-run."""
    permitted = seat.facts.waits or seat.facts.process is Process.LOADS
    return not (permitted and seen.keeper) or asked_at > seat.gate.expires


def over(seat: ManagedSeat) -> bool:
    """True if nothing comes of kubelet's ticket any more; an answer of the checkpointer (``shows_none``) ends that of
    kyb-run.

    Its pod was seen in deletion and is gone, which proves nothing about the ticket of a former owner; or no read of the
    pods shows its container, for as long as it may take.
    """
    ended = seat.pod_ends and seat.pod_misses >= 2 and seat.facts.ticket is not Ticket.FORMER
    return ended or (not seat.starts_inside and seat.gate.answered_seconds >= KUBELET_SECONDS)
