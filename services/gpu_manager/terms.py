"""What a seat's requests are promised and weigh: its tier, and what its pod's annotations change. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kybernate.annotations import tier_problem
from kybernate.config import STANDARD, Tier
from services.gpu_manager.seat_pod import SeatPod


@dataclass(frozen=True, slots=True)
class Terms:
    """What counts for one seat, and what of its annotations could not be used."""

    name: str
    tier: Tier
    problems: tuple[str, ...] = ()


def terms(pod: SeatPod | None, tiers: Mapping[str, Tier]) -> Terms:
    """The pod's tier with its own SLO and stall budget. What cannot be read counts as not written."""
    if pod is None:
        return Terms(STANDARD, tiers[STANDARD])
    notes = pod.notes
    bad_tier = tier_problem(notes.tier, tiers)
    name = notes.tier if bad_tier is None else STANDARD
    own = {"slo_seconds": notes.slo_seconds, "stall_budget_seconds": notes.stall_budget_seconds}
    changes = {field: value for field, value in own.items() if value is not None}
    tier = tiers[name].model_copy(update=changes) if changes else tiers[name]
    problems = notes.problems if bad_tier is None else (bad_tier, *notes.problems)
    return Terms(name, tier, tuple(problem.text(pod.pod) for problem in problems))
