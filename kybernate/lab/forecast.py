"""How much traffic will come: a structural model of requests per hour, and how good it was on hours it had not seen.

The model (statsmodels' ``UnobservedComponents``) is a level, a day's season, where each fit of the backtest has two
weeks also a week's, and an error that fades; with or without a trend, whichever was better in the backtest. It is
fitted to square roots, whose noise does not grow with the traffic. Where the traffic of the week or the day before was
better in the backtest, that is the forecast. Needs ``kybernate[lab]``.

Bands are conformal: the band of the model is made so many times as wide that it holds 80 % of the days of the backtest.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Any

from kybernate.lab import INSTALL

DAY = 24
"""Hours."""
WEEK = 7 * DAY
_DAY_SECONDS = 3600.0 * DAY
LEAST_DAYS = 4
"""Of a trace: fewer tell nothing of a season."""
LOOK_AHEAD_DAYS = 90
"""A fleet that is enough for longer has no saturation date."""
_MOST_HOURS = 8 * WEEK
"""Older hours are not looked at."""
_ORIGINS = 7
_PATHS = 200
_TAIL = 0.1
"""Intervals leave out this share at both ends."""

UNSEEN = "68 to 85 %"
"""So many days that no fit had seen the band held that asks for 80 %, by the day that the forecasts began on: traces of
7 to 10 days, from which three forecasts can be tested (docs/dev/plan.md)."""

Band = tuple[float, float, float]
"""Low, median, high: 80 % of the futures that are drawn are between the first and the last."""


class ForecastError(Exception):
    """No forecast; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Backtest:
    """Errors on days that a method had not seen, over all starts of a forecast. 0.1 is 10 %."""

    method: str
    """``naive week``: the same hour of the week before, where each start has one before it; ``naive day``: of the day
    before; ``level``, ``trend``: the model without and with a trend."""
    mape: float
    """Mean of the errors of the hours with requests, each divided by its requests."""
    wape: float
    """Sum of the errors, divided by the sum of the requests: hours with few requests count little."""
    days_wape: float
    """The same of whole days, on which the saturation date depends."""
    coverage: float | None
    """Share of the days whose requests were within the band that follows from other starts; None: there are none."""
    width: float
    """So many times as wide as the model says is the band that holds 80 % of the days."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests a day, from the end of the trace on."""

    method: str
    backtest: tuple[Backtest, ...]
    backtest_days: int
    """Length of each forecast of the backtest."""
    origins: int
    """So many of them."""
    days: tuple[Band, ...]
    """Requests of each day asked for."""
    growth: Band | None
    """Mean of these days, divided by that of the last week of the trace; None where the days are no whole weeks (a
    Monday after a Sunday is no growth), or without a week or a request in it."""
    paths: tuple[tuple[float, ...], ...]
    """Requests of each of the next ``LOOK_AHEAD_DAYS`` in each future drawn."""

    def full_in(self, requests_a_day: float) -> tuple[int | None, int | None, int | None]:
        """In how many days the traffic of a day first exceeds this: early, median, late; None: not within
        ``LOOK_AHEAD_DAYS``."""
        never = LOOK_AHEAD_DAYS + 1
        first = sorted(
            next((day for day, requests in enumerate(path, 1) if requests > requests_a_day), never)
            for path in self.paths
        )
        early, median, late = (first[round(share * (len(first) - 1))] for share in (_TAIL, 0.5, 1 - _TAIL))
        return tuple(None if day == never else day for day in (early, median, late))  # type: ignore[return-value]


def whole_hours(moments: Sequence[float]) -> int:
    """Hours of a trace that are over: it is taken to end a mean gap after its last request. Moments in seconds, in
    order."""
    return int((moments[-1] + moments[-1] / max(1, len(moments) - 1)) // 3600) if moments else 0


def hourly(moments: Iterable[float], hours: int) -> list[float]:
    """Requests of each of the first hours; moments in seconds."""
    counts = [0.0] * hours
    for moment in moments:
        if moment < 3600 * hours:
            counts[int(moment // 3600)] += 1
    return counts


def busiest_day(moments: Sequence[float], start: float, end: float) -> int | None:
    """Requests of the busiest whole day from start on; None where there is none until the end. All in seconds."""
    counts = [0] * int(max(0.0, end - start) // _DAY_SECONDS)
    for moment in moments:
        if 0 <= moment - start < _DAY_SECONDS * len(counts):
            counts[int((moment - start) // _DAY_SECONDS)] += 1
    return max(counts, default=None)


def forecast(requests: Sequence[float], days: int) -> Forecast:
    """So many days from the end of these requests per hour on. Raises ForecastError."""
    if len(requests) < LEAST_DAYS * DAY:
        raise ForecastError(
            f"{len(requests)} whole hours of requests are too few for a forecast; give a trace of at least "
            f"{LEAST_DAYS} days"
        )
    seen = list(requests[-_MOST_HOURS:])
    tested, horizon, origins = backtest(seen, days)
    best = min(tested, key=lambda one: one.wape)
    seasons = _seasons(_starts(len(seen), days)[1])
    ahead = max(days, LOOK_AHEAD_DAYS)
    drawn = _Fitted(seen, _model(best.method), seasons).paths(ahead)
    paths = _widened(drawn, _points(seen, best.method, drawn), best.width)
    base = sum(seen[-WEEK:]) / 7 if days % 7 == 0 and len(seen) >= WEEK else 0.0
    return Forecast(
        method=best.method,
        backtest=tuple(tested),
        backtest_days=horizon,
        origins=origins,
        days=tuple(_band([path[day] for path in paths]) for day in range(days)),
        growth=_band([sum(path[:days]) / days / base for path in paths]) if base else None,
        paths=tuple(tuple(path[:LOOK_AHEAD_DAYS]) for path in paths),
    )


def backtest(requests: Sequence[float], days: int) -> tuple[list[Backtest], int, int]:
    """Forecasts from earlier days on, against what came: the errors of each method, the days that each forecast was
    long (at most a third of what is known), and how many there were."""
    horizon, starts = _starts(len(requests), days)
    seasons, naive = _seasons(starts), dict(_NAIVE)
    if min(starts) * DAY < WEEK:
        del naive["naive week"]
    found: dict[str, list[tuple[float, float]]] = {}
    scores: dict[str, list[list[float]]] = {}
    for start in starts:
        past, came = requests[: start * DAY], requests[start * DAY : (start + horizon) * DAY]
        fits = {method: _Fitted(past, method, seasons) for method in _MODELS}
        expected = {one: fit.expected(len(came)) for one, fit in fits.items()}
        expected = {one: _naive(past, horizon * DAY, period) for one, period in naive.items()} | expected
        drawn = {method: fit.paths(horizon) for method, fit in fits.items()}
        for method, hours in expected.items():
            found.setdefault(method, []).extend(zip(hours, came, strict=True))
            paths = drawn[_model(method)]
            days_of = zip(_points(past, method, paths), _by_day(came), _half_widths(paths), strict=True)
            missed = [abs(log((day + 1) / (point + 1))) / width for point, day, width in days_of]
            scores.setdefault(method, []).append(missed)
    return [_judged(method, pairs, scores[method]) for method, pairs in found.items()], horizon, len(starts)


def _starts(hours: int, days: int) -> tuple[int, range]:
    """Days that each forecast of the backtest is long, and the days of the trace on which they start."""
    known = hours // DAY
    horizon = min(days, known // 3)
    return horizon, range(known - horizon, max(LEAST_DAYS - 1, known // 2) - 1, -1)[:_ORIGINS]


def _seasons(starts: range) -> list[dict[str, int]]:
    """Of all fits, so that the backtest judges the model that is used."""
    day, week = {"period": DAY, "harmonics": 4}, {"period": WEEK, "harmonics": 2}
    return [day, week] if min(starts) * DAY >= 2 * WEEK else [day]


def _naive(past: Sequence[float], hours: int, period: int) -> list[float]:
    return [past[len(past) - period + hour % period] for hour in range(hours)]


def _model(method: str) -> str:
    """The model whose futures a method takes: a naive forecast draws none."""
    return method if method in _MODELS else "level"


def _points(past: Sequence[float], method: str, paths: Sequence[Sequence[float]]) -> list[float]:
    """The forecast of each day: the middle of the model's futures, or the same day of the last period."""
    if method in _MODELS:
        return [_band(day)[1] for day in zip(*paths, strict=True)]
    return _by_day(_naive(past, DAY * len(paths[0]), _NAIVE[method]))


def _half_widths(paths: Sequence[Sequence[float]]) -> list[float]:
    """Of the model's band of each day, as a logarithm."""
    bands = (_band(day) for day in zip(*paths, strict=True))
    return [max(_LEAST_WIDTH, log((high + 1) / (low + 1)) / 2) for low, _, high in bands]


def _widened(paths: Sequence[Sequence[float]], points: Sequence[float], times: float) -> list[list[float]]:
    """The same futures around other points, and so many times as far from them."""
    middle = [_band(day)[1] for day in zip(*paths, strict=True)]
    return [
        [
            max(0.0, (point + 1) * exp(times * log((day + 1) / (mid + 1))) - 1)
            for day, mid, point in zip(path, middle, points, strict=True)
        ]
        for path in paths
    ]


def _judged(method: str, pairs: Sequence[tuple[float, float]], scores: Sequence[Sequence[float]]) -> Backtest:
    """Pairs are what was expected of an hour, and what came; scores, by the start of a forecast, how many half widths
    of the model's band the days were away."""
    expected, came = zip(*pairs, strict=True)
    relative = [abs(one - other) / other for one, other in pairs if other > 0]
    held = [
        score <= _conformal([other for other in scores if other is not own])
        for own in scores
        for score in own
        if len(scores) > 1
    ]
    return Backtest(
        method=method,
        mape=sum(relative) / len(relative) if relative else 0.0,
        wape=_wape(expected, came),
        days_wape=_wape(_by_day(expected), _by_day(came)),
        coverage=sum(held) / len(held) if held else None,
        width=_conformal(scores),
    )


def _conformal(scores: Sequence[Sequence[float]]) -> float:
    """The score that a day is not above with a probability of 80 %, if its forecast comes like these. The days of one
    forecast miss together, so that forecasts are counted, not days; where they are too few, the highest score, and no
    narrower band than the model's."""
    ordered = sorted(score for own in scores for score in own)
    level = ceil((len(scores) + 1) * (1 - 2 * _TAIL) - 1e-9) / len(scores)
    found = ordered[min(len(ordered), ceil(level * len(ordered) - 1e-9)) - 1]
    return found if level <= 1 else max(1.0, found)


def _wape(expected: Sequence[float], came: Sequence[float]) -> float:
    errors = sum(abs(one - other) for one, other in zip(expected, came, strict=True))
    return errors / sum(came) if sum(came) else 0.0


def _by_day(hours: Sequence[float]) -> list[float]:
    return [sum(hours[first : first + DAY]) for first in range(0, len(hours), DAY)]


_NAIVE = {"naive week": WEEK, "naive day": DAY}
_LEAST_WIDTH = 0.01
"""Of half a band: a model that is surer is not believed."""
_MODELS = {"level": "llevel", "trend": "lldtrend"}
"""By method: statsmodels' name of a level that wanders, and of one that also drifts."""


class _Fitted:
    """The model of one series."""

    def __init__(self, requests: Sequence[float], method: str, seasons: list[dict[str, int]]) -> None:
        try:
            import numpy
            from statsmodels.tsa.statespace.structural import UnobservedComponents
        except ModuleNotFoundError as error:
            raise ForecastError(f"a forecast needs {error.name}: {INSTALL}") from None
        roots = numpy.sqrt(numpy.asarray(requests, dtype=float))
        self.scale = float(roots.std()) or 1.0
        model = UnobservedComponents(
            roots / self.scale, level=_MODELS[method], freq_seasonal=seasons,
            stochastic_freq_seasonal=[False] * len(seasons), autoregressive=1,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a search that ended at its number of steps: the backtest judges
            self.found: Any = model.fit(disp=0, maxiter=80)

    def expected(self, hours: int) -> list[float]:
        """Of each hour."""
        found: list[float] = self._requests(self.found.forecast(hours)).tolist()
        return found

    def paths(self, days: int) -> list[list[float]]:
        """Requests of each day in each future that is drawn; the same series gives the same ones."""
        from numpy.linalg import LinAlgError

        try:
            drawn = self.found.simulate(days * DAY, repetitions=_PATHS, anchor="end", rng=0)
        except LinAlgError:  # traffic without any noise has no variance to draw from
            return [_by_day(self.expected(days * DAY))] * _PATHS
        found: list[list[float]] = self._requests(drawn).reshape(days, DAY, _PATHS).sum(axis=1).T.tolist()
        return found

    def _requests(self, roots: Any) -> Any:
        """A root below 0 is no traffic."""
        return (roots.clip(min=0.0) * self.scale) ** 2


def _band(values: Sequence[float]) -> Band:
    ordered, last = sorted(values), len(values) - 1
    return ordered[round(_TAIL * last)], ordered[round(0.5 * last)], ordered[round((1 - _TAIL) * last)]
