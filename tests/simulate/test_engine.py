"""Cases small enough to compute by hand."""

from dataclasses import dataclass, replace

import pytest

from kybernate.lab.simulate import engine
from kybernate.lab.simulate.engine import RunOptions, SimulationError, run
from kybernate.lab.simulate.model import Learned, Scenario, SimGroup
from kybernate.policy import POLICIES, Decision, GroupView, KybBalanced, Stay, Switch
from kybernate.seat import SeatState
from tests.simulate.cases import Exhaustive, Impatient, ParksWhenIdle, scenario, seat


def test_one_seat_waits_for_its_activation_and_the_second_request_joins():
    outcome = run(scenario([(1.0, 0, 5.0), (2.0, 0, 1.0), (6.0, 0, 1.0)], [seat("a")]), Exhaustive())
    assert outcome.wait == pytest.approx((3.0, 2.0, 0.0))  # active at 4
    assert outcome.finished == pytest.approx((9.0, 5.0, 7.0))
    assert outcome.switching_seconds == pytest.approx(3.0)
    (visit,) = outcome.visits
    assert (visit.begun, visit.active, visit.closed, visit.gone) == (1.0, 4.0, float("inf"), float("inf"))
    assert visit.served == 3


def test_two_seats_the_first_ends_what_is_in_flight_then_parks_then_the_second_comes():
    outcome = run(scenario([(0.0, 0, 10.0), (5.0, 1, 1.0)], [seat("a"), seat("b", activate=4.0)]), Exhaustive())
    # a: active 3, done 13, parked 15; b active 19.
    assert outcome.finished == pytest.approx((13.0, 20.0))
    assert outcome.wait == pytest.approx((3.0, 14.0))
    first, second = outcome.visits
    assert (first.closed, first.gone, second.begun, second.active) == pytest.approx((13.0, 15.0, 15.0, 19.0))
    assert outcome.switching_seconds == pytest.approx(3 + 2 + 4)


def test_a_drain_closes_admission_until_the_seat_comes_back():
    requests = [(0.0, 0, 10.0), (5.0, 1, 1.0), (6.0, 0, 1.0)]
    outcome = run(scenario(requests, [seat("a"), seat("b")]), Impatient())
    # a drains from 5 to 13, parks to 15; a's own request of 6 has waited shorter than b's of 5: b 15..18, one second of
    # service, but a waits, so b drains at once: 19, 21; a is back at 24.
    assert outcome.wait == pytest.approx((3.0, 13.0, 18.0))
    assert [visit.seat for visit in outcome.visits] == [0, 1, 0]


def test_a_run_begins_with_what_was_learned_before_it():
    seen: list[GroupView] = []
    known = Learned(9.0, 7.0, 4.0, rate_fast=0.5, rate_slow=0.25, count=3)
    requests = [(0.0, 0, 5.0), (20.0, 1, 1.0)]
    run(
        scenario(requests, [seat("a", learned=known), seat("b")], observed_seconds=90.0),
        Exhaustive(seen.append),
    )
    first, last = seen[0].seats[0], seen[-1].seats[0]
    assert (first.park_seconds, first.activate_seconds, first.service_seconds) == (9.0, 7.0, 4.0)
    assert (first.rate_fast, first.rate_slow) == pytest.approx((0.5, 0.25))
    # The fourth value weighs 0.3 in a cost (a fourth would be less) and a fourth in the service time.
    assert (last.park_seconds, last.activate_seconds, last.service_seconds) == pytest.approx((6.9, 5.8, 4.25))


class PrefersB:
    """Chooses a at first, and b as soon as b waits."""

    def decide(self, view: GroupView) -> Decision:
        waiting = {seat.seat for seat in view.seats if seat.wait_seconds is not None}
        wanted = next((name for name in ("b", "a", "c") if name in waiting), None)
        holders = view.holders()
        if wanted is None:
            return Stay(None, "")
        return Switch(wanted, holders[0].seat if holders else None, "")


@pytest.mark.parametrize(("comes", "second"), [(5.0, 1), (9.0, 0)])
def test_late_binding_takes_the_answer_of_when_the_victim_is_drained(comes: float, second: int):
    # c serves from 3 to 8; a is chosen at 4; b arrives during the drain, or during c's park (8..10).
    requests = [(0.0, 2, 5.0), (4.0, 0, 1.0), (comes, 1, 1.0)]
    outcome = run(scenario(requests, [seat("a"), seat("b"), seat("c")]), PrefersB())
    assert [visit.seat for visit in outcome.visits][:2] == [2, second]
    assert outcome.visits[1].begun == pytest.approx(10.0)


def test_no_more_than_cap_are_served_together():
    requests = [(0.0, 0, 4.0)] * 5
    outcome = run(scenario(requests, [seat("a")], cap=2), Exhaustive())
    assert outcome.wait == pytest.approx((3.0, 3.0, 7.0, 7.0, 11.0))
    assert outcome.finished == pytest.approx((7.0, 7.0, 11.0, 11.0, 15.0))


def test_two_slots_serve_two_seats_side_by_side_but_switch_one_after_the_other():
    requests = [(0.0, 0, 20.0), (0.0, 1, 20.0), (1.0, 2, 1.0)]
    outcome = run(scenario(requests, [seat("a"), seat("b"), seat("c")], [SimGroup("A", slots=2)]), Exhaustive())
    assert outcome.wait[:2] == pytest.approx((3.0, 6.0))
    assert outcome.wait[2] == pytest.approx(23.0 + 2.0 + 3.0 - 1.0)  # a ends at 23


def test_a_group_that_is_free_takes_a_seat_whose_home_is_busy():
    seats = [seat("a", "A"), seat("b", "A"), seat("c", "B")]
    groups = [SimGroup("A"), SimGroup("B")]
    requests = [(0.0, 0, 20.0), (1.0, 1, 1.0)]
    soft = run(scenario(requests, seats, groups, move_seconds=3.0), Exhaustive())
    hard = run(scenario(requests, seats, groups), Exhaustive())
    assert soft.wait == pytest.approx((3.0, 6.0))
    assert hard.wait == pytest.approx((3.0, 23.0 + 2.0 + 3.0 - 1.0))
    assert soft.counters["moves"] == 1
    assert [(visit.seat, visit.group, visit.moved) for visit in soft.visits] == [(0, "A", False), (1, "B", True)]


def test_groups_of_another_pool_take_no_seat():
    seats = [seat("a", "A"), seat("b", "A"), seat("c", "B"), seat("d", "C")]
    requests = [(0.0, 0, 20.0), (1.0, 1, 1.0)]
    groups = [SimGroup("A", pool="A"), SimGroup("B", pool="B"), SimGroup("C", pool="A")]
    outcome = run(scenario(requests, seats, groups, move_seconds=3.0), Exhaustive())
    assert [(visit.seat, visit.group) for visit in outcome.visits] == [(0, "A"), (1, "C")]
    alone = run(
        scenario(requests, seats, [SimGroup(name, pool=name) for name in "ABC"], move_seconds=3.0), Exhaustive()
    )
    assert (alone.counters["moves"], alone.wait) == (0, pytest.approx((3.0, 23.0 + 2.0 + 3.0 - 1.0)))


def test_a_seat_that_is_active_at_the_beginning_serves_at_once_and_is_parked_for_another():
    seats = [seat("a", active=True), seat("b")]
    outcome = run(scenario([(0.0, 0, 1.0), (5.0, 1, 1.0)], seats), Exhaustive())
    assert outcome.wait == pytest.approx((0.0, 2.0 + 3.0))
    first, second = outcome.visits
    assert (first.seat, first.closed, first.gone, second.begun) == (0, 5.0, 7.0, 7.0)
    assert run(scenario([(5.0, 1, 1.0)], seats), KybBalanced()).wait == pytest.approx((5.0,)), "it has no grace period"


def test_a_seat_that_moved_belongs_where_it_is():
    seats = [seat("a", "A"), seat("b", "A")]
    seen: list[GroupView] = []
    requests = [(0.0, 0, 200.0), (1.0, 1, 1.0), (100.0, 1, 1.0)]
    groups = [SimGroup("A"), SimGroup("B")]
    outcome = run(scenario(requests, seats, groups, move_seconds=3.0), Exhaustive(seen.append))
    assert outcome.wait == pytest.approx((3.0, 6.0, 0.0))
    assert outcome.counters["moves"] == 1
    assert {one.seat for view in seen if view.group == "B" and view.now > 10 for one in view.seats} == {"b"}


def test_an_idle_holder_is_parked_when_the_policy_says_so():
    outcome = run(scenario([(0.0, 0, 1.0), (50.0, 0, 1.0)], [seat("a")]), ParksWhenIdle(5.0))
    first, second = outcome.visits
    assert (first.closed, first.gone, second.begun) == pytest.approx((9.0, 11.0, 50.0))


def test_many_in_flight_slow_each_other_down():
    requests = [(0.0, 0, 4.0), (0.0, 0, 8.0)]
    outcome = run(scenario(requests, [seat("a")]), Exhaustive(), RunOptions(slowdown=((1, 1.0), (2, 2.0))))
    assert outcome.finished == pytest.approx((3 + 8.0, 3 + 8.0 + 4.0))


def test_a_park_that_fails_leaves_the_victim_serving_and_is_tried_again():
    requests = [(0.0, 0, 1.0), (2.0, 1, 1.0)]
    options = RunOptions(park_failure=0.5, seed=3)
    outcome = run(scenario(requests, [seat("a"), seat("b")]), Exhaustive(), options)
    failures = outcome.counters["park_failures"]
    assert outcome.counters["parks"] == 1
    pauses = sum(0.25 * 2**count for count in range(1, failures + 1))
    assert outcome.wait[1] == pytest.approx(4.0 + 2.0 * (failures + 1) + pauses + 3.0 - 2.0)


def test_a_seat_whose_place_is_not_made_goes_to_another_group_that_is_free():
    requests = [(0.0, 0, 6.0), (0.1, 2, 9.0), (8.0, 1, 1.0), (8.1, 0, 1.0)]
    made = scenario(
        requests, [seat("a"), seat("b"), seat("c", "B")], [SimGroup("A"), SimGroup("B")], move_seconds=3.0
    )  # fmt: skip
    outcome = run(made, KybBalanced(), RunOptions(park_failure=0.7, seed=10))
    assert outcome.counters["moves"] == 1
    assert outcome.wait[2] < 20.0  # parks in its home group fail for more than a minute


def test_an_activation_that_fails_is_a_cold_start_in_place():
    options = RunOptions(restore_failure=1.0, cold_start_seconds=40.0)
    outcome = run(scenario([(0.0, 0, 1.0)], [seat("a")]), Exhaustive(), options)
    assert outcome.wait == pytest.approx((43.0,))
    assert outcome.visits[0].failed
    assert outcome.counters["restore_failures"] == 1


def test_without_host_memory_for_all_the_one_parked_longest_is_started_from_disk():
    seats = [seat(name, host_bytes=10) for name in "abc"]
    requests = [(0.0, 0, 1.0), (20.0, 1, 1.0), (40.0, 2, 1.0)]
    outcome = run(scenario(requests, seats, host_bytes=20), Exhaustive(), RunOptions(cold_start_seconds=50.0))
    assert outcome.wait == pytest.approx((3.0, 5.0, 52.0))
    assert outcome.counters["cold_starts"] == 1


def test_a_pinned_seat_is_brought_at_the_beginning():
    outcome = run(scenario([(10.0, 0, 1.0)], [seat("a", pinned=True)]), Exhaustive())
    assert outcome.wait == (0.0,)


def test_memory_decides_what_fits_besides_slots():
    seats = [seat("a", vram_bytes=60), seat("b", vram_bytes=60)]
    groups = [SimGroup("A", slots=2, memory_bytes=100)]
    requests = [(0.0, 0, 5.0), (0.0, 1, 1.0)]
    outcome = run(scenario(requests, seats, groups), Exhaustive())
    assert outcome.wait == pytest.approx((3.0, 8.0 + 2.0 + 3.0))
    assert outcome.counters["no_room"] >= 1


def test_the_view_is_the_live_one_and_knows_only_the_past():
    seen: list[GroupView] = []
    requests = [(0.0, 0, 10.0), (5.0, 1, 1.0), (6.0, 1, 1.0)]
    run(scenario(requests, [seat("a", weight=2.0), seat("b")]), Exhaustive(seen.append))
    view = next(view for view in seen if view.now == 6.0)
    a, b = view.seats
    assert (a.state, a.in_flight, a.active_seconds, a.weight) == (SeatState.ACTIVE, 1, 3.0, 2.0)
    assert (b.state, b.waiting, b.ages, b.oldest_wait_seconds) == (SeatState.PARKED, 2, ((1.0, 1), (0.0, 1)), 1.0)
    assert a.service_seconds == 5.0  # nothing has ended yet
    assert b.rate_fast > a.rate_fast > 0
    assert view.elsewhere == ()


class Lazy:
    def decide(self, view: GroupView) -> Decision:
        return Stay(10.0, "no")


class Restless:
    def decide(self, view: GroupView) -> Decision:
        holders = view.holders()
        other = next((s.seat for s in view.seats if s.state is SeatState.PARKED), None)
        if not holders:
            return Switch(view.seats[0].seat, None, "")
        return Switch(other, holders[0].seat, "") if other else Stay(None, "")


def test_a_policy_that_starves_is_named():
    with pytest.raises(SimulationError, match=r"policy Lazy leaves 1 requests waiting for ever"):
        run(scenario([(0.0, 0, 1.0)], [seat("a")]), Lazy())


@pytest.mark.parametrize("name", ["kyb-balanced", "quantum"])
def test_hours_without_a_request_or_of_one_request_are_no_starvation(name: str):
    quiet = [(0.0, 0, 1.0), (1.0, 1, 1.0), (30.0, 0, 1.0), (31.0, 0, 1.0), (30_000.0, 0, 1.0)]
    long = [(0.0, 0, 9_000.0), (1.0, 1, 1.0)]
    for requests in (quiet, long):
        outcome = run(scenario(requests, [seat("a"), seat("b")]), POLICIES[name]())
        assert all(outcome.finished)


def test_a_policy_that_runs_in_circles_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_ASKED_AT_ONCE", 300)
    free = [seat("a", park=0.0, activate=0.0), seat("b", park=0.0, activate=0.0)]
    with pytest.raises(SimulationError, match="runs in circles"):
        run(scenario([(0.0, 1, 1.0), (1.0, 0, 1.0)], free), Restless())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (scenario([], [seat("a", "B")]), "belongs to group B"),
        (scenario([(0.0, 1, 1.0)], [seat("a")]), "names a seat that is not there"),
        (scenario([], [seat("a")], cap=0), "cap and slots"),
        (scenario([], [seat("a", vram_bytes=2)], [SimGroup("A", 2, 1)]), "more memory than the group has"),
        (scenario([], [seat("a"), seat("a")]), "two seats are called a"),
        (scenario([], [seat("a")], [SimGroup("A"), SimGroup("A")]), "two groups are called A"),
        (scenario([(0.0, 0, float("nan"))], [seat("a")]), "service time nan"),
        (scenario([(0.0, 0, -1.0)], [seat("a")]), "service time -1.0"),
        (scenario([(-1.0, 0, 1.0)], [seat("a")]), "arrival time -1.0"),
        (scenario([(0.0, 0, 1.0)], [seat("a", park=float("inf"))]), "park time inf"),
        (scenario([(0.0, 0, 1.0)], [seat("a", activate=-2.0)]), "activate time -2.0"),
        (
            scenario(
                [(0.0, 1, 1.0)],
                [seat("a", pinned=True, vram_bytes=6), seat("b", vram_bytes=6)],
                [SimGroup("A", slots=2, memory_bytes=10)],
            ),
            "leave 4 bytes, and seat b needs 6: its requests would wait for ever; pin fewer, or give",
        ),
        (scenario([], [seat("a", pinned=True), seat("b", pinned=True)]), "do not fit into it together"),
        (
            scenario(
                [(0.0, 1, 1.0)],
                [seat("a", pinned=True), seat("b")],
                [SimGroup("A", pool="A"), SimGroup("B", pool="B")],
                move_seconds=1.0,
            ),
            "leave no slot",
        ),
        (scenario([], [seat("a", active=True), seat("b", active=True)]), "the active seats of group A do not fit"),
        (
            scenario(
                [],
                [seat("a", active=True, vram_bytes=6), seat("b", active=True, vram_bytes=6)],
                [SimGroup("A", slots=2, memory_bytes=10)],
            ),
            "the active seats of group A do not fit",
        ),
        (scenario([(0.0, 1, 1.0)], [seat("a", pinned=True), seat("b")]), "leave no slot: its requests would wait"),
        (replace(scenario([(0.0, 0, 1.0)], [seat("a")]), service=()), "differ in length"),
        (replace(scenario([(0.0, 0, 1.0), (1.0, 0, 1.0)], [seat("a")]), at=(1.0, 0.0)), "arrival times fall"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(made: Scenario, text: str):
    with pytest.raises(ValueError, match=text):
        run(made, Exhaustive())


def test_a_policy_that_names_strangers_is_named():
    with pytest.raises(SimulationError, match="stranger"):
        run(scenario([(0.0, 0, 1.0)], [seat("a")]), Names("stranger"))


@dataclass(frozen=True)
class Names:
    name: str

    def decide(self, view: GroupView) -> Decision:
        return Switch(self.name, None, "")
