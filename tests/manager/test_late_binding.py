"""The incoming seat is chosen again when the victim is drained."""

import pytest

from kybernate.messages import JobReply
from kybernate.policy import Stay, Switch
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import (
    JobAnswered,
    JobsReported,
    StartCalls,
)
from tests.manager.pulling import By
from tests.manager.world import World, status


def leaving(world: World, answers: int = 1) -> tuple[str, str, str]:
    """c drains for a; no request waits for b yet."""
    a, b, c = world.fill("a", "b", "c")
    world.tick(30)
    world.traffic(c, in_flight=answers)
    world.traffic(c)
    world.traffic(a, waiting=1)
    assert world.state(c) is S.DRAINING
    assert world.node.switches["G0"].incoming == a
    return a, b, c


def test_a_drain_goes_on_for_another_seat_when_its_incoming_one_is_not_wanted_any_more(world: World) -> None:
    a, b, c = leaving(world)

    world.traffic(b, waiting=1)
    world.traffic(a)

    assert world.state(c) is S.DRAINING
    assert world.node.switches["G0"].incoming == b
    world.traffic(b)
    assert world.state(c) is S.ACTIVE


def test_a_status_that_comes_twice_changes_nothing(world: World) -> None:
    a, _, _ = parking_for(world)
    job = world.job()
    world.progress(job, "parked", "pending", done=False)
    assert world.state(a) is S.ACTIVATING
    before = len(world.events(a))

    world.progress(job, "parked", "pending", done=False)
    world.progress(job, "parked", "started", done=False)
    assert len(world.events(a)) == before
    world.progress(job)

    assert [event.state for event in world.events(a)[before:]] == [S.ACTIVE]
    world.progress(job)
    world.receive(JobAnswered(job, JobReply(accepted=True, jobs=(status(job),))))
    assert len(world.events(a)) == before + 1


def test_a_job_that_ends_before_its_second_half_gives_the_gpus_back(world: World) -> None:
    a, _, _ = parking_for(world)
    job = world.job()
    world.progress(job, "parked", "pending", done=False)
    assert world.state(a) is S.ACTIVATING
    before = len(world.events(a))

    world.progress(job, "parked", "pending")

    assert [event.state for event in world.events(a)[before:]] == [S.PARKED, S.ACTIVATING]
    assert world.node.switches["G0"].op != job.op, "another switch brings it"


@pytest.mark.parametrize(
    ("park", "activate", "learned"),
    [(4.0, 5.0, (4.0, 5.0)), (60.0, 60.0, (0.6, 0.6))],
    ids=["as the node saw", "as the checkpointer measured"],
)
def test_halves_during_which_a_service_was_down_make_no_later_switch_dear(
    world: World, park: float, activate: float, learned: tuple[float, float]
) -> None:
    """One activation of 23 s at speed 24 made a seat beyond its cap by its costs alone: with a request of 25 s it
    closed a busy holder 0.1 s after that had come."""
    a, _, c = leaving(world)
    world.quiet(c)
    job = world.job()
    world.tick(park)
    world.progress(job, "parked", "started", done=False)
    world.tick(activate)
    world.progress(job)
    costs = world.managed(c).durable.costs
    assert (costs.park_seconds, costs.parks) == (pytest.approx(learned[0]), 1)
    assert world.managed(a).durable.costs.activate_seconds == pytest.approx(learned[1])


def test_a_job_that_is_sent_again_names_the_seat_that_has_the_gpus_already(world: World) -> None:
    a, _, _ = parking_for(world)
    job = world.job()
    world.progress(job, "parked", "started", done=False)
    assert world.state(a) is S.ACTIVATING

    world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))

    again = world.job()
    assert again is not job
    assert again.activate.seat == a
    world.progress(again)
    assert world.state(a) is S.ACTIVE


def test_the_seat_that_the_job_names_arrives(world: World) -> None:
    """A question of the release before, to bring another one, was on its way into the journal when this manager
    asked."""
    a, b, c = leaving(world)
    world.quiet(c)
    job = world.job()
    seen = [world.seen(seat, "parked") for seat in world.pods]
    world.next_manager(None, *seen, jobs=(status(job, "parked", "pending", done=False),))
    assert world.state(a) is S.ACTIVATING
    instead = job.model_copy(update={"activate": world.managed(b).target()})

    world.progress(instead, "parked", "started", done=False)
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVATING)
    world.progress(instead)

    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)


def parking_for(world: World) -> tuple[str, str, str]:
    """The checkpointer has journaled: park c, then activate a. No other seat is wanted."""
    a, b, c = leaving(world)
    world.quiet(c)
    world.journaled()
    assert world.state(c) is S.PARKING
    return a, b, c


@pytest.mark.parametrize("why", ["evicts", "exited", "no call"])
def test_a_pick_that_the_group_cannot_bring_now_is_not_bound(world: World, why: str) -> None:
    a, b, c = leaving(world)
    if why != "evicts":
        world.exit(b)
        if why == "no call":
            world.call(b)
            world.receive(StartCalls({}))
        assert world.state(b) is (S.BACKOFF if why == "exited" else S.WAITING)

    world.configure(policy=By(lambda _: Switch(b, a if why == "evicts" else None, "picked")))
    world.quiet(c)

    assert world.node.switches["G0"].incoming == a


def test_a_seat_that_no_request_asks_for_when_the_victim_is_cut_is_not_activated(world: World) -> None:
    """While streams are cut nothing calls the switch off: the victim is parked in any case."""
    a, _, c = leaving(world)
    world.announce(c)
    world.tick(61)
    assert world.node.switches["G0"].phase == "cutting"

    world.traffic(a)
    world.tick(2.5)

    assert world.job().activate is None


def test_a_pick_that_no_request_asks_for_keeps_no_drain_going(world: World) -> None:
    a, b, c = leaving(world)

    world.configure(policy=By(lambda _: Switch(b, None, "picked")))
    world.traffic(a)

    assert world.state(c) is S.ACTIVE


def test_the_seat_for_which_the_victim_was_drained_is_activated_while_a_request_asks_for_it(world: World) -> None:
    a, _, c = leaving(world)

    world.configure(policy=By(lambda _: Stay(None, "stays")))
    world.quiet(c)

    job = world.job()
    assert job.activate.seat == a
