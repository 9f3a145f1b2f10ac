"""Forecasts of traffic whose season, trend and noise are known."""

from math import pi, sin
from random import Random

import pytest

from kybernate.lab.forecast import LOOK_AHEAD_DAYS, Forecast, ForecastError, backtest, forecast, hourly


def seasonal(days: int, growth: float = 0.0, noise: float = 0.0) -> list[float]:
    """100 requests an hour, twice that at the height of the day; so much more each day."""
    random = Random(7)
    return [
        max(0.0, (1 + growth * hour / 24) * (100 + 100 * max(0.0, sin(2 * pi * hour / 24))) + random.gauss(0, noise))
        for hour in range(24 * days)
    ]


def test_hours_are_counted_and_the_last_one_only_when_it_is_over() -> None:
    assert hourly([0.0, 10.0, 3700.0, 3 * 3600.0, 4 * 3600 - 1.0]) == [2, 1, 0, 2]
    assert hourly([0.0, 10.0, 3700.0]) == [2]
    assert hourly([]) == []


def test_a_season_goes_on_and_noise_widens_the_interval() -> None:
    plain, noisy = forecast(seasonal(8, noise=3), 2), forecast(seasonal(8, noise=30), 2)
    day = sum(seasonal(1))
    assert [middle for _, middle, _ in plain.days] == pytest.approx([day, day], rel=0.03)
    assert plain.growth[1] == pytest.approx(1, rel=0.03)
    low, middle, high = noisy.days[0]
    assert low < middle < high
    assert low < day < high
    assert {one.method for one in noisy.backtest} == {"naive season", "naive day", "level", "trend"}


def test_traffic_that_grows_is_forecast_better_than_by_the_day_before_and_fills_the_fleet() -> None:
    grown = forecast(seasonal(9, growth=0.1, noise=5), 3)
    errors = {one.method: one.wape for one in grown.backtest}
    assert grown.method == "trend"
    assert errors["trend"] < 0.5 * errors["naive season"]
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


def test_when_it_is_full_is_a_quantile_of_the_futures() -> None:
    paths = tuple(tuple(1.0 + (day >= first) for day in range(LOOK_AHEAD_DAYS)) for first in range(0, 100, 10))
    full = Forecast("level", (), 1, 1, (), (1, 1, 1), paths).full_in(1.5)
    assert full == (11, 41, 81)


def test_too_few_days_are_refused() -> None:
    with pytest.raises(ForecastError, match=r"3\.0 days of requests are too few"):
        forecast(seasonal(3), 1)
