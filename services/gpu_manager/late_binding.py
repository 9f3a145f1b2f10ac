"""Who comes is decided as late as it can be: again when the victim is drained, and as long as it is being parked. Pure.

The policy is asked with the victim on its way out, so that its slot is free. A new answer before the job is sent goes
into the job; later ones go to the checkpointer as RetargetJob, which takes them until it has journaled the beginning of
the second half. What became of it the job's status tells, also when the answer was lost: ``follow``.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from kybernate.messages import JobReply, JobStatus, RetargetJob
from kybernate.policy import Switch
from kybernate.seat import COMING, SeatState, Trigger
from services.gpu_manager import looking, rebinding
from services.gpu_manager.inputs import Now, Retargeted
from services.gpu_manager.rows import Operation, Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger

ASK_AGAIN_SECONDS = 1.0
"""Wall: how long after a question that was not answered the checkpointer is asked again."""


def choose(board: "Board", operation: Operation, now: Now) -> None:
    """Ask once more who comes. Without another answer the winner stays, as long as somebody waits for it."""
    if operation.clears_for is not None or operation.victim is None:
        return
    if operation.winner and board.rows[operation.winner].state in COMING:
        return  # the job is sent anew, to a checkpointer that lost its journal half way
    winner = _newest(board, operation, now)
    if winner is not None and winner.seat != operation.winner:
        operation.winner, operation.cause = winner.seat, winner.cause or operation.cause
    elif winner is None and operation.winner and not looking.wants(board, board.rows[operation.winner], now):
        operation.winner = None


def another(board: "Board", operation: Operation, now: Now) -> bool:
    """A drain has lost its reason: whether somebody else waits for the victim's place."""
    if operation.clears_for is not None or operation.victim is None:
        return False
    winner = _newest(board, operation, now)
    if winner is None or winner.seat == operation.winner or not looking.wants(board, winner, now):
        return False
    operation.winner, operation.cause = winner.seat, winner.cause or operation.cause
    return True


def rethink(board: "Board", operation: Operation, now: Now) -> None:
    """While the victim is being parked: another winner, if the policy names one and the checkpointer still takes it."""
    if operation.clears_for is not None or operation.victim is None or operation.asking is not None:
        return
    if operation.settled or now.wall < operation.ask_after:
        return
    if operation.sent_wall is None or not operation.journaled or board.rows[operation.victim].state is not S.PARKING:
        return
    winner = _newest(board, operation, now)
    if winner is None or winner.seat == operation.winner:
        return
    comes = winner.state is S.PARKED  # one at the gate starts with a ticket, once the group is free
    if comes and winner.epoch > operation.epoch:
        return
    operation.asking = winner.seat
    operation.asked.add(winner.seat)
    board.said.append(
        RetargetJob(
            cause=winner.cause or operation.cause,
            node=board.node,
            epoch=operation.epoch,
            op=operation.op,
            activate=winner.target(board.group_of(operation)) if comes else None,
        )
    )


def answered(board: "Board", answer: Retargeted, now: Now) -> None:
    """The checkpointer took the new winner or not; without an answer the job's status will tell."""
    operation = next((o for o in board.operations.values() if o.op == answer.op), None)
    if operation is None or operation.asking is None:
        return
    winner, operation.asking = board.rows[operation.asking], None
    if answer.reply is None:
        operation.unanswered.add(winner.seat)
        operation.ask_after = now.wall + ASK_AGAIN_SECONDS
        return
    if not answer.reply.accepted:
        operation.settled = True  # whatever the reason, it would be the same at once
        operation.asked &= operation.unanswered
        return
    if winner.state is S.WAITING or _names(answer.reply, operation.op, winner.seat):
        _instead(board, operation, winner, now)


def follow(board: "Board", operation: Operation, status: JobStatus, now: Now) -> None:
    """The status is the truth about who comes, of those that were ever asked for, and once it has begun in any case: a
    RetargetJob of the manager before this one may have been on its way into the journal when this one asked.

    In the end it may be nobody, although somebody was to come.
    """
    comer = status.activate
    if comer is not None and comer.seat != operation.winner and comer.seat in board.rows:
        if comer.seat in operation.asked or comer.outcome != "pending":
            _instead(board, operation, board.rows[comer.seat], now)
    elif status.done and (comer is None or comer.outcome == "pending"):
        _give_back(board, operation, "the switch ended without it", now)


def _instead(board: "Board", operation: Operation, winner: Row, now: Now) -> None:
    """Another one comes."""
    if winner.seat != operation.winner:
        _give_back(board, operation, f"{winner.seat} comes instead", now)
    operation.winner, operation.cause = winner.seat, winner.cause or operation.cause


def _give_back(board: "Board", operation: Operation, reason: str, now: Now) -> None:
    """The winner may have the GPUs already: a park can be reported while a RetargetJob is on its way into the journal.
    It was not touched, and gives them back."""
    before = board.rows[operation.winner] if operation.winner is not None else None
    if before is not None and before.op == operation.op and before.state in COMING:
        trigger = T.NOT_RESTORED if before.state is S.ACTIVATING else T.MOVED_PARKED
        board.go(before, trigger, now, epoch=board.next_epoch(now), reason=reason)


def _newest(board: "Board", operation: Operation, now: Now) -> Row | None:
    """Whom the policy names now, if it can come; None: nobody, or nobody who can."""
    group, victim = board.group_of(operation), board.rows[operation.victim or ""]
    view = replace(looking.view(board, group, now), elsewhere=rebinding.seats_elsewhere(board, group, now))
    decision = board.policy.decide(view)
    if not isinstance(decision, Switch) or decision.evict is not None:
        return None
    winner = board.rows[decision.activate]
    ready = winner.state is S.PARKED or (winner.state is S.WAITING and winner.calls(now))
    if not ready or winner is victim or not looking.room(board, winner, without=victim, on=group):
        return None
    if winner.seat != operation.winner:
        board.why[group.name] = decision.reason
    return winner


def _names(reply: JobReply, op: str, seat: str) -> bool:
    """Whether the answer shows this seat as the one that comes."""
    found = [status.activate.seat for status in reply.jobs if status.op == op and status.activate is not None]
    return not reply.jobs or seat in found
