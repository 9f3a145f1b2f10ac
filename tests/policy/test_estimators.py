"""What is learned: rates, means, costs. Pure."""

import pytest

from kybernate.policy.estimators import Arrivals, Ewma, Rate


def test_a_steady_stream_gives_its_rate_early_and_late() -> None:
    rate = Rate(60.0)
    for second in range(1, 601):
        rate.add(float(second), 2)
        if second >= 30:
            assert rate.at(float(second)) == pytest.approx(2.0, rel=0.05)


def test_the_first_arrival_says_little() -> None:
    rate = Rate(60.0)
    rate.add(0.01)
    assert rate.at(0.01) < 0.1


def test_silence_halves_a_rate_in_each_half_life() -> None:
    rate = Rate(60.0, since=-6000.0)
    rate.add(0.0, 10)
    assert rate.at(60.0) == pytest.approx(rate.at(0.0) / 2)
    assert rate.at(600.0) == pytest.approx(rate.at(0.0) / 1024)


def test_looking_changes_nothing_and_time_never_runs_backwards() -> None:
    rate = Rate(60.0)
    rate.add(100.0)
    before = rate.at(200.0)
    assert rate.at(150.0) > before
    assert rate.at(200.0) == before
    rate.add(50.0)
    assert rate.at(50.0) == rate.at(100.0)


def test_a_burst_shows_in_the_fast_rate_first() -> None:
    arrivals = Arrivals()
    for second in range(3600):
        arrivals.add(float(second), 0.01)
    for second in range(3600, 3660):
        arrivals.add(float(second), 1.0)
    assert arrivals.fast.at(3660.0) > 5 * arrivals.slow.at(3660.0) > 0.05


def test_a_mean_forgets_what_was_assumed() -> None:
    mean = Ewma(0.1, 5.0)
    assert mean.value == 5.0
    mean.add(2.0)
    assert mean.value == 2.0
    mean.add(4.0)
    assert mean.value == 3.0
    for _ in range(100):
        mean.add(10.0)
    assert mean.value == pytest.approx(10.0, rel=0.01)
