"""Choosing constants of the KYB policies from the last days of a trace. Pure but for worker processes.

A small fixed grid is played on some days, and the best of it is compared with the default on a later day that had no
part in the choice. Only a gain that is no accident of that day is recommended. The grid bounds what can come of it.
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
from kybernate.simulate.statistics import Figures, Interval, Pool, Sample, blocks, draws, interval

MODES = ("kyb-balanced", "kyb-bounded", "kyb-slo")
CLOSE_RATIOS = (0.8, 1.2, 2.0)
LENGTH_POWERS = (0.5, 0.7, 1.0)
TIMES = {"age_weight": (0.5, 2.0), "cap_slos": (0.5, 2.0)}
"""One at a time, so many times the default."""
LONGER_VISIT = 10.0
"""Seconds for ``min_visit_seconds``."""
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
    ranking: tuple[tuple[Candidate, float], ...]
    """Every candidate with its mean J over the days that were tuned on, best first."""
    tuned_default: float
    """J of the default there."""
    before: Figures
    """The default on the day that was held out."""
    after: Figures
    """The chosen one there."""
    gain: float
    """J that was gained on that day."""
    gain_ci: Interval
    recommended: bool
    why: str
    days: int
    """That were tuned on."""


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
    """Choose on all parts but the last, compare with the default of the first mode on the last.

    Raises ValueError for less than two parts, SimulationError.
    """
    if len(parts) < 2:
        raise ValueError("tuning needs a day to choose on and a later one to check the choice: give a longer trace")
    grid = candidates(modes)
    scores = _scores(grid, parts[:-1], jobs)
    ranking = sorted(zip(grid, scores, strict=True), key=lambda pair: pair[1])
    default, chosen = grid[0], ranking[0][0]
    pieces = {one: held_out(one, parts[-1]) for one in {default, chosen}}
    before, after = Pool(pieces[default]), Pool(pieces[chosen])
    gain = before.figures().objective - after.figures().objective
    spread = [
        before.figures(weights).objective - after.figures(weights).objective
        for weights in draws(len(pieces[default]), seed)
    ]
    low, high = interval(spread)
    recommended, why = verdict(default, chosen, gain, (low, high))
    return Tuned(
        default, chosen, tuple(ranking), scores[0], before.figures(), after.figures(), gain, (low, high), recommended,
        why, len(parts) - 1,
    )  # fmt: skip


def verdict(default: Candidate, chosen: Candidate, gain: float, sides: Interval) -> tuple[bool, str]:
    """Whether to recommend, and why."""
    low, high = sides
    if chosen == default:
        return False, "the default was the best on the days before; keep it"
    if gain <= 0:
        return False, f"it lost {-gain:.2f} on the day that was held out: what it gained before was an accident"
    if low <= 0:
        return False, f"its gain on the day that was held out is within noise ({low:+.2f} to {high:+.2f})"
    return True, f"its gain on the day that was held out is no accident ({low:+.2f} to {high:+.2f})"


def held_out(candidate: Candidate, scenario: Scenario) -> list[Sample]:
    """One day under one candidate, in pieces."""
    outcome = run(scenario, candidate.build(), Options(name=str(candidate)))
    return blocks(outcome, scenario, max(_SHORTEST_BLOCK, ceil(scenario.duration / _BLOCKS)))


def score(candidate: Candidate, scenario: Scenario) -> float:
    """J of one day."""
    return Pool(held_out(candidate, scenario)).figures().objective


def _scores(grid: Sequence[Candidate], parts: Sequence[Scenario], jobs: int) -> list[float]:
    """Mean J of each candidate over the parts."""
    if jobs <= 1:
        return [sum(score(one, part) for part in parts) / len(parts) for one in grid]
    with ProcessPoolExecutor(jobs, get_context("spawn"), _Worker.begin, (tuple(parts),)) as pool:
        return list(pool.map(_Worker.mean_score, grid))


class _Worker:
    """A process that was given the days once."""

    parts: tuple[Scenario, ...] = ()

    @classmethod
    def begin(cls, parts: tuple[Scenario, ...]) -> None:
        """Keep the days."""
        cls.parts = parts

    @classmethod
    def mean_score(cls, candidate: Candidate) -> float:
        """Mean J of a candidate over them."""
        return sum(score(candidate, part) for part in cls.parts) / len(cls.parts)
