"""Commands: accepted or refused within the same call, with a reason that the caller can act on. Pure."""

from kybernate.messages import (
    ActivateSeat,
    Command,
    CommandReply,
    ParkSeat,
    PinSeat,
    SeatCommand,
    SeatPinned,
    SeatUnpinned,
    UnpinSeat,
)
from kybernate.seat import SeatState
from services.gpu_manager.core import switch
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import PINNED, first, lasting, leaving, no, refusal, seat_refused
from services.gpu_manager.core.riders.operations import DRAINED
from services.gpu_manager.core.state import NodeState, Rider
from services.gpu_manager.failures import Failures

S = SeatState

WISH_SECONDS = 600.0
"""Wall: an operator's wish that could not be met lapses after this."""


def answer(node: NodeState, command: Command, now: Now) -> CommandReply:
    """Accept a command, or refuse it with a reason."""
    if not isinstance(command, SeatCommand) or (act := _ACTS.get(type(command))) is None:
        for rider in node.riders[Rider.answers]:
            if (reply := rider.answers(node, command, now)) is not None:
                return reply
        return no("unsupported", f"this manager does not know {type(command).__name__}")
    refused = seat_refused(node, command.seat)
    if refused is not None and not (refused.code == "quarantined" and isinstance(command, UnpinSeat)):
        return refused  # a pin would outlast the quarantine: it may be taken away
    return act(node, node.seats[command.seat], command, now)


def _activate(node: NodeState, seat: ManagedSeat, command: Command, now: Now) -> CommandReply:
    if seat.state is S.ACTIVE:
        return _yes(seat, now)
    router = command.actor == "router"
    if not router:
        _end_backoffs(node, seat)
    if found := (lasting if router else refusal)(node, seat, now):
        return found.refusal(seat, found.text if router else "")  # its answers name the model
    seat.cause = command.cause
    if router:
        node.levels.poke(command.actor, seat.id, command.cause, now)
    else:
        seat.usage.wanted_since, seat.usage.wanted_until = now.model, now.wall + WISH_SECONDS
    return _yes(seat, now)


def _park(node: NodeState, seat: ManagedSeat, command: Command, now: Now) -> CommandReply:
    if seat.pinned:
        return no("pinned", f"{seat.name} is pinned; unpin it first", epoch=seat.epoch)
    seat.usage.wanted_since = None
    if (under_way := node.switch_leaving(seat)) is not None:
        under_way.ordered = True
    if seat.state in (S.PARKED, S.PARKING, S.DRAINING):
        return _yes(seat)
    if seat.state is not S.ACTIVE:
        text = f"{seat.name} is {seat.state}; only an active seat can be parked"
        return no("not-active", text, epoch=seat.epoch)
    _end_backoffs(node, seat)
    if found := first(leaving(node, seat, now)):
        return found.refusal(seat)
    seat.cause = command.cause
    switch.drain(node, seat, None, f"{command.actor} asked for it", now, ordered=True)
    return _yes(seat)


def _pin(node: NodeState, seat: ManagedSeat, command: Command, now: Now) -> CommandReply:
    if found := refusal(node, seat, now, (PINNED,) if seat.durable.pinned else (DRAINED, PINNED)):
        return found.refusal(seat)
    seat.cause = command.cause
    if not seat.durable.pinned:
        seat.durable.pinned = True
        node.emit(seat, SeatPinned, now, cause=command.cause, previous=seat.state)
    return _yes(seat)


def _unpin(node: NodeState, seat: ManagedSeat, command: Command, now: Now) -> CommandReply:
    if seat.pod is not None and seat.pod.notes.pin:
        text = f"pod {seat.pod.pod} pins {seat.name} by its annotation kyb.ai/pin; take that away"
        return no("pinned", text, epoch=seat.epoch)
    if seat.durable.pinned:
        seat.durable.pinned = False
        node.emit(seat, SeatUnpinned, now, cause=command.cause, previous=seat.state)
    return _yes(seat)


_ACTS = {ActivateSeat: _activate, ParkSeat: _park, PinSeat: _pin, UnpinSeat: _unpin}


def _end_backoffs(node: NodeState, seat: ManagedSeat) -> None:
    """An operator asks for it now: what failed before does not count."""
    seat.durable.failed = Failures()
    for backoff in (seat.backoff.activation, seat.backoff.move, node.groups[seat.group.name].backoff):
        backoff.until = WallTime(0.0)


def _yes(seat: ManagedSeat, now: Now | None = None) -> CommandReply:
    at = None if now is None else float(now.unix)
    return CommandReply(accepted=True, at=at, epoch=seat.epoch, op=seat.op)
