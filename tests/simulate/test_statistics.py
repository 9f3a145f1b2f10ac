"""Pooled figures and bootstrap intervals."""

from random import Random

import pytest

from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.measures import (
    Pool,
    WindowSample,
    blocks,
    draws,
    interval,
    measures,
    percentile,
    promise,
    sampled,
)
from kybernate.lab.simulate.node import HARDWARE
from kybernate.lab.simulate.scenarios import hour_of
from kybernate.policy import POLICIES


def samples(count: int, seed: int) -> list[WindowSample]:
    chance = Random(seed)
    return [
        WindowSample(tuple(chance.expovariate(0.1) for _ in range(chance.randint(50, 150))), 40, 7, 1.0)
        for _ in range(count)
    ]


def test_a_resample_is_what_its_windows_come_to_when_they_are_written_out():
    pool, given = Pool(samples(6, 1)), samples(6, 1)
    for weights in draws(6, seed=3, repeats=20):
        written = sorted(w for one, weight in zip(given, weights, strict=True) for w in one.waits * weight)
        figures = pool.figures(weights)
        assert figures.wait_mean_s == pytest.approx(sum(written) / len(written))
        assert figures.wait_p99_s == percentile(written, 0.99)
        assert figures.wait_max_s == written[-1]
        assert figures.switches_per_hour == pytest.approx(7.0)


def test_one_run_comes_to_the_same_as_its_report_whole_and_in_blocks():
    scenario = hour_of("poisson", 0.12, 0, HARDWARE["fast"], duration=1200.0)
    outcome = run(scenario, POLICIES["exhaustive"]())
    measured = measures(outcome, scenario)
    for figures in (Pool([sampled(outcome, scenario)]).figures(), Pool(blocks(outcome, scenario, 300.0)).figures()):
        assert figures.wait_mean_s == pytest.approx(measured.wait_mean_s)
        assert (figures.wait_p99_s, figures.wait_max_s) == (measured.wait_p99_s, measured.wait_max_s)
        assert figures.slo_attainment == pytest.approx(measured.slo_attainment)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    truth, held = 10.0, 0
    for seed in range(60):
        pool = Pool(samples(20, seed))
        low, high = interval([one.wait_mean_s for one in pool.resampled(draws(20, seed, repeats=200))])
        held += low <= truth <= high
    assert held >= 51  # 95 % of 60 is 57; percentile intervals of 20 windows are a little short


def test_a_promise_holds_on_another_day():
    def day(chance: Random, share: float, bursts: int) -> tuple[list[float], list[bool]]:
        """Bursts of one to three requests that meet the same switch."""
        sizes = [(chance.random() < share, chance.randint(1, 3)) for _ in range(bursts)]
        rows = [(900.0 * turn + second, met) for turn, (met, size) in enumerate(sizes) for second in range(size)]
        return [at for at, _ in rows], [met for _, met in rows]

    gaps = []
    for number in range(600):
        chance = Random(f"promise/{number}")
        share, bursts = chance.uniform(0.7, 1.0), chance.randint(40, 300)
        promised, (_, met) = promise(*day(chance, share, bursts)), day(chance, share, bursts)
        assert promised is not None
        gaps.append(sum(met) / len(met) - promised)
    assert sum(gap >= 0 for gap in gaps) >= 0.99 * len(gaps)
    assert sum(gaps) / len(gaps) < 0.2, "it says more than nothing"


def test_a_promise_needs_requests_and_grows_with_them():
    def even(count: int, apart: float = 100.0) -> list[float]:
        return [apart * turn for turn in range(count)]

    assert promise([], []) is None
    assert promise(even(19), [True] * 19) is None
    assert promise(even(500, 1.0), [True] * 500) is None, "one burst is one trial"
    few, many = promise(even(20), [True] * 20), promise(even(200), [True] * 200)
    assert few == pytest.approx(10 / (10 + 2.33**2))
    assert many is not None
    assert few < many < 1
    week = promise(even(200), [True] * 200, days=7.0)
    assert week is not None
    assert few < week < many, "one day of a week has fewer"


def test_nothing_at_all():
    assert Pool([WindowSample((), 0, 0, 1.0)]).figures().slo_attainment == 1.0
    assert interval([3.0]) == (3.0, 3.0)
