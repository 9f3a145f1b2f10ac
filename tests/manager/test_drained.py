"""Drained: the roster says it, then all routers are quiet, then the engine computes nothing. In this order."""

from kybernate.messages import DrainAck, DrainNode, Presence, SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core import demand, view
from services.gpu_manager.core.inputs import BusChanged, DrainAnnounced, EngineSeen
from services.router.core import trust
from tests.manager.world import World, nested


def answer(world: World, seat: str, *, seconds_ago: float, container_id: str | None = None) -> None:
    """The engine computes nothing, by its answer to a question of then."""
    known = world.managed(seat).durable.container_id
    asked_at = world.now.wall - seconds_ago
    world.receive(EngineSeen(seat, known if container_id is None else container_id, True, 0, asked_at=asked_at))


def test_an_answer_to_a_question_from_before_the_routers_were_quiet_proves_nothing(world: World) -> None:
    _, b = world.draining()
    world.answered(b)

    answer(world, b, seconds_ago=0.5)
    assert world.state(b) is S.DRAINING, "a router may have sent a request after it"
    answer(world, b, seconds_ago=0.0)

    assert world.state(b) is S.PARKING


def test_an_answer_to_a_question_from_before_the_routers_cut_their_streams_proves_nothing(world: World) -> None:
    _, b = world.draining()
    world.announce(b)
    for _ in range(61):
        world.later(1)
        world.ack(b, in_flight=1)
    jobs = sum(isinstance(effect, SwitchJob) for effect in world.effects)
    assert (world.state(b), world.node.switches["G0"].phase) == (S.PARKING, "cutting")

    answer(world, b, seconds_ago=0.0)
    assert sum(isinstance(effect, SwitchJob) for effect in world.effects) == jobs, "it may have requests to read"
    world.tick(0.1)
    world.ack(b)
    answer(world, b, seconds_ago=0.05)
    assert sum(isinstance(effect, SwitchJob) for effect in world.effects) == jobs
    answer(world, b, seconds_ago=0.0)

    assert sum(isinstance(effect, SwitchJob) for effect in world.effects) == jobs + 1


def test_an_engine_of_another_container_proves_nothing(world: World) -> None:
    _, b = world.draining()
    world.answered(b)

    answer(world, b, seconds_ago=0.0, container_id="process://999")

    assert world.state(b) is S.DRAINING


def test_the_roster_entry_of_an_earlier_drain_announces_nothing(world: World) -> None:
    _, b = world.draining()
    world.receive(DrainAnnounced(b, world.managed(b).epoch - 1))
    world.ack(b)
    world.idle(b)
    assert world.state(b) is S.DRAINING

    world.announce(b)
    world.idle(b)

    assert world.state(b) is S.PARKING


def test_a_deadline_waits_for_the_roster(world: World) -> None:
    _, b = world.draining()
    for _ in range(100):  # the roster cannot be written: its servers have no leader, or have lost it
        world.later(1)
        world.ack(b, in_flight=1)
    assert world.state(b) is S.DRAINING, "a router that starts now reads that it is active"
    assert view.next_wake(world.node, world.now) > 0.1, "nothing is due until the row is written"

    world.announce(b)
    world.tick(59)
    world.announce(b)  # its row is written again
    assert world.state(b) is S.DRAINING, "requests in flight have the time of a drain"
    world.tick(1.1)

    assert world.state(b) is S.PARKING


def test_a_drain_stands_still_while_the_bus_is_away(world: World) -> None:
    _, b = world.draining()
    world.receive(BusChanged(False))

    world.quiet(b)
    world.tick(100)
    world.idle(b)

    assert world.state(b) is S.DRAINING


def test_an_engine_that_was_idle_while_the_bus_was_away_is_asked_again_once_the_routers_are_known(world: World) -> None:
    _, b = world.draining()
    world.answered(b)
    world.receive(BusChanged(False))
    world.idle(b)
    world.receive(BusChanged(True))
    assert world.state(b) is S.DRAINING

    world.later(4)
    world.ack(b)
    assert world.state(b) is S.DRAINING
    world.idle(b)
    assert world.state(b) is S.PARKING


def test_after_a_return_of_the_bus_a_deadline_waits_for_the_routers_too(world: World) -> None:
    _, b = world.draining()
    world.answered(b, 1)
    world.later(1, times=58)
    world.receive(BusChanged(False))
    world.tick(5)
    world.receive(BusChanged(True))

    world.tick(2.9)
    assert world.node.switches["G0"].drain.deadline < world.now.model
    assert world.state(b) is S.DRAINING, "a router that forwards to it may not be known yet"
    world.tick(0.2)

    assert world.state(b) is S.PARKING


def test_seats_in_the_way_of_a_larger_group_drain_only_with_the_bus_and_known_routers() -> None:
    world = nested(1)
    (a,), (b,), pair = world.fill("a", group=0), world.fill("b", group=1), world.seat(2, 0)
    world.tick(300)
    world.receive(BusChanged(False))
    world.at_gate(pair, "p")
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.ACTIVE)

    world.receive(BusChanged(True))
    world.tick(2.9)
    assert "G01" in world.node.claims
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.ACTIVE)
    world.router("router-0")
    world.tick(0.2)

    assert (world.state(a), world.state(b)) == (S.DRAINING, S.DRAINING)


def test_an_operators_drain_waits_for_the_routers_too(world: World) -> None:
    (a,) = world.fill("a")
    world.receive(BusChanged(False))
    world.order(DrainNode, group="G0")
    world.receive(BusChanged(True))

    world.tick(2.9)
    assert world.state(a) is S.ACTIVE
    world.router("router-0")
    world.tick(0.2)

    assert world.state(a) is S.DRAINING


def test_a_manager_waits_for_a_silent_router_longer_than_the_router_trusts_itself() -> None:
    """Two services with a bound each. The margin covers a presence that was 2 s on its way, as long as the period."""
    assert demand.DEAD_AFTER_SECONDS >= trust.TRUST_SECONDS + 2.0
    assert demand.PERMIT_SECONDS > trust.ANSWER_SECONDS
    assert demand.SETTLE_SECONDS >= trust.AWAY_SECONDS


def test_a_router_that_acknowledges_nothing_loses_its_lease_and_is_waited_for_once(world: World) -> None:
    """It may not know of the drain: its nats-server is cut off, or the message is late. Its presence proves nothing."""
    routers = world.node.routers
    evil = Presence(cause="p", component="router", instance="evil", incarnation="e", sent=1.0)
    a, b = world.draining()
    world.receive(evil)
    world.answered(b)

    def pass_by(seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            world.later(0.5)
            world.receive(evil.model_copy(update={"sent": world.wall}))

    pass_by(9.5)
    assert "e" in routers.counted()
    pass_by(0.5)
    assert "e" not in routers.counted()
    assert "router-0" in [name for name, _ in routers.present]
    text = world.stage(a).text
    assert "router evil acknowledges nothing, so it is not listed; its lease ends" in text
    pass_by(9.5)
    world.idle(b)
    assert world.state(b) is S.DRAINING, "a router trusts a list for 8 s"
    pass_by(0.5)
    world.idle(b)
    assert world.state(b) is S.PARKING
    assert "without evil, which acknowledges nothing and has no lease" in world.managed(b).reason
    assert [*routers.silent(world.now)] == ["evil"]

    assert "evil" not in routers.busy(a, 99, world.now), "the next drain does not wait for it"
    world.ack(a, router="evil")
    assert "e" not in routers.counted(), "of another incarnation"
    world.receive(DrainAck(cause="d", node="n1", seat=a, instance="evil", incarnation="e", epoch=1, in_flight=0))
    assert "e" in routers.counted(), "it answers again"


def test_a_deadline_waits_for_a_router_that_has_not_acknowledged(world: World) -> None:
    world.configure(drain_seconds=5.0)
    _, b = world.draining()
    world.announce(b)
    world.later(1, times=19)
    assert world.state(b) is S.DRAINING
    world.tick(1)
    assert world.state(b) is S.PARKING


def test_routers_that_come_while_one_is_silent_are_no_reason_to_wait_without_end(world: World) -> None:
    """Each with a new incarnation: no list has ever named it after the drain was announced."""
    _, b = world.draining()
    world.answered(b)
    for n in range(41):
        world.receive(Presence(cause="p", component="router", instance="evil", incarnation=f"e{n}", sent=world.wall))
        world.later(0.5)
    assert not [one for one in world.node.routers.counted() if one.startswith("e")]
    world.idle(b)
    assert world.state(b) is S.PARKING


def test_a_manager_lists_the_routers_that_it_counts_with_their_last_presence(world: World) -> None:
    """The list is a router's lease: it names no router for which a drain does not wait."""
    routers = world.node.routers
    presence = Presence(cause="p", component="router", instance="r", incarnation="i", sent=70.0)
    world.receive(presence)
    world.receive(presence.model_copy(update={"sent": 72.0}))
    world.receive(presence.model_copy(update={"instance": "old", "incarnation": "o", "sent": None}))
    assert routers.counted() == {"i": 72.0}
    world.tick(9.9)
    assert routers.counted() == {"i": 72.0}
    world.tick(0.2)
    assert routers.counted() == {}
    world.receive(presence)
    world.receive(presence.model_copy(update={"leaving": True}))
    assert routers.counted() == {}
