"""Groups that share GPUs: who is in the way of whom, and for whom GPUs are being cleared. Pure.

Kubelet sells seats of all groups at the same time; only the lease keeps them apart. A group whose GPUs are held by
seats of other groups asks the policy with those seats in view. When the policy lets one of them yield, the group has a
*claim*: all that is in the way drains, and no other group is granted any of these GPUs until the claim is served or
nobody waits for it any more. A seat that takes many GPUs would otherwise never find them free together.
"""

from typing import TYPE_CHECKING

from kybernate.policy import GroupView, Switch
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import looking
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState

_STAYS = (S.QUARANTINED, S.LOST, S.RELEASING)
"""Holders that no drain can move; they leave by themselves or with a person's help."""


def neighbours(groups: tuple[Group, ...]) -> dict[str, tuple[Group, ...]]:
    """By group: the others that share a GPU with it."""
    gpus = {group.name: {gpu.uuid for gpu in group.gpus} for group in groups}
    return {
        group.name: tuple(o for o in groups if o.name != group.name and gpus[o.name] & gpus[group.name])
        for group in groups
    }


def in_the_way(board: "Board", group: Group) -> list[Row]:
    """Seats of other groups that hold a GPU of this one."""
    rows = (board.rows[seat] for other in board.neighbours[group.name] for seat in other.seat_ids)
    return [row for row in rows if row.lease]


def claimed_for(board: "Board", group: Group) -> str | None:
    """The seat of another group for which GPUs of this one are being cleared."""
    return next((board.claims[o.name] for o in board.neighbours[group.name] if o.name in board.claims), None)


def decide(board: "Board", group: Group, others: list[Row], now: Now) -> bool:
    """A group whose GPUs others hold: claim them when the policy lets somebody yield. True: drain them now."""
    stuck = next((row for row in others if row.is_pinned or row.state in _STAYS), None)
    if stuck is not None:
        board.claims.pop(group.name, None)
        how = "pinned" if stuck.is_pinned else str(stuck.state)
        board.why[group.name] = f"its GPUs are held by {stuck.seat} of group {stuck.group.name}, which is {how}"
        return False
    if group.name in board.claims:
        return True
    own = looking.view(board, group, now)
    seats = (*own.seats, *(looking.seat_view(board, row, now) for row in others))
    decision = board.policy.decide(GroupView(group.name, 0, seats))
    board.why[group.name] = decision.reason
    board.wake_at.pop(group.name, None)
    until = getattr(decision, "until", None)
    if until is not None:
        board.wake_at[group.name] = now.model + max(until, 0.0)
    if not isinstance(decision, Switch) or decision.activate not in group.seat_ids:
        return False
    board.claims[group.name] = decision.activate
    board.say_decided(group, decision.reason)
    return True


def expire(board: "Board", now: Now) -> None:
    """Forget claims of seats that nobody waits for any more."""
    for name, seat in tuple(board.claims.items()):
        if not looking.wants(board, board.rows[seat], now):
            del board.claims[name]
