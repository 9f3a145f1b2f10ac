"""What an outcome comes to, computed by hand."""

import pytest

from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import measures, needed, percentile
from kybernate.lab.simulate.model import SimGroup
from tests.simulate.cases import Exhaustive, scenario, seat


def test_measures_of_a_run_that_can_be_checked_by_hand():
    seats = [seat("a", tier="gold", slo_seconds=5.0), seat("b", tier="bronze", slo_seconds=100.0)]
    played = scenario([(0.0, 0, 10.0), (5.0, 1, 1.0), (6.0, 0, 1.0), (7.0, 0, 1.0)], seats)
    # a 3..13 admits 6 and 7 at once; parked 15; b active 18, done 19.
    found = measures(run(played, Exhaustive(), RunOptions(name="x")), played)
    assert (found.scenario, found.policy, found.requests) == ("case", "x", 4)
    assert found.wait_mean_s == pytest.approx((3 + 13 + 0 + 0) / 4)
    assert (found.wait_p50_s, found.wait_p99_s, found.wait_max_s) == pytest.approx((0.0, 13.0, 13.0))
    assert found.immediate == 0.5
    assert found.slo_attainment == 1.0
    assert found.slo_by_tier == {"bronze": 1.0, "gold": 1.0}
    assert found.wait_by_tier == pytest.approx({"bronze": 13.0, "gold": 1.0})
    assert found.hours == pytest.approx(100 / 3600)
    assert found.switches_per_hour == pytest.approx(2 / (100 / 3600))
    assert found.switching_share == pytest.approx(8 / 100)
    assert found.thrash_ratio == 0.5
    assert found.row()["policy"] == "x"


def test_percentiles_are_nearest_rank():
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([], 0.5) == 0.0


def test_nothing_arrived():
    played = scenario([], [seat("a")])
    found = measures(run(played, Exhaustive()), played)
    assert (found.requests, found.wait_mean_s, found.slo_attainment) == (0, 0.0, 1.0)
    assert needed(played).expected_active == 0.0


def test_how_many_slots_are_needed_at_all():
    # a has something to do in 0..20, b in 10..30, c in 15..16, of 100 s.
    requests = [(0.0, 0, 15.0), (10.0, 0, 10.0), (10.0, 1, 20.0), (15.0, 2, 1.0)]
    found = needed(scenario(requests, [seat("a"), seat("b"), seat("c")], [SimGroup("A", slots=2)]))
    assert found.expected_active == pytest.approx((20 + 20 + 1) / 100)
    assert (found.slots_95, found.slots_99, found.most, found.seats, found.slots) == (2, 2, 3, 3, 2)
    assert str(found).startswith("E[active] = 0.41 of 3 seats")
