"""Forecasts of traffic whose season, trend and noise are known."""

from collections.abc import Sequence
from functools import cache
from math import pi, sin
from random import Random

import pytest

from kybernate.lab import forecast as forecasts
from kybernate.lab.forecast import (
    LOOK_AHEAD_DAYS,
    Forecast,
    ForecastError,
    backtest,
    busiest_day,
    forecast,
    hourly,
    whole_hours,
)


def seasonal(days: int, growth: float = 0.0, noise: float = 0.0) -> list[float]:
    """100 requests an hour, twice that at the height of the day; so much more each day."""
    random = Random(7)
    return [
        max(0.0, (1 + growth * hour / 24) * (100 + 100 * max(0.0, sin(2 * pi * hour / 24))) + random.gauss(0, noise))
        for hour in range(24 * days)
    ]


@cache
def calm() -> Forecast:
    """Of two days."""
    return forecast(seasonal(8, noise=3), 2)


def test_hours_are_counted_and_the_last_one_only_when_it_is_over() -> None:
    every_minute = [60.0 * minute for minute in range(240)]
    assert whole_hours(every_minute) == 4
    assert whole_hours(every_minute[:216]) == 3, "of 3.6 hours"
    assert whole_hours([]) == 0
    assert hourly([0.0, 10.0, 3700.0, 3 * 3600.0, 4 * 3600.0], 4) == [2, 1, 0, 1]


def test_the_busiest_day_is_a_whole_one_of_the_part_that_is_planned() -> None:
    day = 86_400.0
    moments = [0.0, day, day + 1, day + 2, 2 * day, 3 * day, *[3 * day + 5] * 9]
    assert busiest_day(moments, 0, 3.5 * day) == 3
    assert busiest_day(moments, 2 * day, 9 * day) == 10
    assert busiest_day(moments, day, day + 3600) is None


def test_a_week_is_a_season_only_where_all_of_the_backtest_saw_two() -> None:
    def fitted(days: int) -> tuple[list[int], set[str]]:
        periods: list[int] = []

        class Seen(forecasts._Fitted):
            def __init__(self, requests: Sequence[float], method: str, seasons: list[dict[str, int]]) -> None:
                periods.append(seasons[-1]["period"])
                self.requests = requests

            def expected(self, hours: int) -> list[float]:
                return [1.0] * hours

            def paths(self, days: int) -> list[list[float]]:
                return [[24.0] * days, [30.0] * days, [99.0] * days]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forecasts, "_Fitted", Seen)
            found = forecast(seasonal(days), 7)
        return periods, {one.method for one in found.backtest if one.method.startswith("naive")}

    for days, period, naive in ((8, 24, {"naive day"}), (20, 24, {"naive week", "naive day"}), (28, 168, None)):
        periods, methods = fitted(days)
        assert set(periods) == {period}
        assert methods == (naive or {"naive week", "naive day"})


def test_growth_is_given_for_whole_weeks_only() -> None:
    assert calm().growth is None
    found = forecast(seasonal(8, noise=3), 7).growth
    assert found is not None
    assert found[1] == pytest.approx(1, rel=0.03)


def test_a_season_goes_on_and_noise_widens_the_interval() -> None:
    plain, noisy = calm(), forecast(seasonal(8, noise=30), 2)
    day = sum(seasonal(1))
    assert [middle for _, middle, _ in plain.days] == pytest.approx([day, day], rel=0.03)
    low, middle, high = noisy.days[0]
    assert low < middle < high
    assert low < day < high
    assert {one.method for one in noisy.backtest} == {"naive day", "level", "trend"}


def test_traffic_that_grows_is_forecast_better_than_by_the_day_before_and_fills_the_fleet() -> None:
    grown = forecast(seasonal(9, growth=0.1, noise=5), 3)
    errors = {one.method: one.wape for one in grown.backtest}
    assert grown.method == "trend"
    assert errors["trend"] < 0.5 * errors["naive day"]
    today = sum(seasonal(9, growth=0.1)[-24:])
    early, median, late = grown.full_in(1.3 * today)
    assert early is not None
    assert median is not None
    assert late is not None
    assert early <= median <= late
    assert median == pytest.approx(6, abs=3), "a day adds 0.1 of the first day, which is a nineteenth of the last"
    assert grown.full_in(1000 * today) == (None, None, None)


def test_the_backtest_sees_only_what_was_before_it() -> None:
    doubled = [*seasonal(6), *(2 * each for each in seasonal(3))]
    tested, horizon, origins = backtest(doubled[: 6 * 24 + 24], 1)
    assert (horizon, origins) == (1, 4)
    assert all(one.wape > 0.1 for one in tested), "none can know of the last day that doubles"


def test_the_backtest_judges_whole_days_and_the_band() -> None:
    swapped = [(0.0, 2.0), (2.0, 0.0)] * 12
    judged = forecasts._judged("level", [*swapped, *[(2.0, 1.0)] * 24], [[0.5, 0.5], [0.5, 3.0]])
    assert (judged.mape, judged.wape) == (1.0, 1.5)
    assert judged.days_wape == 0.5, "of 24 and 24 requests, 24 and 48 were expected"
    assert judged.coverage == 0.75, "of the others' bands: 3 half widths for the first two, 0.5 for the others"
    assert judged.width == 3.0
    tested, _, _ = backtest(seasonal(8, noise=30), 2)
    assert {one.method: one.coverage is None for one in tested} == dict.fromkeys(("naive day", "level", "trend"), False)


def test_the_band_is_as_wide_as_the_days_of_the_backtest_ask_for() -> None:
    assert forecasts._conformal([[float(each)] for each in range(1, 11)]) == 9, "of eleven, four in five are not above"
    assert forecasts._conformal([[2.0], [1.0]]) == 2, "too few: the highest"
    assert forecasts._conformal([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]]) == 10, "two, not ten"
    futures = [[90.0], [95.0], *[[100.0]] * 6, [105.0], [110.0], [110.0]]
    widened = forecasts._widened(futures, [100.0], 3.0)
    (low, middle, high) = forecasts._band([day for [day] in widened])
    assert middle == pytest.approx(100)
    assert low == pytest.approx(101 * (96 / 101) ** 3 - 1)
    assert high == pytest.approx(101 * (111 / 101) ** 3 - 1)


def test_traffic_without_noise_has_a_forecast() -> None:
    assert list(forecast([60.0] * 24 * 5, 1).days[0]) == pytest.approx([1440] * 3, rel=0.01)


def test_the_naive_forecast_is_used_where_it_was_better() -> None:
    odd, even = [10.0] * 24, [100.0] * 24
    weekly = [*odd, *even, *even, *even, *even, *odd, *odd] * 3  # no model of a day's season follows a week
    found = forecast(weekly, 3)
    assert found.method == "naive week"
    assert [middle for _, middle, _ in found.days] == pytest.approx([240, 2400, 2400], rel=0.01)


def test_when_it_is_full_is_a_quantile_of_the_futures() -> None:
    paths = tuple(tuple(1.0 + (day >= first) for day in range(LOOK_AHEAD_DAYS)) for first in range(0, 100, 10))
    full = Forecast("level", (), 1, 1, (), (1, 1, 1), paths).full_in(1.5)
    assert full == (11, 41, 81)


def test_too_few_days_are_refused() -> None:
    with pytest.raises(ForecastError, match="72 whole hours of requests are too few"):
        forecast(seasonal(3), 1)
