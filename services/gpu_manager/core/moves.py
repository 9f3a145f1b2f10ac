"""The life of a move: a seat comes to another group of its pool. Pure.

 1 asked      a group's policy has the waiting seats of its pool in view (``pool.full_view``), or an
              operator names seat and group (``operations``: ``NodeState.moves``; ``view.seats_for``)
 2 may it     its pod, its backend, the driver, its container (``why_immovable``: row 150 of the list); no failed move
              of it a short time before (row 310); no other group brings it (row 320)
 3 costs      the cheapest way that it has (``way``, ``seconds``)
 4 leaves     ordered while it serves, it is drained and parked at home first (``Operations.expels``)
 5 pulled     the policy of the other group chooses it for a free slot or for the place of a victim, which drains
              (``arbiter._grant``, ``_evict``)
 6 begins     by its copy: it has the GPUs of the other group from here on (``switch.lease``); by a restart: its copy
              is dropped, and its place there kept (``start_there``)
 7 carried    one job restores the copy with a map of GPUs (``switch._send``); or its container ends, and calls the gate
    out       there (``arbiter._decide``, ``give_ticket``)
 8 arrives    it serves, and the duration is learned (``reports._activated``, ``on_engine_answer``)
 9 fails      it is parked where it was and stays for a while, or for ever (``failed``); a start that fails is followed
              by one at home (``NodeState.transition``)
10 ends       its order is over (``operations._result``)

Until its job is sent (7 where a victim leaves, else 6) nothing has changed for the seat: a request that ends, an
obstacle, or a free slot at home turns it back (``switch._drain``). From then on it has left its group, and only 9
brings it back. The seat's engine is asked in 7 alone.

Ways: ``map``: the driver restores its copy on other GPUs. ``restart``: its engine ends and starts there, without its
copy.
"""

from kybernate.annotations import REBALANCE
from kybernate.engines import DRIVER_BACKENDS
from kybernate.messages import SeatProgress
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import GroupState, NodeState

S = SeatState

COLD_SECONDS = 60.0
"""Model seconds that a start is assumed to take until one was measured."""
HEADS_SECONDS = 30.0
"""Wall: how long a seat that drops its copy to start on another group keeps its place there."""
_NO_WAY_SECONDS = 3600.0
MAP, RESTART = "map", "restart"
"""The ways."""


# --- may it, and what it costs ----------------------------------------------------------------------------------------


def _no_map(node: NodeState, seat: ManagedSeat) -> str:
    if seat.facts.at_home:
        return "it has no copy"
    if seat.group.is_mig:
        return "the driver cannot checkpoint MIG instances"
    if seat.backend not in DRIVER_BACKENDS:
        return f"backend {seat.backend} cannot restore on other GPUs"
    return seat.durable.fixed or node.immovable


def _no_restart(seat: ManagedSeat) -> str:
    call, pod = seat.gate.call, seat.pod
    anywhere = pod is not None and pod.restarts_inside and pod.running
    if seat.facts.at_home and call is not None:
        anywhere = call.inside
    return "" if anywhere else "its container has its GPUs; with kyb-run in front it could start on others"


def _seconds(node: NodeState, seat: ManagedSeat, by: str) -> float:
    if by == MAP:
        return node.move_seconds
    if seat.facts.at_home:
        return 0.0  # it starts in any case
    return max(0.0, (seat.durable.costs.cold_seconds or COLD_SECONDS) - view.activate_seconds(seat))


def way(node: NodeState, seat: ManagedSeat) -> str:
    """The cheapest way that a seat of a pool has; empty: it has none."""
    if _bound(seat):
        return ""
    found = [one for one, refused in ((MAP, _no_map(node, seat)), (RESTART, _no_restart(seat))) if not refused]
    return min(found, key=lambda one: _seconds(node, seat, one), default="")


def why_immovable(node: NodeState, seat: ManagedSeat) -> str:
    """Why this seat stays on its group although that is part of a pool; empty: it may move, or has no other group."""
    if seat.pod is None or not node.groups[seat.group.name].peers or way(node, seat):
        return ""
    return _bound(seat) or f"{_no_map(node, seat)}; {_no_restart(seat)}"


def starts_on(node: NodeState, seat: ManagedSeat, group: Group) -> bool:
    """True for a parked seat that comes to this group by a start of its engine."""
    return seat.acts_as is S.PARKED and group.name != seat.group.name and way(node, seat) == RESTART


def _bound(seat: ManagedSeat) -> str:
    pod = seat.pod
    return "" if pod is None or pod.notes.rebalance else f"pod {pod.pod} opted out ({REBALANCE})"


def seconds(node: NodeState, seat: ManagedSeat) -> float:
    """What bringing it back on another group costs beyond bringing it back where it is; very much without a way."""
    found = way(node, seat)
    return _seconds(node, seat, found) if found else _NO_WAY_SECONDS


# --- it begins by a restart, and ends ---------------------------------------------------------------------------------


def start_there(node: NodeState, seat: ManagedSeat, group: Group, reason: str, now: Now) -> None:
    """End the engine of a parked seat, which has a place on the other group until it has started there."""
    node.groups[group.name].kept[seat.id] = now.wall + HEADS_SECONDS
    why = f"its engine ends here and starts on group {group.name}: {reason}"
    node.drop_copy(seat, why, now, node.next_epoch(now))


def step(node: NodeState, there: GroupState, now: Now) -> None:
    """A seat that starts, does not come, is asked for no more, or is ordered elsewhere gives its place on another group
    back."""
    for name, until in [*there.kept.items()]:
        seat = node.seats[name]
        gone = seat.acts_as is S.WAITING and seat.gate.called is not None and not view.wanted(node, seat, now)
        late = now.wall > until or seat.state not in (S.PARKED, S.BACKOFF, S.WAITING)
        if gone or late or node.ordered_to(seat) not in ("", there.group.name):
            del there.kept[name]


def failed(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> bool:
    """A seat was not restored on the other group; True: the move was refused, which is no fault of the group.

    (1) The driver refused it for this node, (2) for this seat, or its engine did not survive it: it is not tried again
    with this pod. (3) A step failed: it is not moved again before its own group had time to bring it back. What had no
    room yet, or was undone by a restart of the checkpointer, is tried again.
    """
    refused = progress.move_refused
    if refused == "node":  # (1)
        node.immovable = progress.reason
    elif refused or progress.outcome == "lost":  # (2)
        lost = "" if refused else "its engine did not survive a move, so it stays until its pod is replaced: "
        seat.durable.fixed = lost + progress.reason
    elif progress.failed:  # (3)
        seat.stay(now)
    return bool(refused)
