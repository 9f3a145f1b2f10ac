"""Commands: taken or refused within the same call, with a reason that the asker can act on. Pure."""

from typing import TYPE_CHECKING

from kybernate.messages import (
    ActivateSeat,
    Command,
    CommandReply,
    ParkSeat,
    PinSeat,
    SeatPinned,
    SeatUnpinned,
    UnpinSeat,
)
from kybernate.seat import SeatState
from services.gpu_manager import rebinding
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState

WISH_SECONDS = 600.0
"""Wall: an operator's wish that could not be met lapses after this, unless the command carried a deadline."""


def answer(board: "Board", command: Command, now: Now) -> CommandReply:
    """Take a command in, or say why not."""
    row = board.rows.get(command.seat)
    if row is None or row.state is S.FREE:
        return _no("unknown-seat", f"no pod owns seat {command.seat} on node {board.node}")
    if not board.recovered:
        return _no("not-ready", "the node's manager has just started and is still looking at its seats", retry=1.0)
    if command.deadline is not None and command.deadline < now.unix:
        return _no("too-late", "the command arrived after its deadline")
    if command.if_epoch is not None and command.if_epoch != row.epoch:
        return _no("stale-epoch", f"seat {row.seat} is at epoch {row.epoch} now", epoch=row.epoch)
    if row.state is S.QUARANTINED:
        return _no("quarantined", f"seat {row.seat} is quarantined: {row.reason}", epoch=row.epoch)
    if row.state is S.RELEASING:
        return _no("deleted", f"the pod {row.pod.pod if row.pod else ''} of seat {row.seat} is being deleted")
    match command:
        case ActivateSeat():
            return _activate(board, row, command, now)
        case ParkSeat():
            return _park(board, row, command, now)
        case PinSeat():
            return _pin(board, row, command, now)
        case UnpinSeat():
            return _unpin(board, row, command, now)
    return _no("unsupported", f"this manager does not know {type(command).__name__}")


def _activate(board: "Board", row: Row, command: Command, now: Now) -> CommandReply:
    if row.state is S.ACTIVE:
        return _yes(row)
    pinned = _pinned_holders(board, row)
    if pinned:
        text = f"group {row.group.name} is kept by pinned {pinned}; unpin it first"
        return _no("pinned", text, epoch=row.epoch, retry=30.0)
    row.cause = command.cause
    if command.actor == "router":
        board.levels.poke(command.actor, row.seat, command.cause, now)
    else:
        row.wanted_since, row.rests_until = now.model, 0.0
        left = WISH_SECONDS if command.deadline is None else command.deadline - now.unix
        row.wanted_until = now.wall + left
    return _yes(row)


def _park(board: "Board", row: Row, command: Command, now: Now) -> CommandReply:
    if row.is_pinned:
        return _no("pinned", f"seat {row.seat} is pinned; unpin it first", epoch=row.epoch)
    row.wanted_since = None
    leaving = board.leaving(row.seat)
    if leaving is not None:
        leaving.ordered = True
    if row.state in (S.PARKED, S.PARKING, S.DRAINING):
        return _yes(row)
    if row.state is not S.ACTIVE:
        return _no("not-active", f"seat {row.seat} is {row.state}; only an active seat can be parked", epoch=row.epoch)
    if row.group.name in board.operations:
        return _no("busy", f"group {row.group.name} is in the middle of a switch", epoch=row.epoch, retry=2.0)
    if not board.bus_up or not board.routers.settled(now):
        return _no("not-ready", "not every router was heard yet since a restart or outage", epoch=row.epoch, retry=3.0)
    row.cause = command.cause
    board.drain(row, None, f"{command.actor} asked for it", now).ordered = True
    return _yes(row)


def _pin(board: "Board", row: Row, command: Command, now: Now) -> CommandReply:
    pinned = _pinned_holders(board, row)
    if pinned:
        return _no("pinned", f"every slot of group {row.group.name} is kept by pinned {pinned}", epoch=row.epoch)
    row.cause = command.cause
    if not row.pinned:
        row.pinned = True
        board.tell(row, SeatPinned, now, cause=command.cause, previous=row.state)
    return _yes(row)


def _unpin(board: "Board", row: Row, command: Command, now: Now) -> CommandReply:
    if row.pod is not None and row.pod.pin:
        text = f"pod {row.pod.pod} pins seat {row.seat} by its annotation kyb.ai/pin; take that away"
        return _no("pinned", text, epoch=row.epoch)
    if row.pinned:
        row.pinned = False
        board.tell(row, SeatUnpinned, now, cause=command.cause, previous=row.state)
    return _yes(row)


def _pinned_holders(board: "Board", row: Row) -> str:
    """Other pinned seats, when they fill every slot of every group that the seat could be on; else empty."""
    groups = [row.group, *(board.peers[row.group.name] if rebinding.may_move(board, row) else ())]
    full = []
    for group in groups:
        pinned = [other.seat for other in board.seats_of(group) if other.is_pinned and other.seat != row.seat]
        if len(pinned) < group.slots:
            return ""
        full += pinned
    return ", ".join(full)


def _yes(row: Row) -> CommandReply:
    return CommandReply(accepted=True, epoch=row.epoch, op=row.op)


def _no(code: str, reason: str, *, epoch: int = 0, retry: float | None = None) -> CommandReply:
    return CommandReply(accepted=False, code=code, reason=reason, epoch=epoch, retry_after_seconds=retry)
