"""What became of a switch: the checkpointer's word in, states and learned costs out. Pure.

A status is the whole truth about a job, so hearing it twice or late changes nothing.
"""

from typing import TYPE_CHECKING

from kybernate.messages import JobStatus, SeatProgress
from kybernate.policy.estimators import COST_WEIGHT
from kybernate.seat import COMING, SeatState, Trigger
from services.gpu_manager import late_binding, overlap
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Operation, Row, growing

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger

LONGEST_STAY_SECONDS = 600.0
"""Wall: how long a seat whose moves fail is left where it is, at most."""
LONGEST_REST_SECONDS = 300.0
"""Wall: how long a seat that does not come back is no contender, at most."""
UNPARKED_SECONDS = 60.0
"""Wall: how long a seat that cannot be parked is no victim, about at most; those who wait for its GPUs wait as long."""

PARK_FAILED = {
    "active": T.ROLLED_BACK,
    "lost": T.UNRECOVERABLE,
    "gone": T.EXITED,
    "quarantined": T.QUARANTINE,
}
NOT_RESTORED = {S.ACTIVATING: T.NOT_RESTORED, S.MIGRATING: T.MOVED_PARKED}
ACTIVATE_FAILED = {
    "parked": T.NOT_RESTORED,
    "lost": T.UNRECOVERABLE,
    "gone": T.EXITED,
    "quarantined": T.QUARANTINE,
}


def told(board: "Board", status: JobStatus, now: Now) -> None:
    """Take in the whole truth about a switch; hearing it twice changes nothing."""
    operation = next((o for o in board.operations.values() if o.op == status.op), None)
    if operation is None:
        _kill_told(board, status, now)
        return
    journaled(operation, now)
    late_binding.follow(board, operation, status, now)
    for progress in status.park:
        row = board.rows.get(progress.seat)
        if row is not None and row.group.name != operation.group:
            continue  # it was parked and has moved on since
        if row is not None and row.state is S.PARKING and _same_pod(row, progress):
            _park_told(board, operation, row, progress, now)
        elif row is not None and row.state is S.RELEASING and _same_pod(row, progress):
            row.lease = row.lease and progress.outcome not in ("parked", "gone")
    free = all(progress.outcome in ("parked", "gone") for progress in status.park)
    progress_of = status.activate
    winner = board.rows.get(operation.winner or "")
    if progress_of is not None and winner is not None and winner.seat == progress_of.seat and free:
        dropped = status.done and progress_of.outcome == "pending"
        if winner.state is S.PARKED and not dropped and _same_container(winner, progress_of):
            lease(board, operation, winner, now)
        if comes(winner, operation) and _same_pod(winner, progress_of):
            _activate_told(board, operation, winner, progress_of, now)
        if winner.state is S.RELEASING and _same_pod(winner, progress_of):  # its pod went; the job goes on
            unused = dropped or winner.processes_gone or progress_of.outcome in ("parked", "gone")
            winner.lease = not unused
    if status.done:
        board.end(operation)


def forgotten(board: "Board", ops: set[str]) -> None:
    """The checkpointer lost its journal: it gets these jobs anew, and the processes tell it what is left to do."""
    for operation in board.operations.values():
        if operation.op in ops:
            operation.journaled, operation.sent_wall = False, None


def lease(board: "Board", operation: Operation, winner: Row, now: Now) -> None:
    """The group's GPUs are the winner's from now on; on another group than it was parked on, it moves there."""
    group = board.group_of(operation)
    moves = winner.group.name != group.name
    trigger, to = (T.REMAP, group) if moves else (T.LEASE, None)
    epoch = max(operation.epoch, winner.epoch)  # another one may have come instead meanwhile
    board.go(winner, trigger, now, epoch=epoch, operation=operation, to=to)


def journaled(operation: Operation, now: Now) -> None:
    """The checkpointer has the job on disk."""
    if not operation.journaled:
        operation.journaled = True
        operation.control_seconds = max(0.0, now.wall - operation.drained_wall)


def _kill_told(board: "Board", status: JobStatus, now: Now) -> None:
    """A kill that failed is for a person; one that worked shows when the processes are looked at."""
    for progress in status.park:
        row = board.rows.get(progress.seat)
        if row is not None and row.state is S.LOST and _same_pod(row, progress) and progress.outcome == "quarantined":
            board.go(row, T.QUARANTINE, now, epoch=board.next_epoch(now), reason=progress.reason)


def _park_told(board: "Board", operation: Operation, row: Row, progress: SeatProgress, now: Now) -> None:
    if progress.outcome == "parked":
        row.vram_bytes = progress.vram_bytes or row.vram_bytes
        row.host_bytes = progress.host_bytes
        took, verify = sum(progress.seconds.values()), progress.seconds.get("verify", 0.0)
        row.parks += 1
        row.failed_parks, row.stays_until = 0, 0.0
        left = operation.drained_wall if operation.leaves_wall is None else operation.leaves_wall
        gone = max(took, now.wall - left)
        row.park_seconds = _learn(row.park_seconds, gone * now.pace, row.parks)
        operation.parked_wall = now.wall
        operation.seconds = {"park": took - verify, "verify": verify}
        board.failures.pop(operation.group, None)
        board.go(row, T.EVIDENCE, now, epoch=operation.epoch, operation=operation)
    elif progress.outcome in PARK_FAILED:
        board.failed(operation.group, now)
        stay(board, operation, row, now)
        trigger, epoch = PARK_FAILED[progress.outcome], board.next_epoch(now)
        board.go(row, trigger, now, epoch=epoch, operation=operation, reason=progress.reason)
        if row.lease:
            overlap.give_up(board, operation, now)


def _activate_told(board: "Board", operation: Operation, row: Row, progress: SeatProgress, now: Now) -> None:
    if progress.outcome == "active":
        row.unclaimed = False
        serves(board, row, now, operation, progress)
    elif progress.outcome in ACTIVATE_FAILED:
        _not_activated(board, operation, row, progress, now)


def _not_activated(board: "Board", operation: Operation, row: Row, progress: SeatProgress, now: Now) -> None:
    """It stays parked, or is beyond use. A move that cannot be is no fault of the group, and is not tried again."""
    moving = row.state is S.MIGRATING
    if moving and progress.move_refused == "node":
        board.fixed = progress.reason
    elif moving and (progress.move_refused or progress.outcome == "lost"):
        row.fixed = progress.reason
    elif moving:  # longer than the group pauses: its own seats come first then
        row.failed_moves += 1
        row.moves_after = now.wall + growing(15.0, row.failed_moves, LONGEST_STAY_SECONDS)
    if not (moving and progress.move_refused):
        board.failed(operation.group, now)
        rest(board, operation, row, progress.reason, now)
    trigger = NOT_RESTORED[row.state] if progress.outcome == "parked" else ACTIVATE_FAILED[progress.outcome]
    board.go(row, trigger, now, epoch=board.next_epoch(now), operation=operation, reason=progress.reason)


def rest(board: "Board", operation: Operation, row: Row, reason: str, now: Now) -> None:
    """Who did not come back is no contender for longer than the group pauses, and longer each time: whoever goes before
    the others, by a pin or a long wait, would else shut them out."""
    row.failed += 1
    seconds = max(2 * _pause(board, operation, now), growing(0.5, row.failed, LONGEST_REST_SECONDS))
    row.rests_until = now.wall + seconds
    times = "once" if row.failed == 1 else f"{row.failed} times in a row"
    row.rests_why = f"did not come back {times}; others go first for {seconds:.0f} s: {reason}"


def stay(board: "Board", operation: Operation, row: Row, now: Now) -> None:
    """Who cannot be parked is no victim where there is another one: it would else be the best one each time."""
    row.failed_parks += 1
    row.stays_until = now.wall + max(
        2 * _pause(board, operation, now), growing(0.5, row.failed_parks, UNPARKED_SECONDS)
    )


def _pause(board: "Board", operation: Operation, now: Now) -> float:
    return board.pause_until[operation.group] - now.wall


def serves(board: "Board", row: Row, now: Now, operation: Operation | None, progress: SeatProgress | None) -> None:
    """The seat serves. An activation tells how long each phase of its switch took, in wall seconds."""
    row.active_since = row.busy_at = now.model
    row.failed = row.failed_moves = 0
    row.rests_until = row.moves_after = 0.0
    board.failures.pop(row.group.name, None)
    if operation is None or progress is None:
        board.go(row, T.HEALTHY, now, epoch=row.epoch)
        return
    took, verify = sum(progress.seconds.values()), progress.seconds.get("verify", 0.0)
    total = now.wall - operation.decided_wall
    began = operation.parked_wall if operation.victim is not None else operation.decided_wall
    came = took if began is None else max(took, now.wall - began)
    moving = row.state is S.MIGRATING
    if moving:
        board.move_seconds = _learn(board.move_seconds, max(0.0, came * now.pace - row.activate_seconds))
    else:
        row.activations += 1
        row.activate_seconds = _learn(row.activate_seconds, came * now.pace, row.activations)
    row.switch_seconds = _learn(row.switch_seconds, total * now.pace)
    last = progress.last_call_at
    seconds = {
        "drain": max(0.0, operation.drained_wall - operation.decided_wall),
        "park": operation.seconds.get("park", 0.0),
        "activate": took - verify,
        "verify": verify + operation.seconds.get("verify", 0.0),
        "release": max(0.0, now.unix - last) if last is not None else 0.0,
        "control": operation.control_seconds,
        "total": total,
    }
    trigger = T.MOVED_ACTIVE if moving else T.VERIFIED
    epoch = max(operation.epoch, row.epoch)
    board.go(row, trigger, now, epoch=epoch, operation=operation, seconds=seconds, last_call_at=last)


def comes(row: Row, operation: Operation) -> bool:
    """Whether this seat is being brought to the group of this switch."""
    return row.state in COMING and row.group.name == operation.group


def _same_container(row: Row, progress: SeatProgress) -> bool:
    return row.target().container_id == progress.container_id


def _same_pod(row: Row, progress: SeatProgress) -> bool:
    return row.pod is not None and progress.pod_uid == row.pod.uid


def _learn(known: float, seen: float, count: int = 0) -> float:
    """The mean after one more value; the first ones weigh as in a plain mean, the assumed one nothing."""
    return known + max(COST_WEIGHT, 1.0 / count if count else 0.0) * (seen - known)
