"""Seats that may be activated on another group than the one they are on (rebinding). Pure.

Moves are pulled: a group that could take somebody in sees the parked seats of its peers beside its own, and the policy
names one of them or none. What cannot move is not offered: pods that opted out, backends that cannot, and whatever the
driver has refused once. ``docs/decisions/014-moves-are-pulled.md``.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from kybernate.annotations import REBALANCE
from kybernate.policy import SeatView
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import looking, overlap
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState

MOVING_BACKENDS = ("cuda", "fake")
"""Those that restore through the driver's checkpoint, which can place a process on another GPU."""


def seats_elsewhere(board: "Board", group: Group, now: Now) -> tuple[SeatView, ...]:
    """Parked seats of other groups that somebody wants and that could be activated on this one."""
    names = {peer.name for peer in board.peers[group.name]}
    rows = [row for row in board.rows.values() if row.group.name in names and row.state is S.PARKED] if names else []
    for row in rows:
        if row.seat not in board.away and row.moves_after <= now.wall and may_move(board, row):
            board.away[row.seat] = looking.seat_view(board, row, now, on=group)
    views = [(row, board.away[row.seat]) for row in rows if row.seat in board.away]
    return tuple(seat for row, seat in views if looking.asked_for(seat) and at_hand(board, row, group))


def at_hand(board: "Board", row: Row, group: Group) -> bool:
    """Whether this group may bring a seat back: no switch of another one does so already.

    A drain that makes room for it there is called off if it can come here without one.
    """
    others = [operation for operation in board.operations.values() if operation.group != group.name]
    if row.state is not S.PARKED:
        return True
    if any(row.seat in operation.asked for operation in others):  # its checkpointer may have been told already
        return False
    operation = next((operation for operation in others if operation.winner == row.seat), None)
    if operation is None:
        return True
    return operation.phase == "draining" and sum(one.lease for one in board.seats_of(group)) < group.slots


def why_fixed(board: "Board", row: Row) -> str:
    """Why this seat stays on its group although its profile rebalances; empty when it may move, or has nowhere to."""
    if row.pod is None or not board.peers[row.group.name]:
        return ""
    if not row.pod.notes.rebalance:
        return f"pod {row.pod.pod} opted out ({REBALANCE})"
    if row.pod.backend not in MOVING_BACKENDS:
        return f"backend {row.pod.backend} cannot restore on other GPUs"
    return row.fixed or board.fixed


def may_move(board: "Board", row: Row) -> bool:
    """Whether a parked seat could be activated on another group, as far as this tells."""
    return row.state is S.PARKED and bool(board.peers[row.group.name]) and not why_fixed(board, row)


def home_busy(board: "Board", row: Row, now: Now) -> bool:
    """Whether the group that a parked seat is on has no slot for it now."""
    group = row.group
    paused = board.pause_until.get(group.name, 0.0) > now.wall
    if paused or group.name in board.operations or looking.strangers_on(board, group):
        return True
    if not group.seat_ids:  # a shelter (``owned``): its GPUs are no group of this configuration
        return True
    return not looking.room(board, row) or overlap.claimed_for(board, group, now) is not None


def group_at(board: "Board", row: Row, gpus: Collection[str]) -> Group | None:
    """The group that a seat is on when its memory is on these GPUs; None where they do not tell.

    Where groups share GPUs, several fit: only groups of its own size count, and the one where it was goes first.
    """
    if not gpus:
        return None
    known = (row.group, row.home, *board.groups)
    return next((g for g in known if len(g.gpus) == len(row.home.gpus) and {*gpus} <= {u.uuid for u in g.gpus}), None)
