"""Choosing constants of the KYB policies from the last days of a trace. Pure but for worker processes.

A small fixed grid is played on all days, and each candidate is compared with the default on the same pieces of time.
The best of many is better than the default by luck alone, so the question is how often luck would make *any* candidate
stand out as much: pieces are drawn anew, the same for all, and the largest of all deviations, each divided by the
candidate's spread, is what the best must exceed (White's reality check, studentized as by Romano and Wolf). All days
choose and judge: holding some out was tried and detected too little (``docs/dev/tune.md``). The grid bounds the
results.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import product
from math import ceil, sqrt
from multiprocessing import get_context
from typing import Any, cast

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import Figures, Pool, WindowSample, blocks, draws
from kybernate.lab.simulate.model import Scenario
from kybernate.policy import Policy

MODES = ("kyb-balanced", "kyb-bounded", "kyb-slo")
CLOSE_RATIOS = (0.8, 1.2, 2.0)
LENGTH_POWERS = (0.5, 0.7, 1.0)
TIMES = {"age_weight": (0.5, 2.0), "cap_slos": (0.5, 2.0)}
"""One at a time, so many times the default."""
LONGER_VISIT = 10.0
"""Seconds for ``min_visit_seconds``."""
_CHANCE = 0.01
"""How often luck alone may make some candidate stand out as much as one that is recommended. Draws of few pieces
understate luck: asked for 0.01, made-up candidates without any difference are recommended in 2.5 % of the cases.
"""
_LEAST_SHARE = 0.01
"""Of J; a smaller gain, however certain, is not worth a change."""
_REPEATS = 1000
"""Draws of pieces."""
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
class PlayedCandidate:
    """What a candidate gave over all days. J is ``Figures.objective``: less is better."""

    by_day: tuple[float, ...]
    """J of each day."""
    figures: Figures
    """Of all days together."""
    drawn: tuple[float, ...]
    """J of each draw of pieces."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A candidate against the default on the same pieces."""

    candidate: Candidate
    objective: float
    """Its J over all days."""
    gain: float
    """J that it is better than the default."""
    surely: float
    """What is left of the gain when the luck of the best of so many is taken off; above 0: no accident."""
    days: int
    """On how many days it is better."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it."""

    default: Candidate
    chosen: Candidate
    """The first of the ranking; the default when that is not better."""
    ranking: tuple[Gain, ...]
    """Every candidate but the default, the one with the most that is surely gained first."""
    before: Figures
    """The default over all days."""
    after: Figures
    """The chosen one."""
    recommended: bool
    why: str
    days: int


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


def last_days(scenario: Scenario, seconds: float, count: int) -> tuple[Scenario, int]:
    """The last ``count`` days of so many seconds, or as many as there are, and their number; what is left over at the
    beginning is not used. They are one scenario, since requests that wait at midnight wait on.
    """
    whole = min(count, int(scenario.duration / seconds + _NEARLY))
    start = max(0.0, scenario.duration - whole * seconds)
    rows = [index for index, at in enumerate(scenario.at) if at >= start] if whole else []
    cut = replace(
        scenario,
        name=f"{scenario.name}, {start / 3600:.4g} h to {scenario.duration / 3600:.4g} h",
        at=tuple(scenario.at[index] - start for index in rows),
        seat=tuple(scenario.seat[index] for index in rows),
        service=tuple(scenario.service[index] for index in rows),
        duration=whole * seconds,
    )
    return cut, whole


def tune(scenario: Scenario, days: int, modes: Sequence[str] = MODES, *, jobs: int = 1, seed: int = 0) -> Tuned:
    """Compare the grid with the default of the first mode on a scenario of so many days. Raises ValueError for less
    than two days with requests, SimulationError.
    """
    asked = len({min(days - 1, int(at * days / scenario.duration)) for at in scenario.at}) if days else 0
    if asked < 2:
        raise ValueError("tuning needs two days with requests at least: give a longer trace or shorter days")
    grid = candidates(modes)
    played = _played(grid, scenario, days, jobs, seed)
    ranking = ranked(grid, played)
    recommended, why = verdict(ranking, played[0].figures.objective, asked)
    chosen = ranking[0].candidate if ranking and ranking[0].gain > 0 else grid[0]
    after = played[grid.index(chosen)].figures
    return Tuned(grid[0], chosen, ranking, played[0].figures, after, recommended, why, asked)


def ranked(grid: Sequence[Candidate], played: Sequence[PlayedCandidate]) -> tuple[Gain, ...]:
    """All but the first, which is the default, those with the most that is left without luck first."""
    default, rows, spreads = played[0], [], []
    for one in played[1:]:
        gain = default.figures.objective - one.figures.objective
        luck = [before - after - gain for before, after in zip(default.drawn, one.drawn, strict=True)]
        spread = max(sqrt(sum(each * each for each in luck) / len(luck)), 1e-9)
        rows.append((gain, spread))
        spreads.append([each / spread for each in luck])
    if not rows:
        return ()
    most = sorted(max(row) for row in zip(*spreads, strict=True))
    limit = most[min(len(most) - 1, ceil((1 - _CHANCE) * len(most)))]
    found = [
        Gain(candidate, one.figures.objective, gain, gain - limit * spread, _better_days(default, one))
        for candidate, one, (gain, spread) in zip(grid[1:], played[1:], rows, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: -one.surely))


def _better_days(default: PlayedCandidate, one: PlayedCandidate) -> int:
    return sum(after < before for before, after in zip(default.by_day, one.by_day, strict=True))


def verdict(ranking: Sequence[Gain], objective: float, days: int) -> tuple[bool, str]:
    """Whether to recommend the first, and why."""
    if not ranking or ranking[0].gain <= 0:
        return False, "no candidate is better than the default; keep it"
    first = ranking[0]
    gain = f"its gain of {first.gain:.2f}"
    if first.surely <= 0:
        return False, f"{gain} is within the luck of the best of {len(ranking) + 1}; keep the default"
    if first.gain < _LEAST_SHARE * objective:
        return False, f"{gain} is no accident, but less than {_LEAST_SHARE:.0%}; keep the default"
    if 2 * first.days <= days:
        return False, f"{gain} comes from {first.days} of {days} days; keep the default"
    return True, f"{gain} is no accident (at least {first.surely:.2f}), on {first.days} of {days} days"


def play(candidate: Candidate, scenario: Scenario, days: int, seed: int) -> PlayedCandidate:
    """All days under one candidate, each cut into pieces."""
    outcome = run(scenario, candidate.build(), RunOptions(name=str(candidate)))
    day = scenario.duration / days
    each = max(1, min(_BLOCKS, int(day / _SHORTEST_BLOCK)))
    pieces = blocks(outcome, scenario, day / each * (1 + 1e-9))
    return over_days([pieces[place : place + each] for place in range(0, len(pieces), each)], seed)


def over_days(days: Sequence[Sequence[WindowSample]], seed: int, repeats: int = _REPEATS) -> PlayedCandidate:
    """Figures of the pieces of each day, and of draws of pieces that are the same for every candidate."""
    pool = Pool([piece for day in days for piece in day])
    weights = draws(sum(map(len, days)), seed, repeats=repeats)
    return PlayedCandidate(
        tuple(Pool(day).figures().objective for day in days),
        pool.figures(),
        tuple(pool.figures(each).objective for each in weights),
    )


def _played(grid: Sequence[Candidate], scenario: Scenario, days: int, jobs: int, seed: int) -> list[PlayedCandidate]:
    if jobs <= 1:
        return [play(one, scenario, days, seed) for one in grid]
    with ProcessPoolExecutor(jobs, get_context("spawn"), _Worker.begin, (scenario, days, seed)) as pool:
        return list(pool.map(_Worker.play, grid))


class _Worker:
    """A process that was given the days once."""

    given: tuple[Scenario, int, int]

    @classmethod
    def begin(cls, scenario: Scenario, days: int, seed: int) -> None:
        """Keep the days."""
        cls.given = scenario, days, seed

    @classmethod
    def play(cls, candidate: Candidate) -> PlayedCandidate:
        """All of them under one candidate."""
        return play(candidate, *cls.given)
