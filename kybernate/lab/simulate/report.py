"""What an outcome comes to: waits, attainment, switches. Pure.

Percentiles are nearest-rank: the smallest wait that at least so many percent do not exceed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from kybernate.lab.simulate.model import Outcome, Scenario


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of one run. Waits in model seconds, shares between 0 and 1."""

    scenario: str
    policy: str
    requests: int
    wait_mean_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    wait_max_s: float
    wait_stall_mean_s: float
    """Wait plus the time frozen in flight."""
    stall_p99_s: float
    immediate: float
    """Share of requests that did not wait at all."""
    slo_attainment: float
    """Share of requests that waited (and stood still) no longer than their seat's SLO."""
    slo_by_tier: dict[str, float]
    wait_by_tier: dict[str, float]
    worst_seat: str
    worst_seat_attainment: float
    switches_per_hour: float
    switching_share: float
    """Share of the groups' time that went into parking and activating."""
    thrash_ratio: float
    """Share of visits that served at most one request. At low load that is no defect."""
    moves_per_hour: float
    hours: float
    """Until the last request had ended."""

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def measures(outcome: Outcome, scenario: Scenario) -> Measures:
    """Measure a run of this scenario."""
    count = len(outcome.wait)
    delay = [wait + stall for wait, stall in zip(outcome.wait, outcome.stall, strict=True)]
    waits, stalls = sorted(outcome.wait), sorted(outcome.stall)
    met = [d <= scenario.seats[seat].slo_seconds for d, seat in zip(delay, scenario.seat, strict=True)]
    by_tier = _by([scenario.seats[seat].tier for seat in scenario.seat], met)
    by_seat = _by([scenario.seats[seat].name for seat in scenario.seat], met)
    worst = min(by_seat, key=lambda name: (by_seat[name], name), default="")
    hours = max(outcome.ended, scenario.duration) / 3600
    span = hours * 3600 * len(scenario.groups)
    few = sum(visit.served <= 1 for visit in outcome.visits)
    return Measures(
        scenario=outcome.scenario,
        policy=outcome.policy,
        requests=count,
        wait_mean_s=_mean(waits),
        wait_p50_s=percentile(waits, 0.50),
        wait_p95_s=percentile(waits, 0.95),
        wait_p99_s=percentile(waits, 0.99),
        wait_max_s=waits[-1] if waits else 0.0,
        wait_stall_mean_s=_mean(delay),
        stall_p99_s=percentile(stalls, 0.99),
        immediate=_mean([wait <= 1e-9 for wait in waits]),
        slo_attainment=_mean(met, empty=1.0),
        slo_by_tier=by_tier,
        wait_by_tier=_by([scenario.seats[seat].tier for seat in scenario.seat], outcome.wait),
        worst_seat=worst,
        worst_seat_attainment=by_seat.get(worst, 1.0),
        switches_per_hour=outcome.counters.get("switches", len(outcome.visits)) / hours if hours else 0.0,
        switching_share=outcome.switching_seconds / span if span else 0.0,
        thrash_ratio=few / len(outcome.visits) if outcome.visits else 0.0,
        moves_per_hour=outcome.counters.get("moves", 0) / hours if hours else 0.0,
        hours=hours,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of sorted values; 0 when there are none."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _mean(values: Sequence[float], empty: float = 0.0) -> float:
    return sum(values) / len(values) if values else empty


def _by(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        found.setdefault(name, []).append(value)
    return {name: _mean(found[name]) for name in sorted(found)}


@dataclass(frozen=True, slots=True)
class Needed:
    """How many seats have something to do at the same time if nothing had to be switched."""

    expected_active: float
    """E[active], mean over the scenario's duration."""
    slots_95: int
    """So many slots would be enough for 95 % of the time."""
    slots_99: int
    most: int
    seats: int
    slots: int
    """That there are."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"E[active] = {self.expected_active:.2f} of {self.seats} seats; slots needed at all: {self.slots_95} for "
            f"95 % of the time, {self.slots_99} for 99 %, {self.most} at most; there are {self.slots}"
        )


def needed(scenario: Scenario) -> Needed:
    """Count, at every moment, the seats with at least one request in flight if each had GPUs of its own."""
    changes: list[tuple[float, int]] = []
    ends = [float("-inf")] * len(scenario.seats)
    for at, seat, service in zip(scenario.at, scenario.seat, scenario.service, strict=True):
        if at > ends[seat]:
            changes.append((at, 1))
            if ends[seat] > float("-inf"):
                changes.append((ends[seat], -1))
        ends[seat] = max(ends[seat], at + service)
    changes += [(end, -1) for end in ends if end > float("-inf")]
    lasting = [0.0] * (len(scenario.seats) + 1)
    active, most, last = 0, 0, 0.0
    for moment, change in sorted(changes):
        clipped = min(moment, scenario.duration)
        lasting[active] += max(0.0, clipped - last)
        active, last = active + change, max(last, clipped)
        most = max(most, active)
    lasting[active] += max(0.0, scenario.duration - last)
    total = sum(lasting)
    return Needed(
        expected_active=sum(count * time for count, time in enumerate(lasting)) / total if total else 0.0,
        slots_95=_enough(lasting, 0.95),
        slots_99=_enough(lasting, 0.99),
        most=most,
        seats=len(scenario.seats),
        slots=sum(group.slots for group in scenario.groups),
    )


def _enough(lasting: Sequence[float], share: float) -> int:
    """The smallest number that is not exceeded for this share of the time."""
    total, seen = sum(lasting), 0.0
    for count, time in enumerate(lasting):
        seen += time
        if seen >= share * total - 1e-9:
            return count
    return len(lasting) - 1
