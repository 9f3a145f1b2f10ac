"""One switch under way: drain the victim, have the checkpointer move both, take in what became of it. Pure.

draining ──quiet and idle──► job ──journaled, reports──► over
    └──deadline──► cutting ──idle or grace over──► job
"""

from typing import TYPE_CHECKING

from kybernate.messages import JobStatus, SeatProgress, SwitchJob
from kybernate.policy.estimators import COST_WEIGHT
from kybernate.seat import COMING, SeatState, Trigger
from services.gpu_manager import late_binding, looking, overlap
from services.gpu_manager.inputs import EngineSeen, JobAnswered, Now
from services.gpu_manager.rows import CUT_GRACE_SECONDS, Operation, Row, growing
from services.gpu_manager.terms import terms

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger

RESEND_SECONDS = 1.0
"""Wall: how long to wait for the checkpointer's answer before asking again."""

LONGEST_STAY_SECONDS = 600.0
"""Wall: how long a seat whose moves fail is left where it is, at most."""
LONGEST_REST_SECONDS = 300.0
"""Wall: how long a seat that does not come back is no contender, at most."""

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


def step(board: "Board", operation: Operation, now: Now) -> None:
    """Do what time and the news allow."""
    if operation.phase == "draining":
        _drain(board, operation, now)
    if operation.phase == "cutting" and now.wall >= operation.cut_at + CUT_GRACE_SECONDS:
        operation.phase = "job"
    unsent = operation.sent_wall is None or now.wall >= operation.sent_wall + RESEND_SECONDS
    if operation.phase == "job" and not operation.journaled and unsent:
        _send(board, operation, now)
    if operation.phase == "job":
        late_binding.rethink(board, operation, now)


def _drain(board: "Board", operation: Operation, now: Now) -> None:
    """Wait for the routers' word and then the engine's; cut at the deadline; turn back when nobody waits."""
    victim = board.rows[operation.victim or ""]
    if not looking.still_wanted(board, operation, now) and not late_binding.another(board, operation, now):
        alone = operation.winner is None and operation.room_for is None and operation.clears_for is None
        turn_back(board, operation, now, "it is asked for" if alone else "nobody waits for its place any more")
        return
    if not board.bus_up:
        return
    quiet = operation.announced and board.routers.quiet(victim.seat, operation.epoch, now, frozen=operation.freeze)
    if quiet and operation.freeze and looking.traffic(board, victim).in_flight:
        _frozen(board, operation, victim, now)
    elif not quiet:
        operation.quiet_at = None
    elif operation.quiet_at is None:
        operation.quiet_at = now.wall
    if operation.phase == "draining" and now.model >= operation.deadline and board.routers.settled(now):
        _drained(board, operation, now, "drain deadline passed; streams that still run are cut")
        operation.phase, operation.cut_at = "cutting", now.wall


def _frozen(board: "Board", operation: Operation, victim: Row, now: Now) -> None:
    """Nothing new comes, and what is in flight stands still with the seat until it is back."""
    budget = terms(victim.pod, board.tiers).tier.stall_budget_seconds
    victim.frozen_since, victim.frozen_until = now.unix, now.unix + budget / now.pace
    flying = looking.traffic(board, victim).in_flight
    _drained(board, operation, now, f"{flying} requests in flight are frozen with it, for at most {budget:g} s")


def turn_back(board: "Board", operation: Operation, now: Now, reason: str) -> None:
    """Call a drain off: the victim serves on."""
    board.end(operation)
    victim = board.rows[operation.victim or ""]
    board.go(victim, T.DEMAND, now, epoch=board.next_epoch(now), reason=reason)


def call_off(board: "Board", winner: Row, reason: str, now: Now) -> None:
    """Drains that make room for this seat elsewhere end: it comes to another group."""
    for operation in list(board.operations.values()):
        if operation.winner == winner.seat and operation.phase == "draining":
            turn_back(board, operation, now, reason)


def lease(board: "Board", operation: Operation, winner: Row, now: Now) -> None:
    """The group's GPUs are the winner's from now on; on another group than it was parked on, it moves there."""
    group = board.group_of(operation)
    moves = winner.group.name != group.name
    trigger, to = (T.REMAP, group) if moves else (T.LEASE, None)
    epoch = max(operation.epoch, winner.epoch)  # another one may have come instead meanwhile
    board.go(winner, trigger, now, epoch=epoch, operation=operation, to=to)


def engine_seen(board: "Board", seen: EngineSeen, now: Now) -> None:
    """An engine answered: it is healthy for the first time, or it computes nothing any more."""
    row = board.rows.get(seen.seat)
    if row is None or row.container_id != seen.container_id:
        return
    if row.state is S.STARTING and seen.healthy:
        row.started = True
        traffic = looking.traffic(board, row)
        row.unclaimed = not (traffic.waiting or traffic.in_flight or row.wanted_since is not None or row.is_pinned)
        _serves(board, row, now, None, None)
    operation = board.leaving(seen.seat)
    if operation is None:
        return
    # An engine that answers and does not count its requests is taken for idle; one that does not answer is not.
    idle = seen.running == 0 or (seen.healthy and seen.running is None)
    if operation.phase == "draining" and operation.quiet_at is not None and seen.asked_at >= operation.quiet_at:
        if idle:
            _drained(board, operation, now, "")
    elif operation.phase == "cutting" and idle and seen.asked_at > operation.cut_at:
        operation.phase = "job"


def _drained(board: "Board", operation: Operation, now: Now, reason: str) -> None:
    operation.drained_wall = now.wall
    operation.phase = "job"
    victim = board.rows[operation.victim or ""]
    board.go(victim, T.DRAINED, now, epoch=operation.epoch, operation=operation, reason=reason)


def _send(board: "Board", operation: Operation, now: Now) -> None:
    """Ask the checkpointer; the same operation again is harmless, it knows it by its name."""
    if operation.sent_wall is None:
        late_binding.choose(board, operation, now)
    operation.sent_wall = now.wall
    victim = board.rows[operation.victim] if operation.victim else None
    winner = board.rows[operation.winner] if operation.winner else None
    if winner is not None:
        call_off(board, winner, f"{winner.seat} goes to group {operation.group}", now)
    if winner is not None and winner.state is not S.PARKED and not _comes(winner, operation):
        winner = None  # it starts with a ticket once the group is free, or it is gone
    if winner is not None and winner.epoch > operation.epoch:
        _renamed(board, operation, now)  # it was parked after this switch began; what is said about it must not go back
    board.said.append(
        SwitchJob(
            cause=operation.cause,
            node=board.node,
            epoch=operation.epoch,
            op=operation.op,
            group=operation.group,
            park=(victim.target(),) if victim is not None else (),
            activate=winner.target(board.group_of(operation)) if winner is not None else None,
        )
    )


def answered(board: "Board", answer: JobAnswered, now: Now) -> None:
    """The checkpointer took the job, refused it, or said nothing."""
    operation = next((o for o in board.operations.values() if o.op == answer.op), None)
    if operation is None or operation.journaled or answer.reply is None:
        return
    if answer.reply.accepted:
        _journaled(operation, now)
        for status in answer.reply.jobs:
            told(board, status, now)
    elif answer.reply.code == "stale-epoch":
        board.epoch = max(board.epoch, answer.reply.highest_epoch)
        _renamed(board, operation, now)
        operation.sent_wall = None
    elif answer.reply.code != "busy":
        _refused(board, operation, answer.reply.reason or answer.reply.code, now)


def _renamed(board: "Board", operation: Operation, now: Now) -> None:
    operation.epoch = board.next_epoch(now)
    operation.op = f"{operation.group}-{operation.epoch}"


def _journaled(operation: Operation, now: Now) -> None:
    if not operation.journaled:
        operation.journaled = True
        operation.control_seconds = max(0.0, now.wall - operation.drained_wall)


def _refused(board: "Board", operation: Operation, reason: str, now: Now) -> None:
    """The checkpointer will not do it: everything stays as it was before."""
    board.end(operation)
    board.failed(operation.group, now)
    victim = board.rows[operation.victim] if operation.victim else None
    winner = board.rows[operation.winner] if operation.winner else None
    if victim is not None and victim.state is S.PARKING:
        board.go(victim, T.ROLLED_BACK, now, epoch=board.next_epoch(now), reason=reason)
    overlap.give_up(board, operation, now)
    if winner is not None:
        _rest(board, operation, winner, reason, now)
    if winner is not None and _comes(winner, operation):
        board.go(winner, NOT_RESTORED[winner.state], now, epoch=board.next_epoch(now), reason=reason)


def told(board: "Board", status: JobStatus, now: Now) -> None:
    """Take in the whole truth about a switch; hearing it twice changes nothing."""
    operation = next((o for o in board.operations.values() if o.op == status.op), None)
    if operation is None:
        _kill_told(board, status, now)
        return
    _journaled(operation, now)
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
        if _comes(winner, operation) and _same_pod(winner, progress_of):
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
        left = operation.drained_wall if operation.leaves_wall is None else operation.leaves_wall
        gone = max(took, now.wall - left)
        row.park_seconds = _learn(row.park_seconds, gone * now.pace, row.parks)
        operation.parked_wall = now.wall
        operation.seconds = {"park": took - verify, "verify": verify}
        board.failures.pop(operation.group, None)
        board.go(row, T.EVIDENCE, now, epoch=operation.epoch, operation=operation)
    elif progress.outcome in PARK_FAILED:
        board.failed(operation.group, now)
        trigger, epoch = PARK_FAILED[progress.outcome], board.next_epoch(now)
        board.go(row, trigger, now, epoch=epoch, operation=operation, reason=progress.reason)
        if row.lease:
            overlap.give_up(board, operation, now)


def _activate_told(board: "Board", operation: Operation, row: Row, progress: SeatProgress, now: Now) -> None:
    if progress.outcome == "active":
        row.unclaimed = False
        _serves(board, row, now, operation, progress)
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
        _rest(board, operation, row, progress.reason, now)
    trigger = NOT_RESTORED[row.state] if progress.outcome == "parked" else ACTIVATE_FAILED[progress.outcome]
    board.go(row, trigger, now, epoch=board.next_epoch(now), operation=operation, reason=progress.reason)


def _rest(board: "Board", operation: Operation, row: Row, reason: str, now: Now) -> None:
    """Who did not come back is no contender for longer than the group pauses, and longer each time: whoever goes before
    the others, by a pin or a long wait, would else shut them out."""
    row.failed += 1
    pause = board.pause_until[operation.group] - now.wall
    seconds = max(2 * pause, growing(0.5, row.failed, LONGEST_REST_SECONDS))
    row.rests_until = now.wall + seconds
    times = "once" if row.failed == 1 else f"{row.failed} times in a row"
    row.rests_why = f"did not come back {times}; others go first for {seconds:.0f} s: {reason}"


def _serves(board: "Board", row: Row, now: Now, operation: Operation | None, progress: SeatProgress | None) -> None:
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


def _comes(row: Row, operation: Operation) -> bool:
    return row.state in COMING and row.group.name == operation.group


def _same_container(row: Row, progress: SeatProgress) -> bool:
    return row.target().container_id == progress.container_id


def _same_pod(row: Row, progress: SeatProgress) -> bool:
    return row.pod is not None and progress.pod_uid == row.pod.uid


def _learn(known: float, seen: float, count: int = 0) -> float:
    """The mean after one more value; the first ones weigh as in a plain mean, the assumed one nothing."""
    return known + max(COST_WEIGHT, 1.0 / count if count else 0.0) * (seen - known)
