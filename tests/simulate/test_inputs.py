"""Costs, generated arrivals, ready scenarios, traces on nodes."""

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from kybernate.lab.simulate.generate import (
    SERVEGEN_TENANTS,
    SERVICE_MEAN,
    draw_service,
    mmpp,
    poisson,
    service_seconds,
    tenant,
    zipf,
)
from kybernate.lab.simulate.node import (
    GB,
    HARDWARE,
    Node,
    fitted_cost,
    from_arrivals,
    measured_costs,
    on_node,
    parse_cost,
)
from kybernate.lab.simulate.scenarios import reference, regime
from kybernate.lab.traces import Arrival


def test_hardware_and_given_costs():
    assert HARDWARE["stock"].park_seconds(40 * GB) == pytest.approx(1 + 10)
    assert HARDWARE["stock"].activate_seconds(42 * GB) == pytest.approx(1 + 6)
    assert HARDWARE["fast"].park_seconds(36 * GB) == pytest.approx(3.5)
    assert parse_cost("2/5").activate_seconds(40 * GB) == pytest.approx(9)
    seconds = parse_cost("2.5s/3s")
    assert (seconds.park_seconds(80 * GB), seconds.activate_seconds(1)) == (2.5, 3.0)


@pytest.mark.parametrize("text", ["quick", "4", "4/0", "-1/3", "1s/2", "a/b", "1/2/3"])
def test_a_cost_that_is_none_says_how_to_write_one(text: str):
    with pytest.raises(ValueError, match="neither a name"):
        parse_cost(text)


def test_costs_are_learned_from_a_ledger():
    rows = [
        {"seat": "a", "vram_bytes": 20 * GB, "park_seconds": 6.0, "activate_seconds": 5.0},
        {"seat": "b", "vram_bytes": 40 * GB, "park_seconds": 11.0, "activate_seconds": 9.0},
        {"seat": "c", "vram_bytes": 0, "park_seconds": 2.0, "activate_seconds": 2.0},
    ]
    fitted = fitted_cost(measured_costs(rows))
    assert fitted.fixed_seconds == pytest.approx(1.0)
    assert fitted.park_seconds(30 * GB) == pytest.approx(8.5, rel=0.05)
    with pytest.raises(ValueError, match="park and activate one first"):
        fitted_cost(measured_costs(rows[2:]))


@pytest.mark.parametrize("make", [poisson, mmpp], ids=lambda make: make.__name__)
def test_a_process_has_the_given_rate(make):
    times = list(make(0.5, 86_400.0, Random(1)))
    assert len(times) == pytest.approx(43_200, rel=0.08)
    assert times == sorted(times)
    assert times[-1] < 86_400.0
    assert times == list(make(0.5, 86_400.0, Random(1)))


def test_processes_differ_in_how_bursty_they_are():
    variation = {}
    for make in (poisson, mmpp):
        times = list(make(0.5, 86_400.0, Random(2)))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        variation[make.__name__] = pstdev(gaps) / fmean(gaps)
    assert variation["poisson"] == pytest.approx(1.0, abs=0.1)
    assert variation["mmpp"] > 2


def test_a_tenant_is_away_for_long_and_bursty_when_it_is_there():
    one = SERVEGEN_TENANTS[1]
    rates = [len(list(tenant(one, 0.05, 86_400.0, Random(seed)))) / 86_400 for seed in range(40)]
    assert fmean(rates) == pytest.approx(0.05, rel=0.4)
    times = list(tenant(one, 0.05, 864_000.0, Random(3)))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert pstdev(gaps) / fmean(gaps) > 3


def test_service_times_are_those_of_the_conversations():
    assert pytest.approx(5.42, abs=0.03) == SERVICE_MEAN
    random = Random(4)
    drawn = [draw_service(random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(SERVICE_MEAN, rel=0.02)
    assert fmean(draw_service(random, 30.0) for _ in range(20_000)) == pytest.approx(30.0, rel=0.02)
    assert service_seconds(8000, 40) == pytest.approx(2.0)


def test_zipf_shares_add_up():
    assert sum(zipf(10, 1.5)) == pytest.approx(1.0)
    assert zipf(3, 0.0) == pytest.approx((1 / 3,) * 3)


def test_reference_windows_have_their_rates_and_are_the_same_each_time():
    for name, rate, seats in (("poisson", 0.12, 4), ("bursty", 0.3, 6), ("servegen", 0.317, 10)):
        windows = [reference(name, window) for window in range(24)]
        assert fmean(len(window.at) for window in windows) / 3600 == pytest.approx(rate, rel=0.45)
        assert {len(window.seats) for window in windows} == {seats}
        assert reference(name, 3) == windows[3]
        assert windows[0].at != windows[1].at
    made = reference("poisson", 0)
    switch = fmean(made.seats[seat].park_seconds + made.seats[seat].activate_seconds for seat in made.seat)
    assert 6.0 <= switch <= 7.0


def test_the_scenario_that_is_not_shipped_asks_for_its_trace():
    with pytest.raises(ValueError, match=r"lora_request_trace\.csv"):
        reference("gentd26")
    with pytest.raises(ValueError, match="there are poisson, bursty, gentd26, servegen"):
        reference("s5")


def test_a_regime_has_its_load_and_its_switch():
    made = [regime("poisson", 0.5, 7.0, window) for window in range(20)]
    assert {seat.park_seconds + seat.activate_seconds for seat in made[0].seats} == {7.0}
    assert fmean(sum(one.service) / 3600 for one in made) == pytest.approx(0.5, rel=0.1)


ROWS = [
    Arrival(0.0, "small", 800, 40),
    Arrival(10.0, "big", 8000, 400),
    Arrival(20.0, "big", 8000, 400),
    Arrival(30.0, "mid", 8000, 100),
]


def test_a_trace_on_a_node():
    node = Node(
        groups=2, cost=parse_cost("10/10"), vram_bytes={"big": 60 * GB, "": 20 * GB}, pinned=frozenset({"small"}),
        measured={"mid": (0.5, 0.7)}, tiers={"": ("standard", 1.0, 20.0), "big": ("gold", 2.0, 12.0)},
    )  # fmt: skip
    made = from_arrivals(ROWS, node, speed_up=2.0, duration=40.0)
    assert [(seat.name, seat.group) for seat in made.seats] == [("big", "G0"), ("mid", "G1"), ("small", "G1")]
    assert (made.at, made.seat, made.duration) == ((0.0, 5.0, 10.0, 15.0), (2, 0, 0, 1), 20.0)
    assert made.service == pytest.approx((1.1, 11.0, 11.0, 3.5))
    big, mid, small = made.seats
    assert (big.tier, big.weight, big.slo_seconds) == ("gold", 2.0, 12.0)
    assert (big.park_seconds, mid.park_seconds, mid.activate_seconds) == (7.0, 0.5, 0.7)
    assert (small.pinned, small.slo_seconds) == (True, 20.0)


def test_models_without_a_seat_are_left_out_and_counted():
    made = from_arrivals(ROWS, Node(seats=1), source="rows")
    assert [seat.name for seat in made.seats] == ["big"]
    assert made.source == "rows; 2 requests of other models left out"


def test_a_scenario_can_be_played_on_another_node():
    made = on_node(reference("bursty"), Node(groups=3, move_seconds=3.0))
    assert [group.name for group in made.groups] == ["G0", "G1", "G2"]
    assert {seat.group for seat in made.seats} == {"G0", "G1", "G2"}
    assert made.at == reference("bursty").at
