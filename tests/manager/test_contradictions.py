"""Evidence that contradicts itself, case by case: pods, driver, ledger and jobs say different things about one seat."""

from dataclasses import replace

import pytest

from kybernate.messages import JobReply
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.inputs import JobAnswered, JobsReported, StartTicket
from services.gpu_manager.ledger import Ledger
from tests.manager.test_mid_switch import switch_under_way
from tests.manager.test_recovery import restart
from tests.manager.world import World, pooled, status


def ledger_of(world: World) -> Ledger:
    return recovery.ledger(world.node, "boot")


def again(world: World, seat: str, *, restarts: int = 0) -> None:
    """The seat's container exits, and another one runs in its place and is healthy."""
    world.exit(seat)
    world.tick(1)
    world.call(seat)
    world.finish()
    world.pods[seat] = replace(world.pods[seat], restarts=restarts)
    world.start(seat)
    world.healthy(seat)


def test_2_with_the_ledger_lost_a_process_holds_where_the_driver_has_it(world: World) -> None:
    a, b = world.fill("a", "b")

    restart(world, ledger=Ledger(lost=True), a="parked", b="active", gpus={"b": ("GPU-0",)})

    assert [(world.state(seat), world.managed(seat).lease) for seat in (a, b)] == [(S.PARKED, False), (S.ACTIVE, True)]


def test_3_a_seat_of_an_older_ledger_is_parked_where_the_driver_has_it_or_starts_cold() -> None:
    """It may have moved since, and the ledger's group is that of the container before."""
    for gpus, state in ((("GPU-1",), S.PARKED), ((), S.LOST)):
        world = pooled()
        (a,) = world.fill("a")
        old = ledger_of(world)
        again(world, a)

        restart(world, ledger=old, a="parked", gpus={"a": gpus})

        assert world.state(a) is state
        assert state is S.LOST or world.managed(a).group.name == "G1"


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        ("active", S.STARTING),
        ("parked", S.PARKED),
        ("gone", S.BACKOFF),
        ("lost", S.LOST),
        ("quarantined", S.QUARANTINED),
    ],
)
def test_3_the_driver_is_asked_about_an_engine_that_does_not_become_healthy(
    world: World, driver: str, state: S
) -> None:
    _, b = world.fill("a", "b")
    old = ledger_of(world)
    again(world, b)
    restart(world, ledger=old, b="pending")
    assert (world.state(b), world.asked()) == (S.STARTING, [])

    asks = 0
    for _ in range(70):
        world.tick(1)
        asks += world.asked() == [b]
    assert asks == 1
    world.look_at(b, driver, keeper=False)

    assert world.state(b) is state


def test_3_a_rehearsal_under_way_is_not_taken_for_a_seat_that_is_parked(world: World, a: str) -> None:
    world.loads(a, "a", backend="vllm")
    world.healthy(a)
    assert world.managed(a).rehearsal is not None

    world.look_at(a, "parked")

    assert (world.state(a), world.managed(a).lease) == (S.STARTING, True)


def test_3_a_copy_that_the_pods_do_not_show_is_kept_until_it_is_gone(world: World) -> None:
    a, _ = world.fill("a", "b")
    shown = world.pods[a]
    world.pods[a] = replace(shown, running=False)  # the list is stale

    restart(world, a="parked")
    world.look()

    assert world.state(a) is S.PARKED
    assert world.asked() == [a]
    world.pods[a] = shown
    world.look()
    assert (world.state(a), world.asked()) == (S.PARKED, [])
    world.exit(a)
    assert world.state(a) is S.BACKOFF


def test_3_evidence_about_another_container_tells_nothing_at_a_start(world: World) -> None:
    (a,) = world.fill("a")
    kept, found = ledger_of(world), world.seen(a, "parked")
    again(world, a)  # after the question, so that its answer is about the container before

    world.next_manager(kept, found)

    assert (world.state(a), world.managed(a).lease) == (S.STARTING, True)


@pytest.mark.parametrize("adopted", [False, True])
def test_4_a_job_whose_report_was_lost_is_asked_about(world: World, *, adopted: bool) -> None:
    a, b, job = switch_under_way(world)
    if adopted:
        restart(world, jobs=(status(job, "started", "pending", done=False),))
    else:
        world.receive(JobAnswered(job, JobReply(accepted=True)))
    world.tick(2)

    questions = view.checkpointer_questions(world.node, world.now, world.now.wall)

    assert [question.ops for question in questions] == [(job.op,)]
    world.receive(JobsReported(JobReply(accepted=True, jobs=(status(job),)), asked=(job.op,)))
    assert (world.state(b), world.state(a)) == (S.PARKED, S.ACTIVE)


def test_6_a_call_of_a_seat_that_serves_is_a_reason_to_ask_whether_its_container_has_ended(world: World) -> None:
    """The API server is away, so that no read of the pods shows it."""
    a, b = world.fill("a", "b")
    world.tick(1)
    assert world.asked() == []

    world.call(b)

    assert world.asked() == [b]
    tickets = [effect for effect in world.effects if isinstance(effect, StartTicket)]
    world.end_processes(b)
    assert (world.state(b), world.managed(b).lease) == (S.BACKOFF, False)
    world.tick(5)
    world.call(b)
    assert world.state(b) is S.BACKOFF, "whose call it is, the next read of the pods tells"
    world.beat()
    world.traffic(a, waiting=1)
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE, "other seats go on"
    assert [effect for effect in world.effects if isinstance(effect, StartTicket)] == tickets

    world.look()
    assert world.state(b) is S.WAITING


@pytest.mark.parametrize("outcome", ["active", "parked"])
def test_6_a_call_ends_no_container_that_the_driver_has(world: World, outcome: str) -> None:
    _, b = world.fill("a", "b")
    world.call(b)

    world.look_at(b, outcome)

    assert (world.state(b), world.managed(b).lease) == (S.ACTIVE, True)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("restarted", [False, True])
def test_7_pods_that_went_back_end_no_container(world: World, *, restarted: bool, running: bool) -> None:
    _, b = world.fill("a", "b")
    first = replace(world.pods[b], running=running)
    again(world, b, restarts=1)
    second, container = world.pods[b], world.managed(b).durable.container_id
    world.pods[b] = first  # the API server's store was restored from a snapshot

    if restarted:
        restart(world, b="active")
    world.look()

    assert (world.state(b), world.managed(b).lease) == (S.ACTIVE, True)
    assert world.managed(b).durable.container_id == container
    assert world.asked() == [b]
    world.pods[b] = second
    world.look()
    assert (world.state(b), world.asked()) == (S.ACTIVE, [])


def test_7_a_count_of_restarts_that_began_anew_costs_a_question(world: World) -> None:
    _, b = world.fill("a", "b")
    again(world, b, restarts=3)
    world.shows(b, container_id="process://next", restarts=0)
    assert world.state(b) is S.ACTIVE

    world.end_processes(b)
    assert world.state(b) is S.BACKOFF
    world.look()

    assert (world.state(b), world.managed(b).durable.container_id) == (S.STARTING, "process://next")


def test_a_seat_that_is_being_killed_is_asked_about_until_it_is_gone(world: World) -> None:
    _, b = world.fill("a", "b")
    restart(world, b="lost")
    assert (world.state(b), world.asked()) == (S.LOST, [b])

    world.end_processes(b)

    assert world.asked() == []
