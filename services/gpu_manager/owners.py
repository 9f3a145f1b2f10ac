"""Pods that own seats, their calls at the start gate, and the life of their processes. Pure."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kybernate.messages import ReleaseJob, SeatActivated, SeatProgress
from kybernate.seat import SeatState, Trigger
from services.gpu_manager import looking, rebinding
from services.gpu_manager.inputs import Now, StartCall
from services.gpu_manager.rows import Row
from services.gpu_manager.seat_pod import Owners, SeatPod

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger

START_DEADLINE_SECONDS = 270.0
"""Wall: a runtime may take two minutes each to create and to start a container."""

CLEARED = {"active": T.CLEARED_ACTIVE, "parked": T.CLEARED_PARKED, "gone": T.EXITED}
"""How quarantine ends, by what the driver reports."""

HAS_PROCESS = (S.STARTING, S.ACTIVE, S.DRAINING, S.PARKING, S.PARKED, S.ACTIVATING, S.MIGRATING, S.QUARANTINED)


def pods_seen(board: "Board", owners: Owners, now: Now) -> None:
    """Who owns which seat now. An owner that is missing twice in a row, and not listed any more, is gone."""
    seen = {pod.seat: pod for pod in owners.pods}
    for row in list(board.rows.values()):
        pod = seen.get(row.seat)
        if pod is None or (row.pod is not None and pod.uid != row.pod.uid):
            if pod is not None or row.pod is None or row.pod.uid not in owners.listed:
                _missed(board, row, now)
            if pod is not None and not pod.deleting:
                _inherited(board, row, pod, now)
            continue
        row.misses, row.confirmed = 0, row.confirmed + (row.seat not in owners.unproven)
        if row.state is not S.FREE:
            _owner_seen(board, row, pod, now)
        elif not pod.deleting:
            row.pod, row.started = pod, False
            board.go(row, T.ALLOCATED, now, epoch=board.next_epoch(now))
            if pod.running:
                _runs(board, row, pod, now)
        _at_gate(board, row, now)


def _missed(board: "Board", row: Row, now: Now) -> None:
    row.misses += 1
    if row.misses >= 2 and row.state not in (S.FREE, S.RELEASING):
        _delete(board, row, now)


def _inherited(board: "Board", row: Row, pod: SeatPod, now: Now) -> None:
    """Kubelet gave the seat to another pod, and a ticket given to the one before is open.

    The gate does not know who calls: it may have been the new pod's call, then the lease is its own. Not so when the
    new one waits at the gate for another ticket, or comes there later: it gets none before the open one is over.
    """
    if row.state is not S.RELEASING or row.misses < 2 or row.call is not None or not _may_come(row, now):
        return
    fresh = _freed(board, row, now)
    fresh.pod, fresh.misses = pod, 0
    board.go(fresh, T.ALLOCATED, now, epoch=board.next_epoch(now))
    fresh.ticket, fresh.ticket_open, fresh.ticket_wall, fresh.inherited = row.ticket, True, row.ticket_wall, True
    reason = "its call took the ticket of the pod that had its seat before"
    board.go(fresh, T.TICKET, now, epoch=board.next_epoch(now), reason=reason)
    if pod.running:
        _runs(board, fresh, pod, now)


def _owner_seen(board: "Board", row: Row, pod: SeatPod, now: Now) -> None:
    moved = row.pod is not None and row.pod.endpoint != pod.endpoint
    row.pod = pod
    if pod.deleting:
        row.ends = True
        if pod.running and (row.state is not S.RELEASING or row.ticket_open):
            _runs(board, row, pod, now)  # it started since the last look
        if row.state is not S.RELEASING:
            _delete(board, row, now)
    elif pod.running:
        _runs(board, row, pod, now)
    elif row.seen_running and row.state in HAS_PROCESS:
        exited(board, row, f"its container exited with code {pod.exit_code}", now)
    if moved and row.state is S.ACTIVE:
        board.tell(row, SeatActivated, now, previous=S.ACTIVE)


def _runs(board: "Board", row: Row, pod: SeatPod, now: Now) -> None:
    """A container runs. A new one had a ticket, or went past the gate: a kubelet that just restarted may skip it."""
    if pod.container_id == row.container_id or row.state is S.LOST:
        return
    if row.state is S.RELEASING:
        row.container_id, row.seen_running, row.ticket_open, row.processes_gone = pod.container_id, True, False, False
        return
    ungated = not row.ticket_open
    if row.state in HAS_PROCESS and row.state is not S.STARTING:
        exited(board, row, "its container was started again", now)
    if row.state is S.BACKOFF:
        board.go(row, T.CALLED, now, epoch=board.next_epoch(now))
    if row.state is S.WAITING:
        ungated = True
        board.go(row, T.TICKET, now, epoch=board.next_epoch(now), reason="its container started without a ticket")
    row.container_id, row.seen_running, row.ticket_open = pod.container_id, True, False
    if ungated and not looking.room(board, row):
        row.conflict = True
        reason = f"its container started without a ticket while others hold group {row.group.name}"
        board.go(row, T.QUARANTINE, now, epoch=board.next_epoch(now), reason=reason)


def _delete(board: "Board", row: Row, now: Now) -> None:
    """Its pod is going: thaw what is frozen; its GPUs stay with it until its processes are gone."""
    _leave_switch(board, row)
    held, has_process = row.lease, row.seen_running
    row.processes_gone = not has_process
    board.go(row, T.DELETED, now, epoch=board.next_epoch(now))
    row.lease = held and (has_process or row.ticket_open)  # a ticket may still be used
    if has_process:
        _release(board, row)


def _release(board: "Board", row: Row) -> None:
    board.said.append(ReleaseJob(cause=row.why, node=board.node, epoch=row.epoch, target=row.target()))


def _leave_switch(board: "Board", row: Row) -> None:
    """A seat that goes by itself need not be parked, unless the checkpointer may have been told to already."""
    operation = board.leaving(row.seat)
    if operation is None or operation.journaled or operation.sent_wall is not None:
        return
    board.end(operation)


def start_calls(board: "Board", calls: dict[str, StartCall], now: Now) -> None:
    """Kubelet waits at the gate for these seats."""
    for row in board.rows.values():
        call = calls.get(row.seat)
        if call is not None and (row.call is None or row.call.call != call.call):
            row.confirmed = 0
        row.call = call if call is not None and call.call != row.ticket else None
        _at_gate(board, row, now)


def _at_gate(board: "Board", row: Row, now: Now) -> None:
    """A call for a seat that has its lease means that its container exited or never started, unless kubelet gave the
    seat to another pod while the one before may still run. The second poll began after the call, and tells which."""
    if not row.calls(now):
        return
    if row.called_wall is None:
        row.called_wall = now.wall
    ran = row.seen_running and row.state in HAS_PROCESS
    if (ran or row.state is S.STARTING) and row.confirmed < 2:
        return
    if ran:
        exited(board, row, "its container is started again", now)
    if row.state is S.BACKOFF:
        board.go(row, T.CALLED, now, epoch=board.next_epoch(now))
    elif row.state is S.STARTING and not row.inherited:
        board.give_ticket(row, now)


def exited(board: "Board", row: Row, reason: str, now: Now) -> None:
    """The container is gone, and with it the VRAM it held."""
    _leave_switch(board, row)
    row.seen_running = row.conflict = False
    board.go(row, T.EXITED, now, epoch=board.next_epoch(now), reason=reason)


def processes_told(board: "Board", seats: Iterable[SeatProgress], now: Now) -> None:
    """The checkpointer looked at processes: some are gone, some quarantined seats are what they should be again."""
    for progress in seats:
        row = board.rows.get(progress.seat)
        if row is None or row.pod is None or row.pod.uid != progress.pod_uid:
            continue
        if row.state in (S.RELEASING, S.LOST):
            row.processes_gone = row.processes_gone or progress.outcome == "gone"
            if row.state is S.RELEASING and progress.outcome == "parked":
                _release(board, row)  # a checkpointer that died right after it took the first one has forgotten it
        elif row.state is S.QUARANTINED and not row.conflict and progress.outcome in CLEARED:
            trigger = CLEARED[progress.outcome]
            row.group, row.came_from = rebinding.group_at(board, row, progress.gpus) or row.group, None
            board.go(row, trigger, now, epoch=board.next_epoch(now), reason="the driver reports it as it should be")


def end_of_life(board: "Board", row: Row, now: Now) -> None:
    """Starts that never came, lost seats whose processes are gone, deleted pods whose processes are gone."""
    if row.state is S.QUARANTINED and row.conflict and looking.room(board, row):
        row.conflict = False
        board.go(row, T.CLEARED_ACTIVE, now, epoch=board.next_epoch(now), reason="it holds its group alone again")
    elif row.state is S.STARTING and not row.seen_running:
        if now.wall > row.entered_wall + START_DEADLINE_SECONDS:
            reason = f"no process came within {START_DEADLINE_SECONDS:.0f} s of the ticket"
            board.go(row, T.NO_PROCESS, now, epoch=board.next_epoch(now), reason=reason)
    elif row.state is S.LOST and row.processes_gone:
        row.seen_running = False
        board.go(row, T.GONE, now, epoch=board.next_epoch(now), reason="its processes ended; it starts cold")
    elif row.state is S.RELEASING and row.processes_gone:
        _released(board, row, now)


def _released(board: "Board", row: Row, now: Now) -> None:
    """No process of a deleted pod is left: nothing is held any more, and once the pod is gone the seat is free."""
    row.lease = row.lease and _may_come(row, now)
    if row.misses >= 2 and not row.lease:
        _freed(board, row, now)


def _may_come(row: Row, now: Now) -> bool:
    """Whether the last ticket of a deleted pod may still lead to a process.

    A pod that vanishes without having been seen in deletion (forced, or its kubelet lost it) proves nothing: the
    runtime may be about to start its container.
    """
    ended = row.ends and row.misses >= 2
    return row.ticket_open and not ended and now.wall <= row.ticket_wall + START_DEADLINE_SECONDS


def _freed(board: "Board", row: Row, now: Now) -> Row:
    """Nobody's seat, as of now; who calls at the gate still does."""
    board.go(row, T.GONE, now, epoch=board.next_epoch(now))
    fresh = Row(
        row.seat,
        row.home,
        epoch=row.epoch,
        call=row.call,
        entered_at=now.unix,
        entered_wall=now.wall,
        misses=row.misses,
    )
    board.rows[row.seat] = fresh
    return fresh
