"""The KYB policies, rule by rule."""

from dataclasses import replace
from math import exp

import pytest

from kybernate.lab.baselines import CmuSetup
from kybernate.policy import Decision, KybBalanced, KybBounded, KybSlo, Park, PeerView, Stay, Switch
from kybernate.policy.index import Urgency, bid, prolonged_seconds, step_seconds, waiting_ages
from kybernate.policy.rules import Quantum
from kybernate.policy.turns import FADE_SECONDS
from kybernate.seat import SeatState as S
from tests.policy.views import active, queue, seat, view

BALANCED = KybBalanced()


def incoming(decision: Decision) -> str | None:
    return decision.activate if isinstance(decision, Switch) else None


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "x", "worth"),
    [
        (KybBalanced(age_weight=1.0), 2.5, 3.5),
        (KybBounded(age_weight=0.2), 3.0, 2.8),
        (KybSlo(age_weight=0.5), 0.5, 1.125),
        (KybSlo(lost_weight=0.05), 2.0, 0.1),
        (KybSlo(lost_weight=0.05, late_slos=5.0, late_weight=0.35), 7.0, 1.05),
    ],
)
def test_what_a_waiting_request_counts(policy: KybBalanced, x: float, worth: float) -> None:
    assert policy.urgency().of(x) == pytest.approx(worth)


def test_the_index_is_urgency_per_second_of_the_whole_visit() -> None:
    lone = queue("a", 6.0, 2.0, weight=2.0, rate_fast=0.0, rate_slow=0.0, service_seconds=5.0)
    offer = bid(lone, Urgency(1.0, 1.0), park_seconds=3.0)
    length = 5.0 * (1 + 0.7 * 0.6931471805599453)
    assert (offer.setup_seconds, offer.visit_seconds) == (7.0, pytest.approx(length))
    assert offer.index == pytest.approx(2.0 * (2 + 13 / 20 + 9 / 20) / (7.0 + length))


def test_a_straight_line_is_summed_as_the_curve_is() -> None:
    ages = ((9.0, 2), (4.0, 1), (0.0, 3))
    line, curve = Urgency(1.0, 0.4), Urgency(1.0, 0.4, due=1e9)
    assert line.total(ages, 7.0, 20.0) == pytest.approx(curve.total(ages, 7.0, 20.0))


def test_a_move_to_another_group_costs_its_seconds() -> None:
    assert bid(queue("a", 1.0, move_seconds=3.0), Urgency(), 0.0).setup_seconds == 7.0


def test_the_busy_period_is_that_of_m_m_infinity() -> None:
    busy = seat("a", rate_fast=0.3, rate_slow=0.3, service_seconds=5.0)
    assert prolonged_seconds(busy, 1) == pytest.approx(5.0 * (exp(1.5) - 1 - 1.5) / 1.5, rel=1e-3)
    assert prolonged_seconds(busy, 7) == pytest.approx(sum(step_seconds(busy, n) for n in range(1, 8)), rel=1e-3)
    assert step_seconds(busy, 1) > step_seconds(busy, 2) > step_seconds(busy, 9) > 0.0


def test_where_only_the_oldest_age_is_known_the_others_are_half_as_old() -> None:
    assert waiting_ages(seat("a", waiting=3, oldest_wait_seconds=8.0)) == ((8.0, 1), (4.0, 2))


# --- who goes next ----------------------------------------------------------------------------------------------------


def test_the_larger_queue_goes_first_and_the_reason_says_why() -> None:
    decision = BALANCED.decide(view(queue("a", 1.0), queue("b", 1.0, 1.0, 1.0)))
    assert incoming(decision) == "b"
    why = "3 requests wait, the longest for 5 % of its 20 s; the switch takes 4.0 s; then a with 1 request"
    assert decision.reason == f"slot free; b goes first: {why}"
    named = BALANCED.decide(view(active("s0", model="qwen3"), queue("s1", 1.4, model="gemma"), queue("s2", 0.1)))
    assert named.reason == (
        "qwen3 is idle; gemma goes first: 1 request has waited 7 % of its 20 s; the switch takes 7.0 s; "
        "then s2 with 1 request"
    )


def test_a_start_and_a_command_are_named_as_what_they_are_and_not_as_requests() -> None:
    start = seat("b", state=S.WAITING, start_wait_seconds=0.5)
    wanted = seat("b", state=S.PARKED, wanted_seconds=0.5)
    for one, text in ((start, "the start of its container"), (wanted, "an operator's command")):
        assert BALANCED.decide(view(queue("a", 1.0, 1.0, 1.0), one)).reason.endswith(f"; then b with {text}")
        assert f"b has {text} waiting" in Quantum().decide(view(one)).reason


def test_of_equal_queues_the_colder_seat_goes_first() -> None:
    hot = queue("a", 3.0, 3.0, rate_fast=0.15, rate_slow=0.15)
    assert incoming(BALANCED.decide(view(hot, queue("b", 3.0, 3.0)))) == "b"


def test_a_higher_tier_goes_first() -> None:
    assert incoming(BALANCED.decide(view(queue("a", 3.0), queue("b", 3.0, weight=2.0)))) == "b"


def test_slo_mode_saves_who_can_be_saved() -> None:
    lost, saved = queue("a", 60.0), queue("b", 1.0)
    assert incoming(BALANCED.decide(view(lost, saved))) == "a"
    assert incoming(KybSlo().decide(view(lost, saved))) == "b"


@pytest.mark.parametrize("policy", [BALANCED, KybBounded(), KybSlo()])
def test_beyond_the_cap_the_oldest_goes_first_and_closes_a_busy_holder(policy: KybBalanced) -> None:
    starving = queue("b", policy.cap_slos * 20.0)
    crowd = queue("a", *[30.0] * 40)
    assert incoming(policy.decide(view(crowd, starving))) == "b"
    decision = policy.decide(view(active("c", in_flight=60, active_seconds=3.0), crowd, starving))
    assert (incoming(decision), getattr(decision, "evict", None)) == ("b", "c")
    assert "cap" in decision.reason


def test_a_wait_that_nears_the_cap_is_looked_at_in_time() -> None:
    decision = BALANCED.decide(view(active("a", in_flight=9, rate_fast=0.0, rate_slow=0.0), queue("b", 100.0)))
    assert decision.until == pytest.approx(BALANCED.cap_slos * 20.0 - 107.0)


# --- who leaves -------------------------------------------------------------------------------------------------------


def test_an_idle_holder_leaves_at_once() -> None:
    decision = BALANCED.decide(view(active("a", idle_seconds=0.0, active_seconds=5.0), queue("b", 0.0)))
    assert (incoming(decision), getattr(decision, "evict", None)) == ("b", "a")


def test_of_two_idle_holders_the_colder_leaves() -> None:
    hot = active("a", rate_fast=1.0, rate_slow=1.0)
    assert getattr(BALANCED.decide(view(hot, active("b"), queue("c", 1.0), slots=2)), "evict", None) == "b"


def test_a_busy_holder_admits_what_comes_while_few_wait_elsewhere() -> None:
    assert isinstance(BALANCED.decide(view(active("a", in_flight=3), queue("b", 5.0, 4.0))), Stay)


def test_a_holder_with_few_requests_closes_for_fewer_waiting_ones() -> None:
    def closes_for(own: int) -> int:
        holder = active("a", in_flight=own, rate_fast=0.3, rate_slow=0.3)
        return next(
            n for n in range(1, 500) if isinstance(BALANCED.decide(view(holder, queue("b", *[1.0] * n))), Switch)
        )

    assert 1 < closes_for(1) < closes_for(2) < closes_for(4)


def test_slo_mode_closes_a_holder_for_those_who_can_still_be_saved() -> None:
    holder = active("a", in_flight=3, rate_fast=0.1, rate_slow=0.1)

    def closes_for(age: float) -> int:
        """How many of one age it takes; 4 + 3 s of set-up leave 13 s of the SLO to one that has just come."""
        return next(n for n in range(1, 500) if incoming(KybSlo().decide(view(holder, queue("b", *[age] * n)))))

    assert 1 < 2 * closes_for(6.0) < closes_for(12.0) < closes_for(16.0) == closes_for(30.0)


def test_slo_mode_says_how_many_requests_decided() -> None:
    crowd = queue("b", *[6.0] * 30)
    decision = KybSlo().decide(view(active("a", in_flight=3, rate_fast=0.1, rate_slow=0.1), crowd))
    assert (incoming(decision), "requests their SLO" in decision.reason) == ("b", True)


def test_a_crowd_closes_a_holder_only_after_its_least_visit() -> None:
    crowd = queue("b", *[20.0] * 30)
    fresh = BALANCED.decide(view(active("a", in_flight=1, active_seconds=BALANCED.min_visit_seconds - 1), crowd))
    assert fresh == Stay(1.0, fresh.reason)
    later = BALANCED.decide(view(active("a", in_flight=1, active_seconds=BALANCED.min_visit_seconds), crowd))
    assert (incoming(later), getattr(later, "evict", None)) == ("b", "a")


# --- no demand --------------------------------------------------------------------------------------------------------


def test_a_holder_that_is_alone_or_has_no_rivals_is_never_parked() -> None:
    assert BALANCED.decide(view(active("a"))) == Stay(None, "no demand")
    assert isinstance(BALANCED.decide(view(active("a"), seat("b", rate_fast=0.0, rate_slow=0.0))), Stay)


def test_a_short_pause_is_no_idleness() -> None:
    shown = view(active("a", idle_seconds=0.4), seat("b", rate_fast=1.0, rate_slow=1.0))
    decision = KybBalanced(idle_seconds=1.0).decide(shown)
    assert decision == Stay(pytest.approx(0.6), decision.reason)


def test_what_an_operator_brought_waits_a_minute_for_its_first_request() -> None:
    wished = active("a", rate_fast=0.0, rate_slow=0.0, active_seconds=1.0, idle_seconds=1.0)
    decision = BALANCED.decide(view(wished, seat("b")))
    assert decision.until == 59.0
    for later in (
        replace(wished, active_seconds=60.0, idle_seconds=60.0),
        replace(wished, active_seconds=5.0),
        replace(wished, unclaimed=True),
    ):
        assert isinstance(BALANCED.decide(view(later, seat("b"))), Park)


def test_rates_fade_without_events_so_a_busy_holder_is_looked_at_again() -> None:
    hot = active("a", in_flight=1, service_seconds=30.0, rate_fast=1.0, rate_slow=0.0, weight=2.0)
    crowd = queue("b", 9.0, 8.0, 7.0, 6.0, weight=2.0, slo_seconds=60.0)
    decision = BALANCED.decide(view(hot, crowd))
    assert decision.until == FADE_SECONDS
    faded = view(replace(hot, rate_fast=0.1, active_seconds=240.0), crowd)
    assert isinstance(BALANCED.decide(faded), Switch), "nothing had happened but time"


def test_cmu_setup_looks_again_too() -> None:
    decision = CmuSetup().decide(view(active("a", in_flight=3), queue("b", 9.0)))
    assert decision.until == FADE_SECONDS


def test_without_a_cap_nothing_is_looked_at_for_its_sake() -> None:
    policy = KybBalanced(cap_slos=float("inf"), close_ratio=0.0)
    decision = policy.decide(view(active("a", in_flight=1), queue("b", 9.0)))
    assert decision.until is None


# --- other groups, several slots --------------------------------------------------------------------------------------


def test_a_guest_comes_only_while_its_own_group_is_taken() -> None:
    guest = queue("far", 5.0, home_busy=True, move_seconds=3.0)
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(guest,)))) == "far"
    assert isinstance(BALANCED.decide(view(seat("a"), elsewhere=(replace(guest, home_busy=False),))), Stay)


def test_a_seat_comes_to_the_group_that_its_pod_prefers_also_while_its_own_is_free() -> None:
    guest = queue("far", 5.0, group="G1", move_seconds=3.0, prefers=True)
    free = peer(free=True, frees_in=0.0)
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(guest,), peers=(free,)))) == "far"
    own = queue("a", 5.0)
    assert incoming(BALANCED.decide(view(own, elsewhere=(replace(guest, move_seconds=0.0, seat="Z"),)))) == "Z"
    other = replace(guest, move_seconds=0.0, seat="Z", prefers=False, home_busy=True)
    assert incoming(BALANCED.decide(view(own, elsewhere=(other,)))) == "a", "guestRatio"


def peer(**given: object) -> PeerView:
    """Another group of the pool, busy unless given otherwise, with 0.04 requests/s for its parked seats."""
    return PeerView("G1", **{"rate": 0.04, "free": False, "frees_in": None, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "move", "even"),
    [
        ((), 0.0, 0.03),  # 0.04 · P = 3 s against R = 4 s
        ((peer(),), 3.0, 0.06),  # its seats would wait for this park, too
        ((peer(frees_in=5.0),), 3.0, 0.05),  # or for one there, and 2 s longer than moving here takes
        ((peer(frees_in=2.0),), 3.0, 0.03),
        ((peer(free=True, frees_in=0.0),), 3.0, 0.03),  # a move there costs what the park here does
        ((peer(free=True, frees_in=0.0),), 1.0, 0.0143),  # 1 s, or 3 s where a second request comes within 3 s
        ((peer(free=True, frees_in=0.0, rate=9.0),), 1.0, 0.03),  # one does
        ((peer(free=True, frees_in=0.0, rate=0.4), peer()), 1.0, 0.0481),
    ],
)
def test_whether_an_idle_holder_stays_is_asked_of_the_pool(
    peers: tuple[PeerView, ...], move: float, even: float
) -> None:
    def asked(own: float) -> Decision:
        holder, other = active("a", rate_fast=own, rate_slow=own), seat("b", rate_fast=0.04, rate_slow=0.04)
        return BALANCED.decide(view(holder, other, peers=peers, move_seconds=move))

    assert isinstance(asked(1.02 * even), Stay)
    assert isinstance(asked(0.98 * even), Park)


def test_a_holder_leaves_for_the_seats_of_other_groups_alone() -> None:
    holder = active("a", rate_fast=0.01, rate_slow=0.01)
    assert isinstance(BALANCED.decide(view(holder, peers=(peer(),), move_seconds=3.0)), Park)
    assert isinstance(BALANCED.decide(view(holder, peers=(peer(rate=0.0),), move_seconds=3.0)), Stay)


@pytest.mark.parametrize(
    ("home", "waits", "comes"),
    [
        ({"frees_in": 1.0, "lost_seconds": 1.0}, (0.5,), False),  # 2 s for parking there, 3 s for moving
        ({"frees_in": 1.0, "lost_seconds": 2.5}, (0.5,), True),
        ({"frees_in": 1.0, "lost_seconds": 2.5}, (0.5, 0.4, 0.3), False),  # three share what that costs one
        ({"frees_in": 1.0, "lost_seconds": 1.0}, (3.1,), True),  # it has not begun
        ({"frees_in": None}, (0.5,), True),
    ],
)
def test_a_guest_whose_own_group_makes_room_for_less_than_a_move_stays_there(
    home: dict[str, object], waits: tuple[float, ...], comes: bool
) -> None:
    far = queue("far", *waits, group="G1", home_busy=True, move_seconds=3.0)
    decision = BALANCED.decide(view(seat("a"), elsewhere=(far,), peers=(peer(**home),), move_seconds=3.0))
    assert (incoming(decision) == "far") is comes


def test_a_guest_that_would_start_cold_waits_at_home_for_as_long_as_that_costs_more() -> None:
    far = queue("far", 20.0, home_busy=True, move_seconds=30.0, loses_copy=True, others_rate=1.0)
    need = 30.0 - far.park_seconds - far.activate_seconds
    for waited, comes in ((need - 0.1, False), (need + 0.1, True)):
        decision = BALANCED.decide(view(seat("a"), elsewhere=(replace(far, ages=(), oldest_wait_seconds=waited),)))
        assert (incoming(decision) == "far") is comes
    before = replace(far, ages=(), oldest_wait_seconds=1.0, waited_seconds=need)
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(before,)))) == "far", "over all its visits"
    for others, comes in ((0.07, False), (0.09, True)):
        here = (active("a", rate_slow=0.03, rate_fast=0.0), seat("b", rate_slow=0.01, rate_fast=0.0))
        asked = replace(before, others_rate=others)
        assert (incoming(BALANCED.decide(view(*here, elsewhere=(asked,)))) == "far") is comes, "it stays there"
        preferred = replace(asked, prefers=True)
        assert incoming(BALANCED.decide(view(*here, elsewhere=(preferred,)))) == "far"
    busy = view(active("a", in_flight=1, rate_fast=0.0, rate_slow=0.0), elsewhere=(before,))
    assert incoming(BALANCED.decide(busy)) is None
    for late in (False, True):
        behind = replace(before, oldest_wait_seconds=300.0, home_late=late)
        assert (incoming(BALANCED.decide(replace(busy, elsewhere=(behind,)))) == "far") is late, "a start hangs there"
    soon = replace(far, ages=(), oldest_wait_seconds=1.0, home_late=True)
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(soon,)))) is None
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(replace(far, wanted_seconds=0.0),)))) == "far"
    gate = replace(far, state=S.WAITING, start_wait_seconds=0.0, move_seconds=0.0, loses_copy=False)
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(gate,)))) == "far", "it starts in any case"


def test_an_idle_holder_leaves_for_a_guest_at_once() -> None:
    far = queue("far", 0.0, home_busy=True, move_seconds=3.0, rate_fast=0.0)
    assert incoming(BALANCED.decide(view(active("a"), elsewhere=(far,)))) == "far"


@pytest.mark.parametrize("asked", [{"wanted_seconds": 1.0}, {"pinned": True}])
def test_a_guest_comes_for_an_operator_as_for_a_request(asked: dict[str, object]) -> None:
    guest = seat("far", home_busy=True, move_seconds=3.0, **asked)  # type: ignore[arg-type]
    assert incoming(BALANCED.decide(view(seat("a"), elsewhere=(guest,)))) == "far"
    assert isinstance(BALANCED.decide(view(seat("a"), elsewhere=(replace(guest, home_busy=False),))), Stay)


def test_seats_that_share_gpus_with_the_group_yield_although_it_has_no_slot() -> None:
    decision = BALANCED.decide(view(queue("big", 3.0), active("small"), slots=0))
    assert (incoming(decision), getattr(decision, "evict", None)) == ("big", "small")
