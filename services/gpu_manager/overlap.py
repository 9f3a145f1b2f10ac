"""Groups that share GPUs: who is in the way of whom, and for whom GPUs are being cleared. Pure.

Kubelet sells seats of all groups at the same time; only the lease keeps them apart. A group whose GPUs are held by
seats of other groups asks the policy with those seats in view. When the policy lets one of them yield, the group has a
*claim*: all that is in the way drains, and no other group is granted any of these GPUs until the claim is served or
nobody waits for it any more. A seat that takes many GPUs would otherwise never find them free together.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.policy import GroupView, Switch
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import looking
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Operation, Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState

_LAST_NAME = chr(0x10FFFF)
_NOBODY = (2.0, 0.0, _LAST_NAME)

_STAYS = (S.QUARANTINED, S.LOST, S.RELEASING)
"""Holders that no drain can move; they leave by themselves or with a person's help."""


@dataclass(frozen=True, slots=True)
class Claim:
    """GPUs that others hold are being cleared."""

    seat: str
    """For this one."""
    since: float
    """Model time."""


def neighbours(groups: tuple[Group, ...]) -> dict[str, tuple[Group, ...]]:
    """By group: the others that share a GPU with it."""
    gpus = {group.name: {gpu.uuid for gpu in group.gpus} for group in groups}
    return {
        group.name: tuple(o for o in groups if o.name != group.name and gpus[o.name] & gpus[group.name])
        for group in groups
    }


def in_turn(board: "Board", groups: tuple[Group, ...], now: Now) -> tuple[Group, ...]:
    """The order in which groups decide: those that share GPUs with others by who waits longest, whatever its size.

    Who decides first has the GPUs: in any fixed order a group that comes late would never see a holder that may yield.
    """
    if not any(board.neighbours[group.name] for group in groups):
        return groups
    return tuple(sorted(groups, key=lambda group: turn(board, group, now)))


def turn(board: "Board", group: Group, now: Now) -> tuple[float, float, str]:
    """Whose turn it is among groups, lowest first: that of its seat that goes first. Nobody waits for it: last."""
    seats = looking.view(board, group, now).seats
    return min((seat.turn for seat in seats if seat.wait_seconds is not None), default=_NOBODY)


def in_the_way(board: "Board", group: Group) -> list[Row]:
    """Seats of other groups that hold a GPU of this one."""
    return [row for other in board.neighbours[group.name] for row in board.seats_of(other) if row.lease]


def claimant(board: "Board", seat: str) -> str | None:
    """The group that has a claim for this seat."""
    return next((name for name, claim in board.claims.items() if claim.seat == seat), None)


def claimed_for(board: "Board", group: Group, now: Now) -> str | None:
    """The seat of another group for which GPUs of this one are being cleared, unless this one goes before it.

    Whoever waits longer goes first. Otherwise claims of small groups that follow each other, here and there, would
    leave no moment for a group that needs all of their GPUs, and the other way round.
    """
    claims = [board.claims[other.name].seat for other in board.neighbours[group.name] if other.name in board.claims]
    if not claims:
        return None
    own = turn(board, group, now)
    own = own if group.name in board.claims else (*own[:2], _LAST_NAME)  # equals wait for a claim; two claims never
    return next((seat for seat in claims if looking.seat_view(board, board.rows[seat], now).turn <= own), None)


def decide(board: "Board", group: Group, others: list[Row], now: Now) -> bool:
    """A group whose GPUs others hold: claim them when the policy lets somebody yield. True: drain them now."""
    for row in others:
        if how := _stays(row, now):
            board.claims.pop(group.name, None)
            board.why[group.name] = f"its GPUs are held by {row.seat} of group {row.group.name}, which {how}"
            return False
    if group.name in board.claims:
        return True
    own = looking.view(board, group, now)
    seats = (*own.seats, *(looking.seat_view(board, row, now) for row in others))
    decision = board.policy.decide(GroupView(group.name, 0, seats))
    board.why[group.name] = decision.reason
    until = getattr(decision, "until", None)
    if until is not None:
        board.wake_at[group.name] = now.model + max(until, 0.0)
    if not isinstance(decision, Switch) or board.rows[decision.activate].group.name != group.name:
        return False
    board.claims[group.name] = Claim(decision.activate, now.model)
    board.say_decided(group, decision.reason)
    return True


def _stays(row: Row, now: Now) -> str:
    """Why a holder in the way cannot leave: then the others need not leave either. Empty: it can."""
    if row.is_pinned or row.state in _STAYS:
        return f"is {'pinned' if row.is_pinned else row.state}"
    return "could not be parked a moment ago" if now.wall < row.stays_until else ""


def yields(board: "Board", group: Group, victim: Row, now: Now) -> bool:
    """Whether a seat in the way of this group's claim drains now.

    All that served when the claim began drain together. One that came later, since it went before the claim, has a
    visit of its own first: else it would wait for its turn, be drained at once, and wait again.
    """
    if victim.active_since < board.claims[group.name].since:
        return True
    own = looking.view(board, group, now).seats
    decision = board.policy.decide(GroupView(group.name, 0, (*own, looking.seat_view(board, victim, now))))
    until = getattr(decision, "until", None)
    if until is not None:
        wake = now.model + max(until, 0.0)
        board.wake_at[group.name] = min(board.wake_at.get(group.name, wake), wake)
    return isinstance(decision, Switch)


def give_up(board: "Board", operation: Operation, now: Now) -> None:
    """A seat that was in the way stays there: the others may have their GPUs back before it is tried again."""
    if operation.clears_for is not None:
        group = claimant(board, operation.clears_for)
        if group is not None:
            del board.claims[group]
            board.failed(group, now)


def expire(board: "Board", now: Now) -> None:
    """Forget claims of seats that nobody waits for any more."""
    for name, claim in tuple(board.claims.items()):
        if not looking.wants(board, board.rows[claim.seat], now):
            del board.claims[name]
