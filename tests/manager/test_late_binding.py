"""The incoming seat is chosen again when the victim is drained and while it is being parked."""

from dataclasses import dataclass, replace

import pytest

from kybernate.messages import DrainNode, JobReply, ParkSeat, PinSeat, RetargetJob, SeatProgress, SwitchJob
from kybernate.policy import Decision, GroupView, Stay, Switch
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import (
    BusChanged,
    JobAnswered,
    JobsReported,
    Recovered,
    RetargetAnswered,
    StartCalls,
)
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


def retargets(world: World) -> list[RetargetJob]:
    return [effect for effect in world.effects if isinstance(effect, RetargetJob)]


def parking(world: World) -> tuple[str, str, str]:
    """The checkpointer has journaled: park c, then activate a. Then many ask for b."""
    a, b, c = leaving(world)
    world.quiet(c)
    job = world.job()
    assert job.activate is not None
    assert job.activate.seat == a
    world.receive(JobAnswered(job.op, JobReply(accepted=True)))
    world.traffic(b, waiting=9, oldest=5.0)
    return a, b, c


def test_who_waits_more_when_the_victim_is_drained_comes(world: World) -> None:
    _, b, c = leaving(world)

    world.traffic(b, waiting=9, oldest=5.0, cause="req-b")
    world.quiet(c)

    job = world.job()
    assert job.activate is not None
    assert (job.activate.seat, job.cause) == (b, "req-b")
    world.finish()
    assert world.state(b) is S.ACTIVE


def test_a_drain_goes_on_for_another_seat_when_its_incoming_one_is_not_wanted_any_more(world: World) -> None:
    a, b, c = leaving(world)

    world.traffic(b, waiting=1)
    world.traffic(a)

    assert world.state(c) is S.DRAINING
    assert world.node.switches["G0"].incoming == b
    world.traffic(b)
    assert world.state(c) is S.ACTIVE


def test_while_the_victim_is_parked_the_checkpointer_is_asked_once_to_bring_another(world: World) -> None:
    _, b, c = parking(world)
    (asked,) = retargets(world)
    assert asked.activate is not None
    assert asked.activate.seat == b
    world.traffic(b, waiting=10, oldest=6.0)
    assert len(retargets(world)) == 1

    job = world.job().model_copy(update={"activate": asked.activate})
    world.receive(
        RetargetAnswered(job.op, JobReply(accepted=True, jobs=(status(job, "started", "pending", done=False),)))
    )
    assert world.node.switches["G0"].incoming == b
    world.progress(job)

    assert (world.state(b), world.state(c)) == (S.ACTIVE, S.PARKED)


@pytest.mark.parametrize("asked_for", [True, False])
def test_an_offer_is_caused_by_the_seats_request_else_by_the_switch(world: World, asked_for: bool) -> None:
    _, b, _ = parking_for(world)
    if asked_for:
        world.traffic(b, waiting=9, oldest=5.0, cause="req-b")
    else:
        world.configure(policy=Picks(b))
        world.tick(1)

    (asked,) = retargets(world)
    assert asked.cause == ("req-b" if asked_for else world.job().cause)


def test_a_seat_that_the_job_names_after_a_lost_answer_has_the_gpus_once_the_victim_is_parked(world: World) -> None:
    _, b, _ = parking(world)
    (asked,) = retargets(world)

    world.receive(RetargetAnswered(asked.op, None))
    world.progress(world.job().model_copy(update={"activate": asked.activate}), "parked", "pending", done=False)

    assert (world.state(b), world.managed(b).lease) == (S.ACTIVATING, True)


def test_a_status_that_comes_twice_and_an_answer_after_it_change_nothing(world: World) -> None:
    _, b, _ = parking(world)
    (asked,) = retargets(world)
    job = world.job().model_copy(update={"activate": asked.activate})
    world.progress(job, "parked", "pending", done=False)
    assert world.state(b) is S.ACTIVATING
    before = len(world.events(b))

    world.progress(job, "parked", "pending", done=False)
    world.receive(RetargetAnswered(asked.op, JobReply(accepted=True)))
    world.progress(job, "parked", "started", done=False)
    assert len(world.events(b)) == before
    world.progress(job)

    assert [event.state for event in world.events(b)[before:]] == [S.ACTIVE]


def test_a_job_that_ends_before_its_second_half_gives_the_gpus_back(world: World) -> None:
    a, _, _ = parking_for(world)
    job = world.job()
    world.progress(job, "parked", "pending", done=False)
    assert world.state(a) is S.ACTIVATING
    before = len(world.events(a))

    world.progress(job, "parked", "pending")

    assert [event.state for event in world.events(a)[before:]] == [S.PARKED, S.ACTIVATING]
    assert world.node.switches["G0"].op != job.op, "another switch brings it"


def test_an_answer_that_is_lost_loses_nothing(world: World) -> None:
    _, b, _ = parking(world)
    (asked,) = retargets(world)

    world.receive(RetargetAnswered(asked.op, None))
    job = world.job().model_copy(update={"activate": asked.activate})
    world.progress(job, "parked", "started", done=False)
    assert world.state(b) is S.ACTIVATING
    world.progress(job)

    assert world.state(b) is S.ACTIVE


@pytest.mark.parametrize("code", ["too-late", "stale-epoch", "unknown-op"])
def test_where_it_is_too_late_the_first_winner_comes(world: World, code: str) -> None:
    a, b, _ = parking(world)
    (asked,) = retargets(world)

    world.receive(RetargetAnswered(asked.op, JobReply(accepted=False, code=code)))
    world.progress(world.job())

    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)


def test_a_status_that_names_the_first_winner_after_the_answer_is_believed(world: World) -> None:
    """The offer was accepted while the report before it was on its way; the last status of the job counts."""
    a, b, _ = parking(world)
    (asked,) = retargets(world)
    switch = world.node.switches["G0"]
    switch.retarget.offered.add(a)

    world.receive(RetargetAnswered(asked.op, JobReply(accepted=True)))
    assert switch.incoming == b
    world.progress(world.job(), "parked", "started", done=False)

    assert (switch.incoming, world.state(a)) == (a, S.ACTIVATING)


def test_costs_are_what_the_node_saw_and_the_first_one_replaces_the_assumed(world: World) -> None:
    a, _, c = leaving(world)
    world.quiet(c)
    job = world.job()
    world.tick(4.0)
    world.progress(job, "parked", "started", done=False)
    world.tick(6.0)
    world.progress(job)

    assert (world.managed(c).durable.costs.park_seconds, world.managed(c).durable.costs.parks) == (4.0, 1)
    assert world.managed(a).durable.costs.activate_seconds == 6.0


def test_who_refuses_is_not_asked_again(world: World) -> None:
    """It would be refused again at once, and again, for as long as the park takes."""
    _, b, _ = parking(world)
    (asked,) = retargets(world)

    world.receive(RetargetAnswered(asked.op, JobReply(accepted=False, code="stale-epoch")))
    world.traffic(b, waiting=11, oldest=7.0)

    assert len(retargets(world)) == 1


def test_a_job_that_is_sent_again_names_the_seat_that_has_the_gpus_already(world: World) -> None:
    a, _, _ = parking(world)
    (asked,) = retargets(world)
    world.receive(RetargetAnswered(asked.op, JobReply(accepted=False, code="too-late")))
    job = world.job()
    world.progress(job, "parked", "started", done=False)
    assert world.state(a) is S.ACTIVATING

    world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))

    again = world.job()
    assert again is not job
    assert again.activate is not None
    assert again.activate.seat == a
    world.progress(again)
    assert world.state(a) is S.ACTIVE


def test_a_question_without_an_answer_is_put_again_after_a_moment_only(world: World) -> None:
    """While the node bus is down each question fails at once, and its failure is news that would ask again."""
    _, b, _ = parking(world)
    (asked,) = retargets(world)

    for _ in range(20):
        world.receive(RetargetAnswered(asked.op, None))
        world.traffic(b, waiting=9, oldest=5.0)
    assert len(retargets(world)) == 1
    world.tick(1.0)

    assert len(retargets(world)) == 2


def waits_at_the_gate(world: World) -> tuple[str, str, SwitchJob]:
    """c is parked for a; then the checkpointer is asked to activate no seat, since b waits at the start gate."""
    a, b, c = world.fill("a", "b", "c")
    world.configure(warmup=False)
    world.exit(b)
    world.call(b)
    world.tick(10)
    world.traffic(a, waiting=1)
    world.quiet(c)
    job = world.job()
    world.receive(JobAnswered(job.op, JobReply(accepted=True)))
    world.command(PinSeat, b)
    (asked,) = retargets(world)
    assert asked.activate is None
    return a, b, job


@pytest.mark.parametrize("answered", [True, False])
def test_a_seat_that_had_the_gpus_gives_them_back_when_none_is_to_be_activated(world: World, answered: bool) -> None:
    """The park was reported with the first winner; then the second half was dropped, and the answer may be lost."""
    a, b, job = waits_at_the_gate(world)
    world.progress(job, "parked", "pending", done=False)
    assert world.state(a) is S.ACTIVATING
    dropped = job.model_copy(update={"activate": None})

    reply = JobReply(accepted=True, jobs=(status(dropped, done=False),))
    world.receive(RetargetAnswered(job.op, reply if answered else None))
    world.progress(dropped)

    assert (world.state(a), world.managed(a).lease) == (S.PARKED, False)
    world.tick(1.0)
    assert world.state(b) is S.STARTING


def test_the_seat_that_the_second_half_has_begun_with_arrives_whichever_was_offered(world: World) -> None:
    """A RetargetJob of the manager before this one was on its way into the journal when this one asked."""
    a, b, c = leaving(world)
    world.quiet(c)
    job = world.job()
    ledger = recovery.ledger(world.node, "boot")
    world.board = world.new_board()
    world.receive(BusChanged(True))
    reported = status(job, "parked", "pending", done=False)
    seats = tuple(
        SeatProgress(seat=seat, pod_uid=pod.uid, container_id=pod.container_id or "", outcome="parked")
        for seat, pod in world.pods.items()
    )
    world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True, jobs=(reported,), seats=seats)))
    assert world.state(a) is S.ACTIVATING
    instead = job.model_copy(update={"activate": world.managed(b).target()})

    world.progress(instead, "parked", "started", done=False)
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVATING)
    world.progress(instead)

    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)


def test_a_container_that_comes_to_the_gate_meanwhile_goes_first_if_it_is_pinned(world: World) -> None:
    _, b, c = leaving(world)
    world.quiet(c)
    job = world.job()
    world.receive(JobAnswered(job.op, JobReply(accepted=True)))
    world.exit(b)
    world.call(b)
    world.command(PinSeat, b)

    (asked,) = retargets(world)
    assert asked.activate is None


@dataclass(frozen=True)
class Picks:
    """A policy that activates this seat, whatever the others are."""

    seat: str
    evict: str | None = None

    def decide(self, view: GroupView) -> Decision:
        return Switch(self.seat, self.evict, "picked")


def test_the_seat_that_the_policy_picks_is_offered_while_the_victim_is_parked(world: World) -> None:
    _, b, _ = parking_for(world)

    world.configure(policy=Picks(b))
    world.tick(1)

    assert [asked.activate.seat for asked in retargets(world) if asked.activate is not None] == [b]


def parking_for(world: World) -> tuple[str, str, str]:
    """The checkpointer has journaled: park c, then activate a. No other seat is wanted."""
    a, b, c = leaving(world)
    world.quiet(c)
    world.receive(JobAnswered(world.job().op, JobReply(accepted=True)))
    assert (world.state(c), retargets(world)) == (S.PARKING, [])
    return a, b, c


@pytest.mark.parametrize("why", ["evicts", "exited", "no call", "drained", "newer"])
def test_a_pick_that_the_group_cannot_bring_now_is_not_offered(world: World, why: str) -> None:
    a, b, _ = parking_for(world)
    match why:
        case "exited" | "no call":
            world.exit(b)
            if why == "no call":
                world.call(b)
                world.receive(StartCalls({}))
            assert world.state(b) is (S.BACKOFF if why == "exited" else S.WAITING)
        case "drained":
            assert world.order(DrainNode, group="G0", purpose="maintenance").accepted
        case "newer":
            world.managed(b).epoch = world.node.switches["G0"].epoch + 1

    world.configure(policy=Picks(b, evict=a if why == "evicts" else None))
    world.tick(1)

    assert retargets(world) == []
    assert world.node.switches["G0"].incoming == a


@pytest.mark.parametrize("job", ["sent", "half done"])
def test_nothing_is_offered_before_the_job_is_journaled_or_after_the_victim_is_parked(world: World, job: str) -> None:
    a, b, c = leaving(world)
    world.quiet(c)
    if job == "half done":
        world.progress(world.job(), "parked", "pending", done=False)
        assert world.state(c) is S.PARKED

    world.configure(policy=Picks(b))
    world.tick(1)

    assert retargets(world) == []
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

    world.configure(policy=Picks(b))
    world.traffic(a)

    assert world.state(c) is S.ACTIVE


@pytest.mark.parametrize("victim", ["parked", "deleted"])
def test_nothing_is_offered_to_a_job_whose_victim_is_not_being_parked(world: World, victim: str) -> None:
    """An operator parks c: no seat takes its place, so there would be room for another one."""
    _, b, c = world.fill("a", "b", "c")
    world.tick(10)
    world.command(ParkSeat, c)
    world.quiet(c)
    job = world.job()
    world.receive(JobAnswered(job.op, JobReply(accepted=True)))
    if victim == "parked":
        world.progress(job, done=False)
    else:
        world.pods[c] = replace(world.pods[c], deleting=True)
        world.look()
    assert world.state(c) is (S.PARKED if victim == "parked" else S.RELEASING)

    world.configure(policy=Picks(b))
    world.tick(1)

    assert retargets(world) == []


@dataclass(frozen=True)
class Stays:
    """A policy that changes nothing."""

    def decide(self, view: GroupView) -> Decision:
        return Stay(None, "stays")


def test_the_seat_for_which_the_victim_was_drained_is_activated_while_a_request_asks_for_it(world: World) -> None:
    a, _, c = leaving(world)

    world.configure(policy=Stays())
    world.quiet(c)

    job = world.job()
    assert job.activate is not None
    assert job.activate.seat == a
