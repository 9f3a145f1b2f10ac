"""A holder that is parked without an incoming seat: called off as soon as it has demand."""

from dataclasses import dataclass, field

import pytest

from kybernate.messages import ActivateSeat, ParkSeat, PinSeat
from kybernate.policy import Decision, GroupView, KybBalanced, Park, Policy
from kybernate.policy.turns import contenders, own_load
from kybernate.seat import SeatState as S
from tests.manager.world import World, booted, make_group


@dataclass(frozen=True)
class ParksIdle:
    """Parks idle holders at once; else as the shipped policy."""

    otherwise: Policy = field(default_factory=KybBalanced)
    even_busy: bool = False

    def decide(self, view: GroupView) -> Decision:
        holders = [seat for seat in view.holders() if self.even_busy or not own_load(seat)]
        if contenders(view) or not holders:
            return self.otherwise.decide(view)
        return Park(holders[0].seat, "idle")


@pytest.fixture
def world() -> World:
    """a is parked; b is active and about to be parked without an incoming seat."""
    world = booted()
    world.fill("a", "b")
    world.tick(20)
    world.configure(policy=ParksIdle())
    world.tick(1)
    assert world.state(world.seat(0, 1)) is S.DRAINING
    return world


def test_a_request_for_it_calls_the_park_off(world: World, b: str) -> None:
    world.announce(b)
    world.traffic(b, waiting=1)
    assert world.state(b) is S.ACTIVE
    assert not world.node.switches
    assert "wanted again" in world.managed(b).reason


@pytest.mark.parametrize(
    ("kind", "actor"), [(ActivateSeat, "router"), (ActivateSeat, "operator"), (PinSeat, "operator")]
)
def test_who_asks_for_it_calls_it_off_and_has_what_was_wished_for(
    world: World, b: str, kind: type[ActivateSeat | PinSeat], actor: str
) -> None:
    world.command(kind, b, actor=actor)
    assert world.state(b) is S.ACTIVE
    assert world.managed(b).usage.wanted_since is None


def test_a_request_for_another_one_makes_it_a_switch_that_goes_on(world: World, a: str, b: str) -> None:
    world.traffic(a, waiting=1)
    world.traffic(b, waiting=1)
    assert world.state(b) is S.DRAINING
    world.quiet(b)
    job = world.job()
    assert ([target.seat for target in job.park], job.activate.seat) == ([b], a)


def test_once_it_is_drained_the_park_goes_through_and_it_comes_back(world: World, b: str) -> None:
    world.quiet(b)
    assert world.state(b) is S.PARKING
    world.traffic(b, waiting=1)
    job = world.job()
    world.progress(job)
    assert world.state(b) is S.ACTIVATING


def test_what_an_operator_parks_is_parked(world: World, b: str) -> None:
    """Also a request that arrives when the policy has begun to park it."""
    world.command(ParkSeat, b)
    world.traffic(b, waiting=1)
    assert world.state(b) is S.DRAINING
    world.exit(b)
    world.traffic(b)
    world.call(b)
    world.start(b)
    world.healthy(b)
    world.configure(policy=KybBalanced())
    world.command(ParkSeat, b)
    world.traffic(b, waiting=1)
    assert world.state(b) is S.DRAINING


def test_a_policy_that_parks_who_is_asked_for_is_not_followed(world: World, b: str) -> None:
    world.traffic(b, waiting=1)
    world.configure(policy=ParksIdle(even_busy=True))
    before = len(world.effects)
    for _ in range(5):
        world.traffic(b, waiting=1)
    assert world.state(b) is S.ACTIVE
    assert len(world.effects) == before
    assert "although the policy decided" in world.node.groups["G0"].why


def test_where_two_have_to_leave_it_goes_on_as_long_as_the_one_they_make_room_for_is_wanted() -> None:
    world = booted(make_group("G", [0, 1], 3, slots=2))
    small, other, big = world.groups[0].seat_ids
    for seat, model, vram in ((big, "big", 150), (small, "small", 60), (other, "other", 60)):
        world.serve(seat, model, vram=f"{vram}GiB")
    world.tick(10)
    assert world.state(big) is S.PARKED
    world.traffic(big, waiting=1)
    (switch,) = world.node.switches.values()
    assert (switch.incoming, switch.room_for) == (None, big)
    victim = switch.victim or ""

    world.traffic(victim, waiting=1)
    assert world.state(victim) is S.DRAINING
    world.traffic(big)

    assert world.state(victim) is S.ACTIVE


def test_a_slot_that_is_free_meanwhile_is_taken_and_no_seat_need_leave() -> None:
    world = booted(make_group("G", [0], 3, slots=2))
    seats = world.fill(*"abc", vram="40GiB")
    (incoming,) = [seat for seat in seats if world.state(seat) is S.PARKED]
    world.later(20)
    world.traffic(incoming, waiting=1)
    victim = world.node.switches["G"].victim or ""
    (other,) = {*seats} - {incoming, victim}

    world.exit(other)
    world.tick(0.1)

    assert (world.state(victim), world.state(incoming)) == (S.ACTIVE, S.ACTIVATING)
