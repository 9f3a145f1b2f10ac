"""Reports of the checkpointer count for the pod and the container that they name, and prove only what they say."""

from dataclasses import replace
from typing import Any

import pytest

from kybernate.messages import JobProgress, JobReply, JobStatus, ReleaseJob, SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import JobAnswered
from tests.manager.test_mid_switch import switch_under_way
from tests.manager.test_recovery import restart
from tests.manager.world import World, booted, make_group, status


def report(world: World, found: JobStatus) -> None:
    world.receive(JobProgress(cause="c", node="n1", status=found))


def test_the_kill_of_a_pod_before_that_failed_quarantines_no_other_pod(world: World) -> None:
    """The checkpointer repeats its last reports after an outage of the bus."""
    _, b = world.fill("a", "b")
    restart(world, b="lost")
    target = world.managed(b).target()
    failed = SeatProgress(seat=b, pod_uid="uid-before", container_id="process://before", outcome="quarantined")
    kill = JobStatus(op=f"kill-{b}-1", epoch=1, group="G0", park=(failed,), done=True)

    report(world, kill)
    assert world.state(b) is S.LOST
    report(world, kill.model_copy(update={"park": (failed.model_copy(update={"pod_uid": target.pod_uid}),)}))

    assert world.state(b) is S.QUARANTINED


def test_a_park_under_way_leaves_the_lease_where_it_is(world: World) -> None:
    a, b, job = switch_under_way(world)

    world.progress(job, "started", "pending", done=False)

    assert (world.managed(a).lease, world.managed(b).lease) == (False, True)


def test_a_deleted_victim_holds_its_gpus_until_it_is_reported_parked(world: World) -> None:
    _, b, job = switch_under_way(world)
    world.delete(b)

    world.progress(job, "started", "pending", done=False)

    assert (world.state(b), world.managed(b).lease) == (S.RELEASING, True)


def test_a_job_that_names_another_container_of_the_incoming_seat_gives_it_no_lease(world: World) -> None:
    a, b, job = switch_under_way(world)
    found = status(job, "parked", "started", done=False)
    before = found.activate.model_copy(update={"container_id": "process://before"})

    report(world, found.model_copy(update={"activate": before}))
    assert (world.state(b), world.state(a), world.managed(a).lease) == (S.PARKED, S.PARKED, False)
    report(world, found)

    assert (world.state(a), world.managed(a).lease) == (S.ACTIVATING, True)


def test_the_end_of_the_pod_before_gives_no_lease_while_its_seat_holds_the_gpus(world: World) -> None:
    """Not known how this could happen; a lease beside a holder must not follow from it."""
    a, b = world.drained_switch()
    found = status(world.job(), "parked", "pending", done=False)
    victim = world.managed(b)
    victim.pod = replace(world.pods[b], uid="uid-next")

    report(world, found)

    assert (victim.lease, world.managed(a).lease) == (True, False)


@pytest.mark.parametrize("before", [{"pod_uid": "uid-before"}, {"container_id": "process://before"}], ids="".join)
def test_the_end_of_another_pods_or_containers_processes_frees_nothing(world: World, before: dict[str, Any]) -> None:
    (a,) = world.fill("a")
    world.delete(a)
    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, True)

    world.look_at(a, "gone", **before)
    world.tick(1)
    assert world.managed(a).lease
    world.look_at(a, "gone")

    assert not world.managed(a).lease


def test_an_activation_that_failed_counts_once(world: World) -> None:
    """The checkpointer reports the half, and then the job with the same half."""
    a, _, job = switch_under_way(world)

    world.progress(job, "parked", "parked", done=False)
    world.progress(job, "parked", "parked")
    world.progress(job, "parked", "parked")

    assert world.state(a) is S.PARKED
    assert (world.managed(a).backoff.activation.count, world.node.groups["G0"].backoff.count) == (1, 1)
    assert [event.state for event in world.events(a)].count(S.ACTIVATING) == 1


def test_the_end_of_another_container_ends_no_quarantine(world: World) -> None:
    _, b = world.fill("a", "b")
    restart(world, b="quarantined")
    assert world.state(b) is S.QUARANTINED

    world.look_at(b, "gone", container_id="process://before")
    assert (world.state(b), world.managed(b).lease) == (S.QUARANTINED, True)
    world.look_at(b, "gone")

    assert (world.state(b), world.managed(b).lease) == (S.BACKOFF, False)


def test_a_seat_that_is_killed_holds_its_gpus_until_its_processes_are_gone(world: World) -> None:
    _, b = world.fill("a", "b")
    restart(world, b="lost")
    assert (world.state(b), world.managed(b).lease) == (S.LOST, True)

    for outcome in ("lost", "parked", "quarantined"):
        world.look_at(b, outcome)
        world.tick(1)
        assert (world.state(b), world.managed(b).lease) == (S.LOST, True), outcome
    world.look_at(b, "gone")
    world.tick(1)

    assert not world.managed(b).lease


def test_a_call_does_not_end_a_process_that_the_pod_list_does_not_show(world: World) -> None:
    (a,) = world.fill("a")
    world.pods[a] = replace(world.pods[a], running=False)  # the list is stale
    restart(world, a="active")

    world.call(a)
    world.look(4)

    assert (world.state(a), world.managed(a).lease) == (S.ACTIVE, True)


def test_a_seat_that_its_job_has_restored_serves_although_a_new_container_of_its_victim_runs_beside_it() -> None:
    """The container came past the gate, to a slot that became free meanwhile."""
    world = booted(make_group("G0", [0], 3, slots=2))
    seats = world.fill("a", "b", "c", vram="20GiB")
    waits = next(seat for seat in seats if world.state(seat) is S.PARKED)
    world.tick(10)
    world.traffic(waits, waiting=1)
    victim = next(seat for seat in seats if world.state(seat) is S.DRAINING)
    other = next(seat for seat in seats if world.state(seat) is S.ACTIVE)
    world.quiet(victim)
    job = world.job()
    world.exit(other)
    world.exit(victim)
    world.shows(victim, container_id="process://99", running=True)
    assert (world.state(victim), world.managed(victim).lease) == (S.STARTING, True)

    world.progress(job, "gone", "active")

    assert (world.state(waits), world.managed(waits).lease) == (S.ACTIVE, True)


@pytest.mark.parametrize("ends", [True, False])
def test_the_answer_to_a_release_says_who_ends_the_processes(world: World, ends: bool) -> None:
    """Kubelet's signal waits where the checkpointer does: it must not meet a restored process."""
    a, _ = world.fill("a", "b")
    world.delete(a)
    job = world.last(ReleaseJob)
    assert world.managed(a).ended_here is None
    world.receive(JobAnswered(job, JobReply(accepted=True, ends=ends)))
    assert world.managed(a).ended_here is ends
