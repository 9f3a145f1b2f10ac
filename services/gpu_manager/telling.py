"""Why each group is as it is, for people: ``GET /v1/why`` of the manager, shown by ``kyb why``. Pure."""

from typing import TYPE_CHECKING, Any

from kybernate.topology import Group
from services.gpu_manager import looking, showing
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Row
from services.gpu_manager.terms import terms

if TYPE_CHECKING:
    from services.gpu_manager.board import Board
    from services.gpu_manager.shadow import Shadow
    from services.gpu_manager.thinking import Thinking


def why(board: "Board", thinking: "Thinking", now: Now) -> dict[str, Any]:
    """The policy, its last sentence about each group, and the numbers that it sees there."""
    brain = thinking.brain
    return {
        "node": board.node,
        "policy": brain.name,
        "errors": brain.errors,
        "last_error": brain.last_error,
        "groups": [_group(board, group, now) for group in board.groups],
        "problems": [text for row in board.rows.values() for text in terms(row.pod, board.tiers).problems],
        "shadow": None if thinking.shadow is None else shadow(thinking.shadow, now),
        "recording": None
        if thinking.recorder is None
        else {"written": thinking.recorder.written, "left_out": thinking.recorder.left_out},
    }


def shadow(of: "Shadow", now: Now) -> dict[str, Any]:
    """What the shadow policy would have done."""
    return {
        "policy": of.name,
        "last_error": of.last_error,
        "groups": [
            {
                "group": name,
                "same": score.looks["same"],
                "different": score.looks["different"],
                "errors": score.looks["error"],
                "disagreements": score.disagreements,
                "gain_seconds": round(score.gain_seconds, 3),
                "live": score.live,
                "shadow": score.shadow,
            }
            for name, score in sorted(of.scores.items())
        ],
        "recent": [
            {
                "group": each.group,
                "age_seconds": round(now.model - each.at, 3),
                "live": each.live,
                "shadow": each.shadow,
                "gain_seconds": round(each.gain_seconds, 3),
            }
            for each in reversed(of.recent)
        ],
    }


def _group(board: "Board", group: Group, now: Now) -> dict[str, Any]:
    operation = board.operations.get(group.name)
    return {
        "group": group.name,
        "why": board.why.get(group.name, ""),
        "switch": None
        if operation is None
        else {"out": operation.victim, "in": operation.winner, "phase": operation.phase, "op": operation.op},
        "seats": [_seat(board, row, now) for row in board.seats_of(group) if row.pod is not None],
    }


def _seat(board: "Board", row: Row, now: Now) -> dict[str, Any]:
    seat = looking.seat_view(board, row, now)
    return {
        "seat": seat.seat,
        "model": row.model,
        "blocked": showing.blocked(board, row, now),
        "state": str(seat.state),
        "tier": seat.tier,
        "weight": seat.weight,
        "slo_seconds": seat.slo_seconds,
        "stall_budget_seconds": seat.stall_budget_seconds,
        "pinned": seat.pinned,
        "waiting": seat.waiting,
        "in_flight": seat.in_flight,
        "oldest_wait_seconds": round(seat.oldest_wait_seconds, 3),
        "rate_fast": round(seat.rate_fast, 5),
        "rate_slow": round(seat.rate_slow, 5),
        "service_seconds": round(seat.service_seconds, 3),
        "park_seconds": round(seat.park_seconds, 3),
        "activate_seconds": round(seat.activate_seconds, 3),
    }
