"""One switch under way: drain the victim, have the checkpointer move both. Pure.

draining ──quiet and idle──► job ──journaled, reports──► over
    └──deadline──► cutting ──idle or grace over──► job
"""

from typing import TYPE_CHECKING

from kybernate.messages import SwitchJob
from kybernate.seat import SeatState, Trigger
from services.gpu_manager import late_binding, looking, outcomes, overlap
from services.gpu_manager.inputs import EngineSeen, JobAnswered, Now
from services.gpu_manager.rows import CUT_GRACE_SECONDS, Operation, Row
from services.gpu_manager.terms import terms

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger

RESEND_SECONDS = 1.0
"""Wall: how long to wait for the checkpointer's answer before asking again."""


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
    comer = operation.winner or operation.room_for
    if comer and not operation.ordered and looking.room(board, board.rows[comer], on=board.group_of(operation)):
        turn_back(board, operation, now, f"there is room for {comer} without it")
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


def engine_seen(board: "Board", seen: EngineSeen, now: Now) -> None:
    """An engine answered: it is healthy for the first time, or it computes nothing any more."""
    row = board.rows.get(seen.seat)
    if row is None or row.container_id != seen.container_id:
        return
    if row.state is S.STARTING and seen.healthy:
        row.started = True
        traffic = looking.traffic(board, row)
        row.unclaimed = not (traffic.waiting or traffic.in_flight or row.wanted_since is not None or row.is_pinned)
        outcomes.serves(board, row, now, None, None)
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
    if winner is not None and winner.state is not S.PARKED and not outcomes.comes(winner, operation):
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
        outcomes.journaled(operation, now)
        for status in answer.reply.jobs:
            outcomes.told(board, status, now)
    elif answer.reply.code == "stale-epoch":
        board.epoch = max(board.epoch, answer.reply.highest_epoch)
        _renamed(board, operation, now)
        operation.sent_wall = None
    elif answer.reply.code != "busy":
        _refused(board, operation, answer.reply.reason or answer.reply.code, now)


def _renamed(board: "Board", operation: Operation, now: Now) -> None:
    operation.epoch = board.next_epoch(now)
    operation.op = f"{operation.group}-{operation.epoch}"


def _refused(board: "Board", operation: Operation, reason: str, now: Now) -> None:
    """The checkpointer will not do it: everything stays as it was before."""
    board.end(operation)
    board.failed(operation.group, now)
    victim = board.rows[operation.victim] if operation.victim else None
    winner = board.rows[operation.winner] if operation.winner else None
    if victim is not None and victim.state is S.PARKING:
        outcomes.stay(board, operation, victim, now)
        board.go(victim, T.ROLLED_BACK, now, epoch=board.next_epoch(now), reason=reason)
    overlap.give_up(board, operation, now)
    if winner is not None:
        outcomes.rest(board, operation, winner, reason, now)
    if winner is not None and outcomes.comes(winner, operation):
        board.go(winner, outcomes.NOT_RESTORED[winner.state], now, epoch=board.next_epoch(now), reason=reason)
