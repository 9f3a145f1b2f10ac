"""Decisions as events: which seat gets a group, why, and what was seen; and that requests wait and nothing changes."""

from kybernate.messages import GroupDecided, ParkSeat, PinSeat, SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core import arbiter
from tests.manager.world import World


def decided(world: World) -> list[GroupDecided]:
    return [effect for effect in world.effects if isinstance(effect, GroupDecided)]


def test_a_switch_is_one_event_before_its_seat_events_with_the_same_op_cause_and_numbers(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    world.effects.clear()
    world.traffic(a, waiting=3, oldest=2.0, cause="req-7")

    [event] = decided(world)
    assert (event.decision, event.by, event.group) == ("switch", "policy", "G0")
    assert (event.victim, event.victim_model, event.incoming, event.model) == (b, "b", a, "a")
    assert event.cause == "req-7"
    assert event.reason == world.node.groups["G0"].why
    first, second = event.loads
    assert (first.seat, first.waiting, first.oldest_wait_seconds, first.active_seconds) == (a, 3, 2.0, None)
    assert (second.seat, second.state, second.waiting) == (b, S.ACTIVE, 0)
    closed = world.events(b)[-1]
    assert closed.op == event.op
    assert world.effects.index(event) < world.effects.index(closed)
    assert closed.seq > int(event.id.rpartition(":")[2])


def test_another_incoming_seat_is_a_second_event_of_the_same_switch(world: World) -> None:
    a, b, c = world.fill("a", "b", "c")
    world.tick(10)
    world.effects.clear()
    world.traffic(a, waiting=1)
    world.traffic(b, waiting=5, oldest=30.0, cause="req-b")
    world.quiet(c)
    job = next(effect for effect in world.effects if isinstance(effect, SwitchJob))
    assert (job.activate.seat, job.cause) == (b, "req-b")
    first, last = decided(world)
    assert (first.incoming, last.incoming, last.model, last.cause) == (a, b, "b", "req-b")
    assert first.op == last.op == job.op


def test_requests_that_wait_while_nothing_changes_are_reported_now_and_then(world: World) -> None:
    a, b = world.fill("a", "b")
    world.command(PinSeat, b)
    world.effects.clear()
    world.traffic(a, waiting=2, cause="req-9")
    for _ in range(int(2 * arbiter.STAY_SECONDS)):
        world.tick(1)
    events = decided(world)
    assert [event.decision for event in events] == ["stay"] * len(events)
    assert 2 <= len(events) <= 3
    assert (events[0].incoming, events[0].model, events[0].cause) == (a, "a", "req-9")
    assert events[0].reason == world.node.groups["G0"].why

    world.traffic(a, waiting=0)
    world.effects.clear()
    world.tick(2 * arbiter.STAY_SECONDS)
    assert decided(world) == []


def test_an_operator_who_parks_a_seat_is_named_as_the_one_who_decided(world: World) -> None:
    [a] = world.fill("a")
    world.effects.clear()
    world.command(ParkSeat, a)
    [event] = decided(world)
    assert (event.decision, event.by, event.victim, event.incoming, event.model) == ("park", "operator", a, "", "a")
    assert event.cause == "op-1"
