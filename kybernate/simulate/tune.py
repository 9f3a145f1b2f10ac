"""Choosing constants of the KYB policies from the last days of a trace. Pure but for worker processes.

A small fixed grid is played on all days. On each day but the first the best of the days before it is compared with the
default, so that no day has a part in a choice that it judges, nor in one that later choices are compared with. (Holding
each day out against all others does not do: the luck of one candidate is in all of those choices, and noise is taken
for a gain several times as often as it should.) Only a gain over all judged days that is no accident is recommended.
The grid bounds what can come of it.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import product
from math import ceil
from multiprocessing import get_context
from typing import Any, cast

from kybernate.policy import POLICIES, Policy
from kybernate.simulate.engine import Options, run
from kybernate.simulate.model import Scenario
from kybernate.simulate.statistics import REPEATS, Figures, Interval, Pool, Sample, blocks, draws, interval

MODES = ("kyb-balanced", "kyb-bounded", "kyb-slo")
CLOSE_RATIOS = (0.8, 1.2, 2.0)
LENGTH_POWERS = (0.5, 0.7, 1.0)
TIMES = {"age_weight": (0.5, 2.0), "cap_slos": (0.5, 2.0)}
"""One at a time, so many times the default."""
LONGER_VISIT = 10.0
"""Seconds for ``min_visit_seconds``."""
_LEVEL = 0.98
"""Of the interval that must lie above 0: with few pieces it is narrower than it should be, so it is not 0.95."""
_BLOCKS, _SHORTEST_BLOCK = 48, 600.0
"""Into how many pieces a day is cut to see what is accident; seconds of the shortest."""

_NEARLY = 0.02
"""A trace ends with its last request: one that lacks so little of a whole number of days has that many."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with constants that differ from its defaults."""

    policy: str
    settings: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Policy:
        """Ready to decide."""
        return replace(cast(Any, POLICIES[self.policy]()), **dict(self.settings))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return " ".join((self.policy, *(f"{name}={value:g}" for name, value in self.settings)))


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it. J is ``Figures.objective``: less is better."""

    default: Candidate
    chosen: Candidate
    """Best over all days."""
    ranking: tuple[tuple[Candidate, float], ...]
    """Every candidate with its mean J over the days, best first."""
    default_score: float
    """J of the default there."""
    picked: tuple[Candidate, ...]
    """For each day but the first the best of the days before it: what was compared with the default on it."""
    before: Figures
    """The default, over all days but the first."""
    after: Figures
    """What was picked, over the same days."""
    gain: float
    """J that was gained."""
    gain_ci: Interval
    recommended: bool
    why: str


def candidates(modes: Iterable[str] = MODES) -> tuple[Candidate, ...]:
    """The grid; the plain default of the first mode comes first. 43 for all three modes."""
    found: dict[Policy, Candidate] = {}
    for mode in modes:
        default = cast(Any, POLICIES[mode]())
        changes: list[dict[str, float]] = [{}]
        changes += [
            {"close_ratio": ratio, "length_power": power} for ratio, power in product(CLOSE_RATIOS, LENGTH_POWERS)
        ]
        changes += [{name: getattr(default, name) * times} for name, many in TIMES.items() for times in many]
        changes.append({"min_visit_seconds": LONGER_VISIT})
        for change in changes:
            policy = replace(default, **change)
            differing = tuple(
                (field.name, getattr(policy, field.name))
                for field in fields(policy)
                if getattr(policy, field.name) != getattr(default, field.name)
            )
            found.setdefault(policy, Candidate(mode, differing))
    return tuple(found.values())


def days(scenario: Scenario, seconds: float, count: int) -> list[Scenario]:
    """The last ``count`` pieces of so many seconds, oldest first; what is left over at the beginning is not used, nor
    are pieces without requests.
    """
    whole = int(scenario.duration / seconds + _NEARLY)
    found = []
    for back in range(min(count, whole), 0, -1):
        start = scenario.duration - back * seconds
        end = start + seconds if back > 1 else float("inf")
        rows = [index for index, at in enumerate(scenario.at) if start <= at < end]
        if rows:
            found.append(
                replace(
                    scenario,
                    name=f"{scenario.name}, {start / 3600:.4g} h to {(start + seconds) / 3600:.4g} h",
                    at=tuple(scenario.at[index] - start for index in rows),
                    seat=tuple(scenario.seat[index] for index in rows),
                    service=tuple(scenario.service[index] for index in rows),
                    duration=seconds,
                )
            )
    return found


def tune(parts: Sequence[Scenario], modes: Sequence[str] = MODES, *, jobs: int = 1, seed: int = 0) -> Tuned:
    """Choose on the days, and compare choices with the default of the first mode on the days that came after them.

    Raises ValueError for less than two parts, SimulationError.
    """
    if len(parts) < 2:
        raise ValueError("tuning needs a day to choose on and a later one to check the choice: give a longer trace")
    grid = candidates(modes)
    scores = _scores(grid, parts, jobs)
    picks = picked(scores)
    judged = parts[1:]
    before = [held_out(grid[0], part) for part in judged]
    after = [
        own if pick == 0 else held_out(grid[pick], part) for pick, part, own in zip(picks, judged, before, strict=True)
    ]
    first, second = figures(before), figures(after)
    gain, sides = gained(before, after, seed)
    means = [sum(row) / len(row) for row in scores]
    ranking = sorted(zip(grid, means, strict=True), key=lambda pair: pair[1])
    recommended, why = verdict(grid[0], ranking[0][0], gain, sides)
    return Tuned(
        grid[0], ranking[0][0], tuple(ranking), means[0], tuple(grid[pick] for pick in picks), first, second, gain,
        sides, recommended, why,
    )  # fmt: skip


def picked(scores: Sequence[Sequence[float]]) -> list[int]:
    """For each day but the first, the candidate (by place) with the least J over the days before it;
    ``scores[candidate][day]``.
    """
    places = range(len(scores))
    return [min(places, key=lambda one: (sum(scores[one][:day]), one)) for day in range(1, len(scores[0]))]


def gained(
    before: Sequence[Sequence[Sample]], after: Sequence[Sequence[Sample]], seed: int = 0, *, repeats: int = REPEATS
) -> tuple[float, Interval]:
    """J that was gained over days, and what chance makes of it: pieces of days are drawn, the same for both."""
    first, second = (Pool([piece for day in side for piece in day]) for side in (before, after))
    spread = [
        first.figures(weights).objective - second.figures(weights).objective
        for weights in draws(sum(map(len, before)), seed, repeats=repeats)
    ]
    return first.figures().objective - second.figures().objective, interval(spread, _LEVEL)


def figures(days_: Sequence[Sequence[Sample]]) -> Figures:
    """Of all days together."""
    return Pool([piece for day in days_ for piece in day]).figures()


def verdict(default: Candidate, chosen: Candidate, gain: float, sides: Interval) -> tuple[bool, str]:
    """Whether to recommend, and why."""
    low, high = sides
    if chosen == default:
        return False, "the default was the best; keep it"
    if gain <= 0:
        return False, f"what was best on days before lost {-gain:.2f} on the days after: an accident"
    if low <= 0:
        return False, f"the gain on the days after a choice, {gain:.2f}, is within noise ({low:+.2f} to {high:+.2f})"
    return True, f"the gain on the days after a choice, {gain:.2f}, is no accident ({low:+.2f} to {high:+.2f})"


def held_out(candidate: Candidate, scenario: Scenario) -> list[Sample]:
    """One day under one candidate, in pieces."""
    outcome = run(scenario, candidate.build(), Options(name=str(candidate)))
    return blocks(outcome, scenario, max(_SHORTEST_BLOCK, ceil(scenario.duration / _BLOCKS)))


def score(candidate: Candidate, scenario: Scenario) -> float:
    """J of one day."""
    return Pool(held_out(candidate, scenario)).figures().objective


def _scores(grid: Sequence[Candidate], parts: Sequence[Scenario], jobs: int) -> list[list[float]]:
    """J of each candidate on each day."""
    if jobs <= 1:
        return [[score(one, part) for part in parts] for one in grid]
    with ProcessPoolExecutor(jobs, get_context("spawn"), _Worker.begin, (tuple(parts),)) as pool:
        return list(pool.map(_Worker.scores, grid))


class _Worker:
    """A process that was given the days once."""

    parts: tuple[Scenario, ...] = ()

    @classmethod
    def begin(cls, parts: tuple[Scenario, ...]) -> None:
        """Keep the days."""
        cls.parts = parts

    @classmethod
    def scores(cls, candidate: Candidate) -> list[float]:
        """J of a candidate on each of them."""
        return [score(candidate, part) for part in cls.parts]
