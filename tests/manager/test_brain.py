"""The live policy and its failures."""

from dataclasses import dataclass, replace

import pytest

from kybernate.policy import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState as S
from services.gpu_manager.live_policy import GuardedPolicy
from tests.manager.world import booted


def seat(name: str, state: S = S.PARKED, **fields: object) -> SeatView:
    costs = {"park_seconds": 2.0, "activate_seconds": 3.0, "service_seconds": 5.0}
    return SeatView(name, state, "G0", **{**costs, **fields})  # type: ignore[arg-type]


def group(*seats: SeatView, now: float = 0.0) -> GroupView:
    return GroupView("G0", 1, seats, now=now)


IDLE = seat("i", S.ACTIVE, active_seconds=60.0, idle_seconds=9.0)
TWO = group(
    IDLE,
    seat("few", waiting=1, ages=((9.0, 1),), oldest_wait_seconds=9.0),
    seat("many", waiting=8, ages=((4.0, 1), (2.0, 7)), oldest_wait_seconds=4.0),
)


@dataclass(frozen=True)
class Says:
    """A policy that always says the same, or raises it."""

    answer: object

    def decide(self, view: GroupView) -> Decision:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


BAD = {
    "it raises": ZeroDivisionError("division by zero"),
    "an unknown seat arrives": Switch("who?", None, ""),
    "an unknown seat leaves": Switch("few", "who?", ""),
    "an unknown seat is parked": Park("who?", ""),
    "it comes itself": Switch("few", "few", ""),
    "no time": Stay(float("nan"), ""),
    "no decision": None,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_policy_that_fails_is_replaced_for_that_look(kind: str) -> None:
    brain = GuardedPolicy("mine", Says(BAD[kind]))

    decision = brain.decide(TWO)

    assert (decision.activate, decision.evict) == ("few", "i")
    assert "policy mine failed" in decision.reason
    assert brain.errors == 1
    assert "group G0" in brain.last_error


@pytest.mark.parametrize("answer", [Switch("few", "i", ""), Park("i", "")])
def test_a_policy_that_names_a_pinned_holder_is_replaced_for_that_look(answer: Decision) -> None:
    pinned = replace(TWO, seats=tuple(replace(seat, pinned=seat.seat == "i") for seat in TWO.seats))
    brain = GuardedPolicy("mine", Says(answer))

    assert isinstance(brain.decide(pinned), Stay)
    assert "pinned" in brain.last_error


def test_where_the_plain_rule_fails_too_nothing_is_done_for_a_moment() -> None:
    brain = GuardedPolicy("mine", Says(KeyError("x")), Says(KeyError("y")))

    assert brain.decide(TWO) == Stay(1.0, brain.decide(TWO).reason)


def test_a_node_goes_on_with_a_policy_that_always_fails() -> None:
    brain = GuardedPolicy("broken", Says(RuntimeError("no")))
    world = booted(policy=brain)
    seats = world.fill("a", "b")

    world.tick(10)
    world.traffic(seats[0], waiting=1)
    world.finish()

    assert world.state(seats[0]) is S.ACTIVE
    assert brain.errors
    assert "policy broken failed" in world.node.groups["G0"].why
