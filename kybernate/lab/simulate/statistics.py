"""Tables over several windows: pooled figures and bootstrap confidence intervals, paired over policies. Pure.

A window is what is drawn, never a request: requests of one window wait for each other and are not independent. Every
policy is resampled with the same draws, so that differences between policies are paired.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from kybernate.lab.simulate.model import Outcome, Scenario, Visit

METRICS = ("wait_mean_s", "wait_p99_s", "wait_max_s", "slo_attainment", "switches_per_hour")
REPEATS = 2000
"""Draws of a bootstrap."""
LEVEL = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one window gave under one policy. Waits in model seconds."""

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
    slo_attainment: float
    """Between 0 and 1."""
    switches_per_hour: float

    @property
    def objective(self) -> float:
        """J = mean + 0.1 p99 + 0.5 (100 - percent within the SLO); less is better. Of the research, section 4.3."""
        return self.wait_mean_s + 0.1 * self.wait_p99_s + 50.0 * (1.0 - self.slo_attainment)


def sampled(outcome: Outcome, scenario: Scenario) -> Sample:
    """What a run gave."""
    slos = [seat.slo_seconds for seat in scenario.seats]
    met = sum(
        wait + stall <= slos[seat] for wait, stall, seat in zip(outcome.wait, outcome.stall, scenario.seat, strict=True)
    )
    hours = max(outcome.ended, scenario.duration) / 3600
    return Sample(outcome.wait, met, outcome.counters.get("switches", len(outcome.visits)), hours)


def planned(waits: Sequence[float], visits: Sequence[Visit], scenario: Scenario) -> Sample:
    """What a schedule comes to that was found by search."""
    slos = [seat.slo_seconds + 1e-6 for seat in scenario.seats]
    met = sum(wait <= slos[seat] for wait, seat in zip(waits, scenario.seat, strict=True))
    ended = max((visit.gone for visit in visits), default=0.0)
    return Sample(tuple(waits), met, len(visits), max(ended, scenario.duration) / 3600)


def blocks(outcome: Outcome, scenario: Scenario, seconds: float) -> list[Sample]:
    """One run cut by time of arrival into windows of so many seconds; switches are spread evenly over them."""
    count = max(1, ceil(scenario.duration / seconds))
    waits: list[list[float]] = [[] for _ in range(count)]
    met = [0] * count
    slos = [seat.slo_seconds for seat in scenario.seats]
    for at, seat, wait, stall in zip(scenario.at, scenario.seat, outcome.wait, outcome.stall, strict=True):
        place = min(count - 1, int(at / seconds))
        waits[place].append(wait)
        met[place] += wait + stall <= slos[seat]
    hours = scenario.duration / count / 3600
    switches = outcome.counters.get("switches", len(outcome.visits)) / count
    return [Sample(tuple(own), good, round(switches), hours) for own, good in zip(waits, met, strict=True)]


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


class Pool:
    """Windows of one policy, sorted once; figures for any weights of the windows."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.sums = [(len(one.waits), sum(one.waits), one.met, one.switches, one.hours) for one in samples]
        self.down = sorted(((wait, place) for place, one in enumerate(samples) for wait in one.waits), reverse=True)

    def figures(self, weights: Sequence[int] | None = None) -> Figures:
        """Pooled figures, each window as often as its weight (default: once)."""
        used = [1] * len(self.sums) if weights is None else weights
        count, waited, met, switches, hours = (
            sum(weight * own[column] for weight, own in zip(used, self.sums, strict=True)) for column in range(5)
        )
        if not count:
            return Figures(0.0, 0.0, 0.0, 1.0, switches / hours if hours else 0.0)
        above, seen, longest = count - ceil(0.99 * count), 0, -1.0
        wait = 0.0
        for wait, place in self.down:
            if used[place]:
                longest = wait if longest < 0 else longest
                seen += used[place]
                if seen > above:
                    break
        return Figures(waited / count, wait, longest, met / count, switches / hours if hours else 0.0)

    def resampled(self, weights: Iterable[Sequence[int]]) -> list[Figures]:
        """Figures of every resample."""
        return [self.figures(one) for one in weights]


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Percentile interval of resampled values: what is left when equal shares are cut off at both ends."""
    ordered = sorted(values)
    cut = (1.0 - level) / 2
    last = len(ordered) - 1
    return ordered[round(cut * last)], ordered[round((1.0 - cut) * last)]


def intervals(resampled: Sequence[Figures]) -> dict[str, Interval]:
    """Of every metric."""
    return {name: interval([getattr(one, name) for one in resampled]) for name in METRICS}
