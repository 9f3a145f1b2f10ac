"""Groups whose seats share memory: the incoming seat, and which holders make room for it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.policy import POLICIES, GroupView, KybBalanced, Park, SeatView, Stay, Switch
from kybernate.policy.turns import cheapest_victims, fits
from tests.policy.views import active, queue, seat, view

every = pytest.mark.parametrize("name", POLICIES)


def packed(*seats: SeatView, free: int) -> GroupView:
    """A group in which only memory limits how many seats are active."""
    return view(*seats, slots=len(seats), free_bytes=free)


@every
def test_a_seat_that_fits_beside_a_busy_holder_comes_without_a_victim(name: str) -> None:
    decision = POLICIES[name]().decide(
        packed(active("a", in_flight=3, vram_bytes=40), queue("b", 1.0, vram_bytes=30), free=40)
    )
    assert decision == Switch("b", None, decision.reason)


@every
def test_a_seat_that_does_not_fit_waits_for_a_holder_although_slots_are_free(name: str) -> None:
    decision = POLICIES[name]().decide(packed(active("a", vram_bytes=40), queue("b", 1.0, vram_bytes=60), free=40))
    assert decision == Switch("b", "a", decision.reason)


@every
def test_the_idle_holder_that_makes_room_alone_leaves_before_one_that_does_not(name: str) -> None:
    shown = packed(active("a", vram_bytes=10), active("b", vram_bytes=40), queue("c", 300.0, vram_bytes=50), free=10)
    assert getattr(POLICIES[name]().decide(shown), "evict", None) == "b"


def test_a_smaller_seat_takes_the_room_that_the_first_one_cannot_use_yet() -> None:
    busy = active("a", in_flight=9, vram_bytes=60)
    shown = packed(busy, queue("big", *[9.0] * 5, vram_bytes=70), queue("c", 1.0, vram_bytes=20), free=20)
    decision = KybBalanced(close_ratio=0.0).decide(shown)
    assert decision == Switch("c", None, decision.reason)


def test_no_smaller_seat_goes_before_one_that_is_beyond_the_cap() -> None:
    busy = active("a", in_flight=9, vram_bytes=60)
    shown = packed(busy, queue("big", 900.0, vram_bytes=70), queue("c", 1.0, vram_bytes=20), free=20)
    decision = KybBalanced().decide(shown)
    assert decision == Switch("big", "a", decision.reason)


def test_all_busy_holders_that_are_in_the_way_close_or_none() -> None:
    waiting = queue("big", *[5.0] * 60, vram_bytes=80)
    calm = active("a", rate_fast=0.5, rate_slow=0.5, vram_bytes=40, in_flight=2)
    other = replace(calm, seat="b", in_flight=3)
    decision = KybBalanced().decide(packed(calm, other, waiting, free=0))
    assert decision == Switch("big", "b", decision.reason)
    hot = replace(calm, seat="b", rate_fast=9.0, rate_slow=9.0, in_flight=50)
    assert isinstance(KybBalanced().decide(packed(calm, hot, waiting, free=0)), Stay)


def test_an_idle_holder_is_parked_ahead_for_a_seat_that_does_not_fit_although_slots_are_free() -> None:
    rare = active("a", vram_bytes=60, rate_fast=0.001, rate_slow=0.001)
    decision = KybBalanced().decide(packed(rare, seat("b", vram_bytes=40, rate_fast=0.1), free=20))
    assert decision == Park("a", decision.reason)
    assert isinstance(KybBalanced().decide(packed(rare, seat("b", vram_bytes=20, rate_fast=0.1), free=20)), Stay)


@given(
    free=st.integers(-20, 20),
    need=st.integers(1, 90),
    holders=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=7),
)
def test_the_victims_make_room_and_no_cheaper_choice_does(free: int, need: int, holders: list[tuple[int, int]]) -> None:
    """Against a separate search over all subsets."""
    seats = [active(f"s{n}", vram_bytes=size, weight=1.0 + cost) for n, (size, cost) in enumerate(holders)]
    incoming = queue("x", 1.0, vram_bytes=need)
    shown = packed(*seats, incoming, free=free)
    found = cheapest_victims(shown, incoming, seats, lambda one: one.weight - 1.0)
    subsets = [[one for bit, one in enumerate(seats) if mask >> bit & 1] for mask in range(1, 2 ** len(seats))]
    enough = [chosen for chosen in subsets if free + sum(one.vram_bytes for one in chosen) >= need]
    assert bool(found) == bool(enough)
    if found:
        assert fits(shown, incoming, found)
        assert sum(one.weight - 1 for one in found) == min(sum(one.weight - 1 for one in chosen) for chosen in enough)
