"""Gangs: seats on several groups that are active together or not at all."""

import math
from dataclasses import replace

import pytest

from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.model import SimGroup
from kybernate.policy import POLICIES, Decision, GroupView, Park, Stay, Switch
from tests.simulate.cases import Exhaustive, Impatient, scenario, seat, together

AB = (SimGroup("A"), SimGroup("B"))


def pair(**more: object) -> list:
    """A gang over both groups, and a seat of each group that stands alone."""
    return [
        seat("gA", "A", 2.0, 3.0, gang="g", **more),
        seat("gB", "B", 4.0, 7.0, gang="g", **more),
        seat("a", "A", 1.0, 1.0),
        seat("b", "B", 1.0, 1.0),
    ]


def test_a_gang_serves_when_its_slowest_member_is_active():
    made = scenario([(0.0, 0, 5.0), (1.0, 1, 1.0)], pair(), AB)
    outcome = run(made, Exhaustive())
    assert outcome.wait == pytest.approx((7.0, 6.0))
    assert outcome.switching_seconds == pytest.approx(3.0 + 7.0)
    together(made, outcome)


def test_all_its_groups_make_room_and_get_back_what_each_of_them_had():
    # a is served 1..11, b 1..5; g waits from 2. B is free of work at 5: the claim closes a as well, which ends at 11.
    requests = [(0.0, 2, 10.0), (0.0, 3, 4.0), (2.0, 0, 2.0), (6.0, 2, 1.0), (6.0, 3, 1.0)]
    made = scenario(requests, pair(), AB)
    outcome = run(made, Exhaustive())
    # a parked at 12; g restores 12..19 and serves 19..21; gA parked 23, gB parked 25; a active 24, b active 26.
    assert outcome.wait == pytest.approx((1.0, 1.0, 17.0, 18.0, 20.0))
    together(made, outcome)


def test_the_policy_sees_the_sum_of_its_demand_and_the_cost_of_its_slowest():
    seen: list[GroupView] = []
    requests = [(0.0, 2, 9.0), (0.0, 3, 9.0), (3.0, 0, 5.0), (4.0, 1, 1.0), (4.0, 1, 1.0)]
    run(scenario(requests, pair(), AB), Exhaustive(seen.append))
    shown = {one.seat: one for view in seen for one in view.seats if one.waiting == 3}
    assert {(one.park_seconds, one.activate_seconds) for one in shown.values()} == {(4.0, 7.0)}
    assert set(shown) == {"gA", "gB"}, "called by its member on the group that is looked at"
    last = {one.seat: one.in_flight for view in seen for one in view.seats if view.group == "B"}
    assert "gB" in last
    assert "gA" not in last


class Fond:
    """Of one seat on each group, however long others wait."""

    def decide(self, view: GroupView) -> Decision:
        wanted = [one for one in view.seats if one.wait_seconds is not None]
        if not wanted:
            return Stay(None, "")
        first = min(wanted, key=lambda one: (one.seat != "c", not one.seat.startswith("g"), one.seat))
        if len(view.holders()) < view.slots:
            return Switch(first.seat, None, "")
        idle = [one for one in view.holders() if not one.waiting and not one.in_flight]
        return Switch(first.seat, idle[0].seat, "") if idle else Stay(None, "")


def test_a_gang_that_one_of_its_groups_would_not_take_next_does_not_keep_the_others_from_working():
    # b is served 1..11; then B prefers c, parked since ever: 13..14. So A does without the gang, and takes a at 3.
    requests = [(0.0, 3, 10.0), (1.0, 4, 1.0), (2.0, 0, 1.0), (3.0, 2, 1.0)]
    made = scenario(requests, [*pair(), seat("c", "B", 1.0, 1.0)], AB)
    outcome = run(made, Fond())
    assert outcome.wait == pytest.approx((1.0, 12.0, 15.0 + 7.0 - 2.0, 1.0))
    together(made, outcome)


def test_a_member_whose_park_fails_follows_the_others_out():
    requests = [(10.0 * turn, (0, 2, 1, 3)[turn % 4], 1.0) for turn in range(24)]
    made = scenario(requests, pair(), AB)
    outcome = run(made, POLICIES["kyb-balanced"](), RunOptions(park_failure=0.5, seed=1))
    assert outcome.counters["park_failures"] > 3
    assert all(outcome.finished)
    together(made, outcome)


def test_a_frozen_gang_stands_still_as_a_whole():
    requests = [(0.0, 0, 10.0), (0.0, 1, 10.0), (10.0, 2, 1.0)]
    made = scenario(requests, pair(stall_budget_seconds=99.0), AB)
    outcome = run(made, Impatient("freeze"))
    assert outcome.counters["freezes"] == 1
    assert outcome.stall[0] == pytest.approx(outcome.stall[1])
    assert outcome.stall[0] > 0
    together(made, outcome)
    half = replace(made, seats=(made.seats[0], replace(made.seats[1], stall_budget_seconds=0.0), *made.seats[2:]))
    assert not any(run(half, Impatient("freeze")).stall), "one member without a budget: it is drained"


def test_gangs_whose_groups_form_a_ring_do_not_wait_for_each_other():
    names = "ABCD"
    seats = [
        seat(f"{gang}{group}", group, gang=gang)
        for gang, groups in zip("ghij", ("AB", "BC", "CD", "DA"), strict=True)
        for group in groups
    ]
    requests = [(0.5 * turn, 2 * (turn % 4), 2.0) for turn in range(80)]
    for slots in (1, 2):
        made = scenario(requests, seats, [SimGroup(name, slots) for name in names])
        for name, policy in POLICIES.items():
            outcome = run(made, policy(), RunOptions(park_failure=0.2))
            assert all(outcome.finished), name
            together(made, outcome)


def test_a_pinned_member_pins_the_gang():
    seats = pair()
    seats[0] = replace(seats[0], pinned=True)
    with pytest.raises(ValueError, match="pinned seats take all 1 slots of B"):
        run(scenario([(0.0, 3, 1.0)], seats, AB), Exhaustive())
    made = scenario([(20.0, 3, 1.0), (20.0, 1, 1.0)], seats, [SimGroup("A"), SimGroup("B", 2)])
    outcome = run(made, POLICIES["kyb-balanced"]())
    assert sorted(outcome.wait) == pytest.approx([0.0, 1.0])
    assert [visit.gone for visit in outcome.visits if visit.seat < 2] == [math.inf, math.inf]
    together(made, outcome)


class ParksTheGang:
    def decide(self, view: GroupView) -> Decision:
        holders = view.holders()
        if holders and not holders[0].in_flight:
            return Park(holders[0].seat, "")
        return Impatient().decide(view) if not holders else Stay(None, "")


def test_parking_one_member_parks_all():
    made = scenario([(0.0, 0, 1.0)], pair(), AB)
    outcome = run(replace(made, at=(0.0, 50.0), seat=(0, 1), service=(1.0, 1.0)), ParksTheGang())
    assert [visit.gone for visit in outcome.visits[:2]] == pytest.approx([10.0, 12.0])


def test_a_gang_of_one_stands_alone():
    alone = [seat("a", gang="g"), seat("b")]
    requests = [(0.0, 0, 10.0), (5.0, 1, 1.0)]
    with_name, without = (run(scenario(requests, seats), Exhaustive()) for seats in (alone, [seat("a"), seat("b")]))
    assert with_name == without
