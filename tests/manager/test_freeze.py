"""Requests in flight that are frozen with their seat: opt-in, only when all routers can keep them, and back in time."""

import pytest

from kybernate.messages import DrainAck, JobReply, SeatEvicted, SeatProgress
from kybernate.policy import Decision, GroupView, KybBalanced, Switch
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.inputs import Recovered
from services.gpu_manager.publish import record
from tests.manager.world import World, status


class Freezes:
    """As kyb-balanced, but a holder in the way is frozen at once, if only its pod lets it."""

    def decide(self, view: GroupView) -> Decision:
        waiting = [seat for seat in view.seats if seat.waiting and seat.state is S.PARKED]
        for holder in view.holders():
            if waiting and holder.in_flight and not holder.pinned:
                return Switch(waiting[0].seat, holder.seat, "frozen", "freeze")
        return KybBalanced().decide(view)


def started(budget: str = "60s", *, announced: bool = True) -> tuple[World, str, str]:
    """b computes two answers; a request for a waits. ``announced``: the roster says that b is closed."""
    world = World(policy=Freezes())
    world.boot()
    a, b = world.seat(0, 0), world.seat(0, 1)
    for seat, model in ((a, "a"), (b, "b")):
        world.pod(seat, model, **{"stall-budget": budget})
        world.call(seat)
        world.finish()
        world.start(seat)
        world.healthy(seat)
    world.tick(10)
    world.beat()
    world.traffic(b, in_flight=2)
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING
    if announced:
        world.announce(b)
    return world, a, b


def ack(world: World, seat: str, in_flight: int, permits: int | None) -> None:
    row = world.managed(seat)
    world.receive(
        DrainAck(
            cause="d", node="n1", seat=seat, instance="router-0", incarnation="a", epoch=row.epoch,
            in_flight=in_flight, permits=permits,
        )
    )  # fmt: skip


def frozen() -> tuple[World, str, str]:
    world, a, b = started()
    ack(world, b, 2, 0)
    assert world.state(b) is S.PARKING
    return world, a, b


def test_it_is_parked_with_its_answers_as_soon_as_every_router_has_closed_it() -> None:
    world, a, b = frozen()

    evicted = world.last(SeatEvicted)
    assert isinstance(evicted, SeatEvicted)
    assert evicted.stall_seconds == pytest.approx(60.0)
    assert "2 requests in flight are frozen with it" in evicted.reason
    world.finish()
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)
    assert record(world.node, world.managed(b), world.now).stall_seconds == pytest.approx(60.0)


@pytest.mark.parametrize(("in_flight", "permits"), [(2, None), (2, 1)], ids=["an older router", "a permission"])
def test_a_router_that_cannot_keep_them_yet_is_waited_for(in_flight: int, permits: int | None) -> None:
    world, _, b = started()

    ack(world, b, in_flight, permits)

    assert world.state(b) is S.DRAINING


def test_it_is_not_frozen_before_the_roster_says_that_it_is_closed() -> None:
    world, _, b = started(announced=False)

    ack(world, b, 2, 0)
    assert world.state(b) is S.DRAINING, "a router that starts now reads that it is active"

    world.announce(b)
    world.tick(1)
    assert world.state(b) is S.PARKING


def test_without_a_stall_budget_it_is_drained() -> None:
    world, _, b = started("0s")

    ack(world, b, 2, 0)

    assert world.state(b) is S.DRAINING


def test_frozen_requests_wait_since_they_stand_still_and_bring_their_seat_back() -> None:
    world, a, b = frozen()
    world.finish()
    world.traffic(a)
    world.tick(3.0)
    world.finish()

    assert world.state(b) is S.ACTIVE
    assert (world.managed(b).durable.freeze.since, world.managed(b).durable.freeze.until) == (0.0, 0.0)


def test_what_the_policy_sees_of_a_frozen_seat() -> None:
    world, a, b = frozen()
    world.finish()
    world.traffic(a, in_flight=1)
    world.managed(a).durable.pinned = True
    world.tick(7.0)

    seat = view.seat_view(world.node, world.managed(b), world.now)

    assert (seat.waiting, seat.in_flight, seat.ages) == (2, 2, ((7.0, 2),))
    assert (seat.oldest_wait_seconds, seat.wait_seconds, seat.pinned) == (7.0, 7.0, False)
    world.tick(50.0)
    assert view.seat_view(world.node, world.managed(b), world.now).pinned, "its budget would not last another visit"


def test_a_park_that_is_rolled_back_thaws_them() -> None:
    world, _, b = frozen()
    world.progress(world.job(), "active", "pending")

    assert world.state(b) is S.ACTIVE
    assert world.managed(b).durable.freeze.since == 0.0


def test_a_manager_that_starts_again_remembers_since_when_they_stand_still() -> None:
    world, a, b = frozen()
    world.finish()
    world.traffic(a, in_flight=1)
    ledger = recovery.ledger(world.node, "")
    since = world.managed(b).durable.freeze.since
    world.tick(5.0)

    world.board = world.new_board()
    seats = tuple(
        SeatProgress(
            seat=entry.seat, pod_uid=entry.pod_uid, container_id=entry.durable.container_id,
            outcome="active" if entry.lease else "parked",
        )
        for entry in ledger.seats
    )  # fmt: skip
    world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True, seats=seats)))

    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)
    assert (world.managed(b).durable.freeze.since, world.managed(a).durable.freeze.since) == (since, 0.0)
    assert record(world.node, world.managed(b), world.now).stall_seconds == pytest.approx(55.0)


def test_a_budget_that_is_used_up_brings_no_seat_back() -> None:
    world, a, b = frozen()
    world.finish()
    world.managed(a).durable.pinned = True
    world.tick(70.0)
    world.traffic(b)  # routers have cut what stood still

    seat = view.seat_view(world.node, world.managed(b), world.now)

    assert (seat.pinned, seat.wait_seconds) == (False, None)


def test_a_manager_that_starts_while_it_is_parked_still_knows_what_is_frozen() -> None:
    world, _, b = frozen()
    job = world.job()
    ledger = recovery.ledger(world.node, "boot")
    world.board = world.new_board()
    seen = [
        SeatProgress(seat=pod.seat, pod_uid=pod.uid, container_id=pod.container_id or "", outcome="started")
        for pod in world.pods.values()
    ]
    under_way = status(job, "started", "pending", done=False)
    world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True, jobs=(under_way,), seats=tuple(seen))))
    world.traffic(b, in_flight=2)

    assert world.state(b) is S.PARKING
    assert world.managed(b).durable.freeze.until > world.now.unix
    world.progress(job)
    seat = view.seat_view(world.node, world.managed(b), world.now)
    assert (seat.state, seat.waiting) == (S.PARKED, 2)
