"""Pods that go in the middle of a switch."""

import pytest

from kybernate.messages import JobProgress, JobReply, JobStatus, KillJob, ParkSeat, ReleaseJob, SeatProgress, SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import InputRefused, JobAnswered, JobsReported, StartTicket
from tests.manager.world import World, status


def switch_under_way(world: World) -> tuple[str, str, SwitchJob]:
    """The job that parks b and activates a is sent."""
    a, b = world.drained_switch()
    return a, b, world.job()


def test_a_seat_whose_pod_goes_while_it_is_parked_makes_room(world: World) -> None:
    a, b, job = switch_under_way(world)
    world.delete(b)
    assert world.managed(b).lease

    world.progress(job)

    assert (world.state(b), world.managed(b).lease) == (S.RELEASING, False)
    assert world.state(a) is S.ACTIVE


def test_a_seat_whose_pod_goes_before_it_is_activated_holds_what_the_job_gives_it(world: World) -> None:
    a, b, job = switch_under_way(world)
    world.delete(a)

    world.progress(job)
    world.traffic(b, waiting=1)

    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, True)
    assert world.state(b) is S.PARKED
    world.end_processes(a)
    assert world.state(b) is S.ACTIVATING


def test_a_seat_whose_pod_goes_and_is_not_restored_holds_nothing(world: World) -> None:
    a, _, job = switch_under_way(world)
    world.delete(a)

    world.progress(job, "parked", "started", done=False)
    assert world.managed(a).lease
    world.progress(job, "parked", "parked")

    assert not world.managed(a).lease


@pytest.mark.parametrize("at_once", [False, True], ids=["deleted before", "seen together"])
def test_a_ticket_that_may_still_be_used_keeps_the_group_of_a_deleted_pod(world: World, *, at_once: bool) -> None:
    first, second = world.seat(0, 0), world.seat(0, 1)
    world.at_gate(first, "a")
    world.at_gate(second, "b")
    if not at_once:
        world.delete(first)
        assert world.state(second) is S.WAITING

    world.shows(first, container_id="process://9", running=True, deleting=True)
    assert (world.state(first), world.managed(first).lease) == (S.RELEASING, True)
    world.vanish(first)
    assert world.state(second) is S.WAITING
    world.end_processes(first)

    assert world.state(first) is S.FREE
    assert [e.seat for e in world.effects if isinstance(e, StartTicket)] == [first, second]


def test_a_job_that_the_checkpointer_lost_is_sent_again(world: World) -> None:
    a, b, job = switch_under_way(world)
    world.receive(JobAnswered(job, JobReply(accepted=True)))

    effects = world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))

    assert [(e.op, e.epoch) for e in effects if isinstance(e, SwitchJob)] == [(job.op, job.epoch)]
    world.progress(job)
    assert (world.state(b), world.state(a)) == (S.PARKED, S.ACTIVE)


def test_a_lost_job_whose_only_seat_was_deleted_is_over(world: World) -> None:
    """Sent again, it would move no seat."""
    a, b = world.fill("a", "b")
    world.tick(10)
    world.command(ParkSeat, b)
    world.finish()
    assert world.state(b) is S.PARKED
    world.wish(a)
    job = world.journaled()
    assert (job.park, job.activate and job.activate.seat) == ((), a)
    world.delete(a)

    effects = world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))

    assert not [e for e in effects if isinstance(e, SwitchJob)]
    assert not world.node.switches
    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, True)


@pytest.mark.parametrize("answer_lost", [False, True])
def test_a_seat_that_cannot_be_killed_is_quarantined_until_its_processes_are_gone(
    world: World, *, answer_lost: bool
) -> None:
    """The checkpointer answers a kill that it knows with its status; the report of its end may be lost as well."""
    _, b, job = switch_under_way(world)
    world.progress(job, "lost", "pending")
    assert world.state(b) is S.LOST
    kill = world.last(KillJob)
    stuck = status(
        SwitchJob(cause="k", node="n1", epoch=kill.epoch, op="kill", group="kill", park=(kill.target,)), "quarantined"
    )
    if answer_lost:
        assert [e for e in world.receive(JobAnswered(kill, None)) if isinstance(e, KillJob)] == [kill]
        world.receive(JobAnswered(kill, JobReply(accepted=True, jobs=(stuck,))))
    else:
        world.receive(JobProgress(cause="k", node="n1", status=stuck))
    assert (world.state(b), world.managed(b).lease) == (S.QUARANTINED, True)
    assert world.managed(b).reason == "made quarantined"

    world.look_at(b, "gone")

    assert (world.state(b), world.managed(b).lease) == (S.BACKOFF, False)


def test_a_victim_that_goes_while_its_streams_are_cut_is_not_parked_any_more(world: World) -> None:
    a, b = world.draining()
    world.answered(b, 1)
    while world.state(b) is S.DRAINING:
        world.later(9.0)
    assert world.node.switches["G0"].phase == "cutting"

    world.delete(b)
    world.tick(3.0)

    assert (world.state(b), world.state(a)) == (S.RELEASING, S.PARKED)
    assert not any(isinstance(e, SwitchJob) and e.park and e.park[0].seat == b for e in world.effects)
    world.end_processes(b)
    assert world.state(a) is S.ACTIVATING


def test_a_deleted_seat_that_is_still_frozen_is_released_again(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.vanish(a)
    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, False)
    before = sum(isinstance(effect, ReleaseJob) for effect in world.effects)

    world.look_at(a, "parked")
    assert sum(isinstance(effect, ReleaseJob) for effect in world.effects) == before + 1
    world.look_at(a, "gone")

    assert world.state(a) is S.FREE


@pytest.mark.parametrize("answer", [True, False])
def test_a_report_about_a_job_that_was_never_sent_is_refused_and_counted(world: World, *, answer: bool) -> None:
    _, b = world.draining()
    switch = world.node.switches[world.managed(b).group.name]
    assert switch.phase == "draining"
    progress = SeatProgress(seat=b, pod_uid="uid-b", container_id="", outcome="parked")
    done = JobStatus(op=switch.op, epoch=switch.epoch, group=switch.group, park=(progress,), done=True)

    reply = JobReply(accepted=False, code="unsupported", jobs=(done,))
    job = SwitchJob(cause="c", node="n1", epoch=switch.epoch, op=switch.op, group=switch.group)
    effects = world.receive(JobAnswered(job, reply) if answer else JobProgress(cause="c", node="n1", status=done))

    assert world.state(b) is S.DRAINING
    assert (switch.phase, switch.job.journaled) == ("draining", False)
    assert world.node.refused == 1
    assert [switch.op in effect.text for effect in effects if isinstance(effect, InputRefused)] == [True]
