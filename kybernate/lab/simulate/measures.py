"""Measures of outcomes: waits, attainment and switches of one run; pooled figures and intervals of several.

No I/O; intervals are deterministic for a seed.

Percentiles are nearest-rank: the smallest wait that at least so many percent do not exceed. Intervals are bootstrapped
over windows, never over requests: requests of one window wait for each other and are not independent. Every policy is
resampled with the same draws, so that differences between policies are paired.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil, sqrt
from random import Random
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
    immediate: float
    """Share of requests that did not wait at all."""
    slo_attainment: float
    """Share of requests that waited no longer than their seat's SLO."""
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
    waits = sorted(outcome.wait)
    met = [wait <= scenario.seats[seat].slo_seconds for wait, seat in zip(outcome.wait, scenario.seat, strict=True)]
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
        immediate=_mean([wait <= AT_ONCE for wait in waits]),
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


AT_ONCE = 1e-9
"""Seconds: a shorter wait is none."""


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
    """How many seats have requests at the same time if nothing had to be switched."""

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
    """Count, at every moment, the seats with at least one request in flight if each had separate GPUs."""
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


REPEATS = 2000
"""Draws of a bootstrap."""
LEVEL = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The result of one window under one policy. Waits in model seconds."""

    waits: tuple[float, ...]
    met: int
    """Requests within their SLO."""
    switches: int
    hours: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Pooled over windows: the requests of all of them count alike."""

    wait_mean_s: float
    wait_p99_s: float
    """Nearest rank."""
    wait_max_s: float
    immediate: float
    """Share of requests that did not wait at all."""
    slo_attainment: float
    """Between 0 and 1."""
    switches_per_hour: float

    @property
    def objective(self) -> float:
        """J = mean + 0.1 p99 + 0.5 (100 - percent within the SLO); less is better."""
        return self.wait_mean_s + 0.1 * self.wait_p99_s + 50.0 * (1.0 - self.slo_attainment)


def sampled(outcome: Outcome, scenario: Scenario) -> WindowSample:
    """The sample of a run."""
    slos = [seat.slo_seconds for seat in scenario.seats]
    met = sum(wait <= slos[seat] for wait, seat in zip(outcome.wait, scenario.seat, strict=True))
    hours = max(outcome.ended, scenario.duration) / 3600
    return WindowSample(outcome.wait, met, outcome.counters.get("switches", len(outcome.visits)), hours)


def blocks(outcome: Outcome, scenario: Scenario, seconds: float) -> list[WindowSample]:
    """One run cut by time of arrival into windows of so many seconds; switches are spread evenly over them."""
    count = max(1, ceil(scenario.duration / seconds))
    waits: list[list[float]] = [[] for _ in range(count)]
    met = [0] * count
    slos = [seat.slo_seconds for seat in scenario.seats]
    for at, seat, wait in zip(scenario.at, scenario.seat, outcome.wait, strict=True):
        place = min(count - 1, int(at / seconds))
        waits[place].append(wait)
        met[place] += wait <= slos[seat]
    hours = scenario.duration / count / 3600
    switches = outcome.counters.get("switches", len(outcome.visits)) / count
    return [WindowSample(tuple(own), good, round(switches), hours) for own, good in zip(waits, met, strict=True)]


def draws(windows: int, seed: int, *, size: int | None = None, repeats: int = REPEATS) -> list[list[int]]:
    """How often each window is in each resample. ``size`` windows are drawn with replacement (default: as many)."""
    random = Random(f"bootstrap/{seed}/{windows}/{size}")
    found = []
    for _ in range(repeats):
        counts = [0] * windows
        for _ in range(windows if size is None else size):
            counts[int(random.random() * windows)] += 1
        found.append(counts)
    return found


def promise(at: Sequence[float], met: Sequence[bool], days: float = 1.0) -> float | None:
    """The share within the SLO that a model reaches on another day like these, with a confidence of 99 %; None: too few
    requests to say. ``at`` and ``met``: when its requests came, and whether they were within the SLO.

    Wilson's lower bound. Requests less than ``_APART`` seconds apart meet the same switches and are one trial. The
    other day varies, too, so that the ``n`` trials of ``days`` days count as ``1 / (1/n + days/n)``.
    """
    trials = (1 + sum(later - earlier > _APART for earlier, later in pairwise(at))) / (1 + days) if at else 0.0
    if trials < _FEWEST_TRIALS:
        return None
    share = _mean(met)
    spread = _DEVIATIONS * sqrt(share * (1 - share) / trials + (_DEVIATIONS / trials / 2) ** 2)
    return (share + _DEVIATIONS**2 / trials / 2 - spread) / (1 + _DEVIATIONS**2 / trials)


_APART = 60.0
_FEWEST_TRIALS = 10.0
_DEVIATIONS = 2.33
"""Below so many standard deviations is 1 % of a normal distribution."""


class Pool:
    """Windows of one policy, sorted once; figures for any weights of the windows."""

    def __init__(self, samples: Sequence[WindowSample]) -> None:
        self.sums = [
            (
                len(one.waits),
                sum(one.waits),
                sum(wait <= AT_ONCE for wait in one.waits),
                one.met,
                one.switches,
                one.hours,
            )
            for one in samples
        ]
        self.down = sorted(((wait, place) for place, one in enumerate(samples) for wait in one.waits), reverse=True)

    def figures(self, weights: Sequence[int] | None = None) -> Figures:
        """Pooled figures, each window as often as its weight (default: once)."""
        used = [1] * len(self.sums) if weights is None else weights
        count, waited, at_once, met, switches, hours = (
            sum(weight * own[column] for weight, own in zip(used, self.sums, strict=True)) for column in range(6)
        )
        if not count:
            return Figures(0.0, 0.0, 0.0, 0.0, 1.0, switches / hours if hours else 0.0)
        above, seen, longest = count - ceil(0.99 * count), 0, -1.0
        wait = 0.0
        for wait, place in self.down:
            if used[place]:
                longest = wait if longest < 0 else longest
                seen += used[place]
                if seen > above:
                    break
        return Figures(waited / count, wait, longest, at_once / count, met / count, switches / hours if hours else 0.0)

    def resampled(self, weights: Iterable[Sequence[int]]) -> list[Figures]:
        """Figures of every resample."""
        return [self.figures(one) for one in weights]


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Percentile interval of resampled values: what is left when equal shares are cut off at both ends."""
    ordered = sorted(values)
    cut = (1.0 - level) / 2
    last = len(ordered) - 1
    return ordered[round(cut * last)], ordered[round((1.0 - cut) * last)]
