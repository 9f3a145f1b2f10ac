"""Seats whose engine kyb-run starts again inside its container: the container says nothing, evidence decides."""

import pytest

from kybernate.messages import JobProgress, ParkSeat
from kybernate.messages.jobs import Outcome
from kybernate.seat import WITHOUT_RUN, container_of, start_inside
from kybernate.seat import SeatState as S
from services.gpu_manager.core import view
from services.gpu_manager.core.facts import Process, Residence, Trigger
from services.gpu_manager.core.inputs import StartCalls, StartTicket
from services.gpu_manager.core.starts import INSIDE_SECONDS, KUBELET_SECONDS
from services.gpu_manager.ledger import Ledger
from tests.manager.test_recovery import restart
from tests.manager.world import World, status


def report(world: World, seat: str, outcome: Outcome, container: str = "") -> None:
    """The checkpointer's answer about the present start, or about another one."""
    world.look_at(seat, outcome, container_id=container or world.managed(seat).target().container_id)


def taken(world: World, seat: str) -> StartTicket:
    """kyb-run takes its ticket."""
    ticket = next(e for e in reversed(world.effects) if isinstance(e, StartTicket) and e.seat == seat)
    assert world.calls.pop(seat).call == ticket.call
    world.receive(StartCalls(dict(world.calls)))
    return ticket


def probed(world: World, seat: str) -> bool:
    return any(probe.seat == seat for probe in view.engine_probes(world.node))


@pytest.fixture
def waits(world: World) -> World:
    """Models a and b of backend restart on one group: b is active, a is parked, and its kyb-run waits at the gate."""
    a, b = world.fill("a", "b", backend="restart")
    world.call(a, inside=True)
    report(world, a, "gone")
    world.look()
    assert (world.state(a), world.managed(a).acts_as is S.WAITING, world.state(b)) == (S.PARKED, True, S.ACTIVE)
    return world


@pytest.fixture
def starts(waits: World) -> World:
    """b is parked for a, which has its ticket."""
    a, b = waits.seat(0, 0), waits.seat(0, 1)
    waits.traffic(a, waiting=1)
    waits.later(1.0, times=20)
    waits.quiet(b)
    waits.finish()
    waits.traffic(a)
    assert (waits.state(a), waits.state(b)) == (S.STARTING, S.PARKED)
    ticket = taken(waits, a)
    pod = waits.pods[a]
    assert ticket.container == start_inside(pod.container_id or "", ticket.call)
    assert waits.managed(a).durable.container_id == ticket.container
    return waits


@pytest.mark.parametrize("reads", [1, 5])
def test_a_call_from_inside_ends_nothing_and_has_the_checkpointer_asked(world: World, reads: int) -> None:
    """A container may say what it likes: its engine may run."""
    a, b = world.fill("a", "b", backend="restart")
    for seat, state in ((a, S.PARKED), (b, S.ACTIVE)):
        world.call(seat, inside=True)
        world.look(reads)
        assert (world.state(seat), seat in world.asked()) == (state, seat == b), "a has none"
    report(world, b, "active")
    assert world.state(b) is S.ACTIVE
    report(world, b, "gone")
    assert world.state(b) is not S.ACTIVE
    assert not world.managed(b).lease


def test_a_call_from_inside_counts_only_in_a_container_that_runs(waits: World) -> None:
    a = waits.seat(0, 0)
    waits.exit(a)
    before = len(waits.effects)
    waits.call(a, inside=True)
    waits.look(3)
    assert not any(isinstance(effect, StartTicket) for effect in waits.effects[before:])


def test_an_engine_that_kyb_run_starts_serves_in_the_container_that_runs(starts: World) -> None:
    a = starts.seat(0, 0)
    assert probed(starts, a), "its health is asked at once"
    assert a in starts.asked()
    container = starts.pods[a].container_id
    starts.look()
    assert starts.state(a) is S.STARTING, "the pods show the container as before"
    report(starts, a, "active")
    assert starts.managed(a).facts.alive
    starts.healthy(a)
    assert starts.state(a) is S.ACTIVE
    assert container_of(starts.managed(a).durable.container_id) == container
    starts.look()
    assert starts.state(a) is S.ACTIVE


def test_a_health_check_may_come_before_the_checkpointers_answer(starts: World) -> None:
    a = starts.seat(0, 0)
    starts.healthy(a)
    assert (starts.state(a), starts.managed(a).facts.alive, starts.managed(a).facts.waits) == (S.ACTIVE, True, False)


def test_a_ticket_of_kyb_run_is_not_over_before_it_may_have_started(starts: World) -> None:
    """No process yet: it may be about to start one. Late answers about the start before say nothing."""
    a = starts.seat(0, 0)
    report(starts, a, "gone")
    report(starts, a, "gone", container=starts.pods[a].container_id or "")
    starts.look()
    assert (starts.state(a), starts.managed(a).lease) == (S.STARTING, True)


def test_a_start_that_does_not_come_ends_its_quarantine(starts: World) -> None:
    """Without a process and a ticket nothing is left to be kept apart."""
    a = starts.seat(0, 0)
    starts.node.transition(starts.managed(a), Trigger.QUARANTINE, starts.now, reason="two seats seem to hold the group")
    starts.tick(INSIDE_SECONDS + 1)
    report(starts, a, "gone")
    assert (starts.state(a), starts.managed(a).lease) == (S.BACKOFF, False)


@pytest.mark.parametrize("answers", [False, True])
def test_a_start_that_does_not_come_ends_by_evidence_only(starts: World, answers: bool) -> None:
    """While the checkpointer is silent, or has not looked because of a job, its engine may load unseen."""
    a = starts.seat(0, 0)
    starts.wait(KUBELET_SECONDS + 1)
    starts.tick(1.0)
    report(starts, a, "started")
    assert (starts.state(a), starts.managed(a).lease) == (S.STARTING, True)
    if answers:
        report(starts, a, "gone")
    assert starts.managed(a).lease is not answers


def test_kyb_run_whose_answer_was_lost_gets_another_ticket_and_keeps_the_lease(starts: World) -> None:
    a = starts.seat(0, 0)
    first = starts.managed(a).durable.container_id
    starts.call(a, inside=True)
    starts.look(2)
    second = taken(starts, a).container
    assert second != first
    assert (starts.state(a), starts.managed(a).lease) == (S.STARTING, True)
    report(starts, a, "active", container=first)
    assert not starts.managed(a).facts.alive, "an answer about the start before"


def test_a_container_that_ends_with_a_ticket_of_kyb_run_frees_the_group(starts: World) -> None:
    a = starts.seat(0, 0)
    starts.tick(2.0)
    starts.shows(a, running=False, ended="exited with code 1", exited=float(starts.now.unix))
    assert (starts.state(a), starts.managed(a).lease) == (S.BACKOFF, False)


@pytest.mark.parametrize(("inside", "more"), [(True, ""), (False, f", {WITHOUT_RUN}")])
@pytest.mark.parametrize("seen_by", ["job", "pods", "checkpointer", "gate"])
def test_an_end_that_a_restart_made_is_no_exit_and_names_kyb_run_where_it_is_missing(
    world: World, inside: bool, more: str, seen_by: str
) -> None:
    (a,) = world.fill("a", backend="restart")
    world.shows(a, restarts_inside=inside)
    assert world.command(ParkSeat, a).accepted
    world.quiet(a)
    assert world.state(a) is S.PARKING
    if seen_by == "job":
        world.progress(world.job())
    elif seen_by == "pods":
        world.shows(a, running=False, ended="exited with code 137")
    elif seen_by == "checkpointer":
        report(world, a, "gone")
    else:
        world.call(a)
        world.look(2)
    facts = world.managed(a).facts
    assert (facts.state, facts.process, facts.residence) == (S.PARKED, Process.NONE, Residence.NOTHING)
    assert world.managed(a).reason == f"it is parked by restart{more}"
    assert not any(event.state is S.BACKOFF for event in world.events(a))


def test_an_engine_without_a_context_lives_on_where_a_restart_would_park_it_and_comes_back(world: World) -> None:
    """It fell back to the CPU. Before, its seat waited for ever for the end of its container, which nothing ends."""
    (a,) = world.fill("a", backend="restart")
    assert world.command(ParkSeat, a).accepted
    world.quiet(a)
    ended = status(world.job())
    parked = ended.park[0].model_copy(update={"no_context": True})
    world.receive(JobProgress(cause="job", node="n1", status=ended.model_copy(update={"park": (parked,)})))
    assert (world.state(a), world.managed(a).facts.process) == (S.PARKED, Process.RUNS)
    world.traffic(a, waiting=1)
    world.tick()
    world.finish()
    assert world.state(a) is S.ACTIVE


@pytest.mark.parametrize("backend", ["restart", "cuda"])
def test_an_exit_that_nobody_here_made_reads_as_what_it_is(world: World, backend: str) -> None:
    (a,) = world.fill("a", backend=backend)
    world.shows(a, running=False, ended="exited with code 137")
    assert (world.state(a), world.managed(a).reason) == (S.BACKOFF, "its container exited with code 137")


@pytest.mark.parametrize("seen", [False, True])
def test_a_pod_that_is_deleted_while_kyb_run_starts_holds_its_gpus_until_evidence_shows_nothing(
    starts: World, seen: bool
) -> None:
    """Its engine may run for as long as its grace lasts, longer than a start may take."""
    a = starts.seat(0, 0)
    starts.delete(a)
    assert (starts.state(a), a in starts.asked()) == (S.RELEASING, True)
    if seen:
        report(starts, a, "active")
    starts.tick(INSIDE_SECONDS + 60)
    starts.look()
    starts.tick(1.0)
    assert starts.managed(a).lease
    report(starts, a, "gone")
    starts.tick(1.0)
    assert not starts.managed(a).lease


# --- restarts of the manager ------------------------------------------------------------------------------------------


def test_a_manager_that_restarts_while_kyb_run_waits_finds_it_waiting(waits: World) -> None:
    """The pods show a container that runs, and the driver nothing."""
    a = waits.seat(0, 0)
    restart(waits, a="gone")
    waits.call(a, inside=True)
    waits.look(2)
    assert (waits.state(a), waits.state(waits.seat(0, 1))) == (S.PARKED, S.ACTIVE)


@pytest.mark.parametrize(("driver", "alive"), [("gone", False), ("active", True)])
def test_a_manager_that_restarts_while_kyb_run_starts_keeps_its_lease(starts: World, driver: str, alive: bool) -> None:
    a = starts.seat(0, 0)
    before = starts.managed(a).durable.container_id
    restart(starts, a=driver, b="gone")
    assert (starts.state(a), starts.managed(a).facts.alive) == (S.STARTING, alive)
    assert starts.managed(a).durable.container_id == before
    assert probed(starts, a)
    starts.look()
    starts.healthy(a)
    assert (starts.state(a), starts.managed(a).facts.waits) == (S.ACTIVE, False)


def test_a_manager_without_its_ledger_takes_what_runs_inside_for_what_it_is(starts: World) -> None:
    a = starts.seat(0, 0)
    starts.healthy(a)
    restart(starts, ledger=Ledger(), b="gone", gpus={"a": starts.managed(a).group.uuids})
    assert starts.managed(a).lease
    assert starts.state(a) is S.ACTIVE
    report(starts, a, "gone")
    assert not starts.managed(a).lease
