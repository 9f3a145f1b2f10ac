"""The board, as lists of messages."""

import pytest

from kybernate.messages import (
    ActivateSeat,
    JobReply,
    ParkSeat,
    PinSeat,
    Presence,
    ReleaseJob,
    SeatActivated,
    SeatClosed,
    SeatEvicted,
    SeatParked,
    SwitchJob,
    TrafficSignal,
    UnpinSeat,
)
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.commands import WISH_SECONDS
from services.gpu_manager.core.inputs import (
    BusChanged,
    JobAnswered,
    RouterAskedOverHttp,
    StartCalls,
    StartTicket,
)
from services.gpu_manager.core.seat_pod import Owners
from tests.manager.world import World


def test_a_request_for_a_parked_seat_drains_parks_and_activates_with_one_cause(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    before = len(world.effects)

    world.traffic(a, waiting=1, cause="req-7")
    assert world.state(b) is S.DRAINING
    world.quiet(b)
    job = world.job()
    assert world.state(b) is S.PARKING
    assert (job.park[0].seat, job.activate.seat if job.activate else None) == (b, a)
    world.progress(job, "parked", "started", done=False)
    assert (world.state(b), world.state(a)) == (S.PARKED, S.ACTIVATING)
    world.progress(job)

    assert world.state(a) is S.ACTIVE
    published = [
        e for e in world.effects[before:] if isinstance(e, SeatClosed | SeatEvicted | SeatParked | SeatActivated)
    ]
    assert [type(e).__name__ for e in published] == ["SeatClosed", "SeatEvicted", "SeatParked", "SeatActivated"]
    assert {e.cause for e in published} == {"req-7"} == {job.cause}
    assert published[-1].seconds.keys() == {"drain", "park", "activate", "verify", "release", "control", "total"}


def test_nothing_is_parked_while_a_router_still_forwards(world: World) -> None:
    _, b = world.draining()
    world.announce(b)

    world.ack(b, in_flight=2)
    world.idle(b)
    assert world.state(b) is S.DRAINING
    world.ack(b, in_flight=0)
    world.idle(b, running=1)
    assert world.state(b) is S.DRAINING
    world.idle(b, running=0)

    assert world.state(b) is S.PARKING


@pytest.mark.parametrize("gap", ["no announcement", "one router silent", "old epoch", "old incarnation"])
def test_an_incomplete_drain_is_no_drain(world: World, gap: str) -> None:
    a, b = world.fill("a", "b")
    world.router("router-1", "x")
    world.later(5)
    world.traffic(a, waiting=1)
    if gap != "no announcement":
        world.announce(b)
    world.ack(b, router="router-0", epoch=1 if gap == "old epoch" else None)
    if gap != "one router silent":
        world.ack(b, router="router-1")
    if gap == "old incarnation":
        world.router("router-1", "y")

    world.idle(b)

    assert world.state(b) is S.DRAINING


def test_two_routers_of_one_name_are_both_waited_for_also_by_the_next_manager(world: World) -> None:
    a, b = world.fill("a", "b")
    world.router("router-1", "x")
    world.router("router-1", "y")
    world.traffic(a, waiting=1)
    world.ack(b, router="router-1")  # "y" of them
    world.quiet(b)
    assert world.state(b) is S.DRAINING, "the other router-1 may still forward"
    kept = recovery.ledger(world.board.node, "")
    assert {*kept.routers.items(), *kept.more_routers} >= {("router-1", "x"), ("router-1", "y")}
    world.routers["router-1"] = "x"
    world.ack(b, router="router-1")
    world.idle(b)
    assert world.state(b) is S.PARKING


def test_a_drain_does_not_wait_for_a_router_that_left_but_for_another_one_of_its_name(world: World) -> None:
    a, b = world.fill("a", "b")
    for incarnation in ("x", "y"):
        world.router("router-1", incarnation)
    world.switch(b, a)

    def leave(incarnation: str) -> None:
        gone = Presence(cause="p", component="router", instance="router-1", incarnation=incarnation, leaving=True)
        world.receive(gone)
        world.idle(b)

    leave("x")
    assert world.state(b) is S.DRAINING, "the other router-1 may still forward"
    leave("y")
    assert world.state(b) is S.PARKING
    assert ("router-1", "y") not in recovery.ledger(world.board.node, "").routers.items()


def test_a_drain_turns_back_with_a_new_epoch_when_the_caller_leaves(world: World) -> None:
    a, b = world.draining()
    closed = world.managed(b).epoch

    world.traffic(a, waiting=0)

    assert world.state(b) is S.ACTIVE
    assert world.managed(b).epoch > closed


def test_a_failed_park_leaves_the_victim_serving_and_is_not_tried_at_once(world: World) -> None:
    a, b = world.drained_switch()

    world.progress(world.job(), "active", "pending")

    assert (world.state(b), world.state(a)) == (S.ACTIVE, S.PARKED)
    assert world.managed(b).reason == "made active"
    assert not world.node.switches
    world.tick(5)
    assert world.state(b) is S.DRAINING


def test_an_unanswered_job_is_sent_again_with_the_same_name(world: World) -> None:
    world.drained_switch()
    job = world.job()

    world.receive(JobAnswered(job, None))
    again = [e for e in world.tick(1.5) if isinstance(e, SwitchJob)]

    assert [(e.op, e.epoch) for e in again] == [(job.op, job.epoch)]


def test_a_stale_epoch_is_raised_above_what_the_checkpointer_saw(world: World) -> None:
    world.drained_switch()
    job = world.job()
    high = job.epoch + 1_000_000_000

    world.receive(JobAnswered(job, JobReply(accepted=False, code="stale-epoch", highest_epoch=high)))

    assert world.job().epoch > high


def test_without_the_bus_nothing_is_evicted_and_afterwards_routers_have_to_be_known_first(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    world.receive(BusChanged(False))
    world.traffic(a, waiting=1)
    assert world.command(ParkSeat, b).code == "not-ready"
    assert world.state(b) is S.ACTIVE

    world.receive(BusChanged(True))
    world.tick(0.5)
    assert world.state(b) is S.ACTIVE
    world.tick(3)

    assert world.state(b) is S.DRAINING


def test_a_new_call_means_that_the_container_exited_even_before_the_pod_list_says_so(world: World) -> None:
    (a,) = world.fill("a")

    world.call(a)
    world.look()
    assert world.state(a) is S.ACTIVE, "that poll may have begun before the call"
    world.look()

    assert [e.state for e in world.events(a)][-3:] == [S.BACKOFF, S.WAITING, S.STARTING]


def test_the_gate_may_be_asked_again_when_an_answer_was_lost(world: World, a: str) -> None:
    world.at_gate(a, "a")
    first = world.managed(a).epoch

    world.call(a)
    world.look(2)

    ticket = world.last(StartTicket)
    assert ticket.call == world.calls[a].call
    assert ticket.epoch > first


def test_a_ticket_without_a_process_is_taken_back_after_270_seconds_of_kubelet(world: World, a: str) -> None:
    world.at_gate(a, "a")
    world.calls.clear()

    world.wait(269)
    assert world.state(a) is S.STARTING
    world.wait(2)

    assert world.state(a) is S.WAITING


def test_a_deleted_pod_keeps_its_gpus_until_its_processes_are_gone(world: World) -> None:
    a, b = world.fill("a", "b")
    world.traffic(a, waiting=1)
    world.pods.pop(b)
    world.look()
    assert world.state(b) is not S.RELEASING, "one miss proves nothing"
    world.look()
    assert world.state(b) is S.RELEASING
    assert isinstance(world.last(ReleaseJob), ReleaseJob)
    assert world.wish(b).code == "deleted"
    world.tick(5)
    assert world.state(a) is S.PARKED

    world.end_processes(b)
    world.look()

    assert world.state(b) is S.FREE
    assert world.state(a) is S.ACTIVATING


def test_demand_for_a_model_without_a_seat_goes_to_one_seat(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    signal = TrafficSignal(cause="ext-1", source="litellm", model="a", waiting=3, ttl_seconds=15)

    world.receive(signal)
    world.finish()
    assert world.state(a) is S.ACTIVE
    world.traffic(b, waiting=1, cause="req-b")
    world.later(16)

    assert world.state(a) is S.DRAINING, "its level expired, another seat waits"


def test_a_late_older_signal_of_a_source_changes_nothing(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    for seq, waiting in ((5, 0), (4, 1)):
        world.receive(TrafficSignal(cause="c", source="r", model="a", seat=a, waiting=waiting, seq=seq))

    assert world.state(b) is S.ACTIVE


class TestCommands:
    def test_a_wish_lapses(self, world: World) -> None:
        a, b = world.fill("a", "b")
        world.receive(BusChanged(False))
        world.command(ActivateSeat, a)
        world.tick(WISH_SECONDS + 1)
        world.receive(BusChanged(True))
        world.tick(4)

        assert world.state(b) is S.ACTIVE

    def test_a_pinned_seat_is_activated_and_never_evicted(self, world: World) -> None:
        a, b = world.fill("a", "b")
        world.tick(10)
        for _ in range(2):
            assert world.command(PinSeat, a).accepted
        world.finish()
        assert world.state(a) is S.ACTIVE

        world.traffic(b, waiting=5)
        world.tick(200)
        assert world.state(a) is S.ACTIVE
        assert world.wish(b).code == "pinned"
        assert world.command(ParkSeat, a).code == "pinned"
        assert world.command(PinSeat, b).code == "pinned"
        assert world.command(UnpinSeat, a).accepted
        world.beat()
        world.traffic(b, waiting=5)

        assert world.state(a) is S.DRAINING

    def test_a_refusal_names_its_model_also_where_another_name_contains_it(self, world: World) -> None:
        a, b = world.fill("qwen3-32b", "qwen")
        assert world.command(PinSeat, a).accepted
        why = "group G0 is kept by pinned qwen3-32b; kyb unpin it"
        assert world.wish(b).reason == world.command(PinSeat, b).reason == f"qwen: {why}"
        assert world.command(ActivateSeat, b, actor="router").reason == why, "the router's answer names the model"
        assert world.command(ParkSeat, a).reason == "qwen3-32b is pinned; unpin it first"


def test_an_unknown_input_is_a_bug_and_says_so(world: World) -> None:
    with pytest.raises(TypeError, match="does not know"):
        world.receive(object())


def test_a_pod_that_kubelet_still_lists_keeps_its_seat_when_devices_are_forgotten(world: World) -> None:
    (a,) = world.fill("a")
    for _ in range(3):
        world.receive(Owners((), frozenset({"uid-a"})))

    assert world.state(a) is S.ACTIVE


def test_a_call_for_a_seat_whose_devices_are_forgotten_may_be_the_next_owners(world: World) -> None:
    (a,) = world.fill("a")
    world.tick()
    world.end_processes(a)
    world.tick()
    world.receive(Owners((), frozenset({"uid-a"})))
    world.traffic(a, waiting=1)
    world.call(a)
    assert world.state(a) is S.BACKOFF
    world.look()
    assert world.state(a) is S.STARTING


class TestPastTheGate:
    def restart(self, world: World, seat: str) -> None:
        """Kubelet starts the container again without asking the gate."""
        world.shows(seat, container_id="process://999", running=True)

    def test_one_that_meets_another_holder_is_quarantined_until_it_is_alone(self, world: World) -> None:
        a, b = world.fill("a", "b")
        self.restart(world, a)
        assert world.state(a) is S.QUARANTINED
        assert "without a ticket" in world.managed(a).reason
        world.traffic(b, waiting=1)
        assert world.state(b) is S.ACTIVE
        world.look_at(a, "active")
        assert world.state(a) is S.QUARANTINED

        world.exit(b)
        world.look_at(a, "active")

        assert world.state(a) is S.STARTING, "its engine loads, and no request may reach it"
        world.healthy(a)
        assert world.state(a) is S.ACTIVE

    def test_one_that_has_a_ticket_starts_beside_one_that_has_none(self, world: World) -> None:
        a, b = world.fill("a", "b")
        world.exit(b)
        world.traffic(b, waiting=1)
        world.call(b)
        self.restart(world, a)
        assert (world.state(a), world.managed(b).facts.waits) == (S.QUARANTINED, True)
        world.start(b)
        assert world.state(b) is S.STARTING

    def test_the_pin_of_a_quarantined_seat_can_be_taken_away(self, world: World) -> None:
        """It would outlast the quarantine, and keep the group."""
        a, _ = world.fill("a", "b")
        assert world.command(PinSeat, a).accepted
        self.restart(world, a)
        assert world.state(a) is S.QUARANTINED

        assert world.command(PinSeat, a).code == "quarantined"
        assert world.command(UnpinSeat, a).accepted

        assert not world.managed(a).pinned

    @pytest.mark.parametrize(("outcome", "state"), [("started", S.QUARANTINED), ("parked", S.PARKED)])
    def test_one_whose_rival_ended_is_what_the_driver_reports(self, world: World, outcome: str, state: S) -> None:
        """It may be about to be restored by the job of a manager before this one: no request must reach it."""
        a, b = world.fill("a", "b")
        self.restart(world, a)

        world.exit(b)
        world.look_at(a, outcome)

        assert world.state(a) is state


def test_an_engine_that_loads_starts_on_when_its_quarantine_ends(world: World, a: str) -> None:
    """The driver could not be read for a moment."""
    world.loads(a, "a")
    world.tick(61)
    world.look_at(a, "quarantined")
    assert world.state(a) is S.QUARANTINED

    world.look_at(a, "active")

    assert world.state(a) is S.STARTING
    world.healthy(a)
    assert world.state(a) is S.ACTIVE


def test_nothing_is_parked_while_a_router_may_go_by_an_answer_over_http(world: World) -> None:
    a, b = world.fill("a", "b")
    world.later(10)
    world.receive(RouterAskedOverHttp())
    world.switch(b, a)
    assert world.state(b) is S.DRAINING

    world.tick(1.6)
    world.idle(b)

    assert world.state(b) is S.PARKING


def test_a_drain_for_a_container_at_the_gate_does_not_turn_back_between_two_calls(world: World, b: str) -> None:
    (a,) = world.fill("a")
    world.traffic(a, in_flight=1)
    world.at_gate(b, "b")
    for _ in range(300):  # beyond the cap on waiting
        world.later(1)
        world.traffic(a, in_flight=1)
        if world.state(a) is S.DRAINING:
            break
        world.call(b)
    assert world.state(a) is S.DRAINING

    world.calls.clear()
    world.receive(StartCalls({}))
    world.tick(1)

    assert world.state(a) is S.DRAINING
