"""What a seat's requests are promised and weigh: its tier, and what its pod's annotations change. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kybernate.config import STANDARD, Tier
from kybernate.config_errors import suggest
from kybernate.sizes import parse_seconds
from services.gpu_manager.seat_pod import ANNOTATION, SeatPod


@dataclass(frozen=True, slots=True)
class Terms:
    """What counts for one seat, and what of its annotations could not be used."""

    name: str
    tier: Tier
    problems: tuple[str, ...] = ()


def terms(pod: SeatPod | None, tiers: Mapping[str, Tier]) -> Terms:
    """The pod's tier with its own SLO and stall budget. What cannot be read counts as not written, and is told."""
    if pod is None:
        return Terms(STANDARD, tiers[STANDARD])
    problems = []
    name = pod.tier
    if name not in tiers:
        problems.append(f"{ANNOTATION}tier: {name!r} of pod {pod.pod} is no tier here; {suggest(name, tiers)}")
        name = STANDARD
    tier = tiers[name]
    changes: dict[str, float] = {}
    for key, field, least in (("slo", "slo_seconds", 1e-9), ("stall-budget", "stall_budget_seconds", 0.0)):
        text = pod.annotations.get(ANNOTATION + key)
        if text is None:
            continue
        try:
            value = parse_seconds(text)
        except ValueError:
            value = -1.0
        if value < least:
            problems.append(f"{ANNOTATION}{key}: {text!r} of pod {pod.pod} is no duration; write seconds such as 20s")
        else:
            changes[field] = value
    return Terms(name, tier.model_copy(update=changes) if changes else tier, tuple(problems))
