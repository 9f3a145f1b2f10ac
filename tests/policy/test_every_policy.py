"""What holds for every policy, whatever it sees."""

from dataclasses import replace

import pytest
from hypothesis import given

from kybernate.policy import POLICIES, GroupView, KybSlo, Policy, Stay, Switch
from kybernate.seat import SeatState as S
from tests.policy.conformance import can_be_carried_out, is_looked_at_again
from tests.policy.views import active, queue, seat, view, views

VARIANTS: dict[str, Policy] = {name: kind() for name, kind in POLICIES.items()} | {
    "kyb-slo that never parks": KybSlo(keep_ratio=0.0, cap_slos=1.0),
}
every = pytest.mark.parametrize("name", VARIANTS)


@given(shown=views())
def test_any_view_gets_a_decision_that_can_be_carried_out(shown: GroupView) -> None:
    for name, policy in VARIANTS.items():
        decision = policy.decide(shown)
        can_be_carried_out(policy, shown, decision)
        is_looked_at_again(shown, decision, bounded=name.startswith(("kyb", "quantum")))


@every
def test_a_free_slot_goes_to_a_seat_with_demand_at_once(name: str) -> None:
    decision = VARIANTS[name].decide(view(queue("a", 0.0), seat("b")))
    assert decision == Switch("a", None, decision.reason)


@every
def test_a_pinned_holder_stays_whatever_the_demand(name: str) -> None:
    assert isinstance(VARIANTS[name].decide(view(active("a", pinned=True), queue("b", 900.0))), Stay)


@every
def test_a_pinned_seat_goes_before_everybody(name: str) -> None:
    shown = view(queue("a", *[50.0] * 9), seat("b", pinned=True))
    assert getattr(VARIANTS[name].decide(shown), "activate", None) == "b"


@every
def test_a_container_at_the_start_gate_and_an_operators_wish_get_their_turn(name: str) -> None:
    policy = VARIANTS[name]
    for waits in (seat("b", S.WAITING, start_wait_seconds=5.0), seat("b", wanted_seconds=5.0)):
        assert getattr(policy.decide(view(active("a"), waits)), "activate", None) == "b"
        assert getattr(policy.decide(view(seat("a"), waits)), "activate", None) == "b"


@every
def test_a_seat_just_activated_may_serve_the_request_that_caused_it(name: str) -> None:
    fresh = active("a", active_seconds=0.1, idle_seconds=0.1)
    decision = VARIANTS[name].decide(view(fresh, queue("b", 5.0)))
    assert decision.until is not None
    warmed = replace(fresh, unclaimed=True, active_seconds=3.0, idle_seconds=3.0)
    assert isinstance(VARIANTS[name].decide(view(warmed, queue("b", 5.0))), Switch)


@every
def test_while_a_victim_leaves_its_slot_is_decided_again(name: str) -> None:
    leaving = replace(active("a", in_flight=2), state=S.DRAINING)
    decision = VARIANTS[name].decide(view(leaving, queue("b", 1.0)))
    assert decision == Switch("b", None, decision.reason)
