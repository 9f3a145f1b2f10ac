"""What a message changes on the board, and for which groups something may follow from it. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kybernate.messages import (
    Command,
    DrainAck,
    JobProgress,
    JobStatus,
    Presence,
    TrafficSignal,
)
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import commands, late_binding, looking, outcomes, owners, recovery, switching
from services.gpu_manager.inputs import (
    AskedOverHttp,
    BusChanged,
    DrainAnnounced,
    EngineSeen,
    JobAnswered,
    JobsTold,
    Now,
    PodsSeen,
    Recovered,
    Retargeted,
    StartCalls,
    Stranger,
    StrangersSeen,
    Tick,
)

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState


def take(board: "Board", message: object, now: Now) -> None:
    """Take one message in. Raises TypeError for one that it does not know."""
    match message:
        case TrafficSignal():
            board.repeated = not board.levels.hear(message, now)
            looking.heard(board, message, now)
        case Presence(component="router"):
            board.routers.hear(message, now)
        case DrainAck():
            board.routers.acknowledge(message)
        case Command():
            board.said.append(commands.answer(board, message, now))
        case JobProgress(status=status):
            outcomes.told(board, status, now)
        case JobsTold(reply=reply, asked=asked):
            for status in reply.jobs:
                outcomes.told(board, status, now)
            outcomes.forgotten(board, set(asked) - {status.op for status in reply.jobs})
            owners.processes_told(board, reply.seats, now)
        case JobAnswered():
            switching.answered(board, message, now)
        case Retargeted():
            late_binding.answered(board, message, now)
        case PodsSeen(owners=seen):
            owners.pods_seen(board, seen, now)
        case StartCalls(calls=calls):
            owners.start_calls(board, calls, now)
        case EngineSeen():
            switching.engine_seen(board, message, now)
        case DrainAnnounced(seat=seat, epoch=epoch):
            operation = board.leaving(seat)
            if operation is not None and operation.epoch == epoch:
                operation.announced = True
        case BusChanged(connected=connected):
            _bus_changed(board, connected, now)
        case AskedOverHttp():
            board.routers.permit(now)
        case StrangersSeen(strangers=strangers):
            _strangers_seen(board, strangers)
        case Recovered():
            recovery.recover(board, message, now)
        case Presence() | Tick():
            pass
        case _:
            raise TypeError(f"the board does not know {type(message).__name__}")


def concerned(board: "Board", message: object) -> tuple[Group, ...]:
    """Groups for which a message may change something, those that share GPUs with them and those to which their
    seats may move; all when it is not plain."""
    beside: Mapping[str, tuple[Group, ...]] = board.peers
    match message:
        case Presence():
            plain = [group for group in board.groups if group.name in board.operations]
        case JobProgress(status=JobStatus(group=name)):
            plain = [group for group in board.groups if group.name == name]
        case JobAnswered(op=op) | Retargeted(op=op):
            plain = [group for group in board.groups if op.startswith(f"{group.name}-")]
        case _:
            row = board.rows.get(getattr(message, "seat", None) or "")
            plain = [row.group] if row is not None else list(board.groups)
            # Who is not parked moves nowhere, and ages are looked at with the next tick: there are many signals.
            alone = isinstance(message, TrafficSignal) and row is not None
            alone = alone and (board.repeated or row is None or row.state is not S.PARKED)
            beside = {} if alone else board.peers
    sharing = [o for group in plain for o in (*board.neighbours[group.name], *beside.get(group.name, ()))]
    return tuple({group.name: group for group in (*plain, *sharing)}.values())


def _strangers_seen(board: "Board", strangers: tuple[Stranger, ...]) -> None:
    """A group with a foreign process on one of its GPUs is quarantined until it is gone."""
    before = {group.name: looking.strangers_on(board, group) for group in board.groups}
    board.strangers = strangers
    for group in board.groups:
        why = looking.strangers_on(board, group)
        if bool(why) != bool(before[group.name]):
            board.say_decided(group, why or "no foreign process uses its GPUs any more")


def _bus_changed(board: "Board", connected: bool, now: Now) -> None:
    """Without the bus nothing is evicted and drains stand still; with it again, routers are heard first."""
    if connected and not board.bus_up:
        board.routers.unsettle(now)
        if board.bus_lost_at is not None:
            for operation in board.operations.values():
                operation.deadline += now.model - board.bus_lost_at
        board.bus_lost_at = None
    elif not connected and board.bus_up:
        board.bus_lost_at = now.model
    board.bus_up = connected
