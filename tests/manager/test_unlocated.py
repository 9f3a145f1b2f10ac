"""The ledger is lost, and a seat had moved within its pool: nothing is granted there before evidence names its GPUs."""

from dataclasses import replace

import pytest

from kybernate.messages import DrainNode, JobReply, JobStatus, KillJob, MigrateSeat, SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import JobsReported, SeatTicket, StartTicket
from services.gpu_manager.core.managed_seat import REHEARSAL
from services.gpu_manager.core.riders import host_memory
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.ledger import Ledger, LedgerEntry
from services.gpu_manager.publish import record
from tests.facts import COPY
from tests.manager.packed import make_packed
from tests.manager.world import GIB, World, booted, make_group, status

UNKNOWN = "quarantined"
"""What the checkpointer answers where the driver does not: no GPUs, no state."""


@pytest.fixture
def world() -> World:
    """G0, G1 and G2 are a pool; G01 shares GPUs with it, G34 is alone. a of G0 has moved to G1."""
    groups = tuple(make_group(f"G{n}", [n], 2, rebalance=True) for n in range(3))
    world = booted(*groups, make_group("G01", [0, 1], 1), make_group("G34", [3, 4], 2))
    world.fill("a", group=0)
    moved = world.managed(world.seat(0, 0))
    moved.group = moved.memory_on = world.groups[1]
    return world


def seen(world: World, seat: str, outcome: str, *gpus: str) -> SeatProgress:
    return world.seen(seat, outcome, *gpus, reason="the driver does not answer" if outcome == UNKNOWN else "")


def restarted(
    world: World,
    *evidence: SeatProgress,
    ledger: Ledger | None = None,
    jobs: tuple[JobStatus, ...] = (),
    tickets: tuple[SeatTicket, ...] = (),
) -> None:
    """A new manager with this ledger (None: it is lost) and this answer of the checkpointer."""
    known = (*world.used_tickets(), *tickets)
    world.next_manager(ledger or Ledger(lost=True), *evidence, jobs=jobs, tickets=known)
    world.later(4)


def lost(world: World) -> str:
    """The ledger is lost, and the driver does not answer about a."""
    a = world.seat(0, 0)
    restarted(world, seen(world, a, UNKNOWN))
    return a


def answer(world: World, *evidence: SeatProgress) -> None:
    world.receive(JobsReported(JobReply(accepted=True, seats=evidence)))
    world.tick(1)


def started(world: World, group: int, number: int = 0) -> bool:
    """Whether a container that comes now gets a ticket for this seat."""
    seat = world.seat(group, number)
    if seat not in world.pods:
        world.at_gate(seat, f"m-{group}-{number}")
    world.tick(300)  # longer than any container may be on its way
    world.beat()
    world.look()
    world.call(seat)
    world.tick(1)
    return bool(world.sent(StartTicket, seat))


@pytest.mark.parametrize(
    ("outcome", "gpus", "rebalance"),
    [*((one, (), "true") for one in (UNKNOWN, "active", "started", "lost")), ("active", ("GPU-7",), "true"),
     (UNKNOWN, (), "false")],
    ids=["unknown", "active", "started", "lost", "a GPU of no group", "opted out of moves since"],
)  # fmt: skip
def test_nothing_starts_on_the_pool_of_a_seat_whose_gpus_nothing_names(
    world: World, a: str, outcome: str, gpus: tuple[str, ...], rebalance: str
) -> None:
    world.annotate(a, rebalance=rebalance)
    restarted(world, seen(world, a, outcome, *gpus))

    assert world.managed(a).facts.unlocated
    assert not any(started(world, group) for group in (1, 2, 3))
    assert not started(world, 0, 1)
    assert started(world, 4), "a group outside the pool goes on"


def test_the_first_evidence_that_names_its_gpus_ends_that(world: World) -> None:
    a = lost(world)
    assert world.asked() == [a]
    for nothing in (UNKNOWN, "active"):
        answer(world, seen(world, a, nothing))
        assert (world.state(a), world.managed(a).facts.unlocated) == (S.QUARANTINED, True)

    answer(world, seen(world, a, "active", "GPU-1"))

    assert (world.state(a), world.managed(a).group.name, world.managed(a).lease) == (S.ACTIVE, "G1", True)
    assert not world.managed(a).facts.unlocated
    assert started(world, 0, 1), "its home is free"
    assert not started(world, 1), "its GPU is held by it"


@pytest.mark.parametrize("late", [False, True])
def test_a_seat_without_a_context_is_at_home(world: World, late: bool) -> None:
    """Ollama without a loaded model: the driver will never name a GPU of it."""
    (b,) = world.fill("b", group=2)
    idle = seen(world, b, "active").model_copy(update={"no_context": True})
    a = seen(world, world.seat(0, 0), "active", "GPU-1")

    restarted(world, seen(world, b, UNKNOWN) if late else idle, a)
    if late:
        assert world.managed(b).facts.unlocated
        answer(world, idle)

    assert (world.state(b), world.managed(b).group.name) == (S.ACTIVE, "G2")
    assert not world.managed(b).facts.unlocated
    assert started(world, 0, 1)


def test_evidence_about_another_container_ends_nothing(world: World) -> None:
    a = lost(world)

    answer(world, seen(world, a, "active", "GPU-1").model_copy(update={"container_id": "process://0"}))

    assert world.managed(a).facts.unlocated


@pytest.mark.parametrize("outcome", [UNKNOWN, "active"])
def test_a_seat_of_no_pool_is_at_home(world: World, outcome: str) -> None:
    (seat,) = world.fill("z", group=4)
    restarted(world, seen(world, seat, outcome), seen(world, world.seat(0, 0), "active", "GPU-1"))

    assert not world.managed(seat).facts.unlocated
    assert started(world, 2)


@pytest.mark.parametrize("ledger", ["kept", "without its last record"])
def test_the_ledger_tells_where_it_is_unless_its_last_record_may_lack(world: World, a: str, ledger: str) -> None:
    kept = recovery.ledger(world.node, "boot").model_copy(update={"lost": ledger != "kept"})

    restarted(world, seen(world, a, UNKNOWN), ledger=kept)

    assert world.managed(a).facts.unlocated == (ledger != "kept")
    assert world.managed(a).group.name == "G1"
    assert started(world, 2) == (ledger == "kept")


def old(world: World, state: S, container: str = "") -> Ledger:
    """A ledger without its last record, where a is in this state, with an earlier ``container``."""
    kept = recovery.ledger(world.node, "boot")

    def entry(one: LedgerEntry) -> LedgerEntry:
        durable = replace(one.durable, container_id=container or one.durable.container_id)
        return one.model_copy(update={"state": state, "lease": state is not S.PARKED, "on": (), "durable": durable})

    return kept.model_copy(update={"lost": True, "seats": tuple(map(entry, kept.seats))})


@pytest.mark.parametrize("container", ["", "process://before"])
def test_a_seat_that_started_when_an_old_ledger_was_written_may_have_moved_since(world: World, container: str) -> None:
    a = world.seat(0, 0)
    ledger = old(world, S.STARTING, container)

    for answers in ((), (seen(world, a, UNKNOWN),)):
        restarted(world, *answers, ledger=ledger)
        assert (world.state(a), world.managed(a).facts.unlocated) == (S.QUARANTINED, True)
    assert "the ledger nor the driver" in world.managed(a).reason
    assert not started(world, 1)

    restarted(world, seen(world, a, "active", "GPU-1"), ledger=ledger)
    assert (world.managed(a).group.name, world.managed(a).facts.unlocated) == ("G1", False)
    assert not started(world, 1)


def test_a_seat_with_a_ticket_younger_than_an_old_ledger_starts_at_home(world: World, a: str) -> None:
    ledger = old(world, S.BACKOFF)
    pod = world.pods[a] = replace(world.pods[a], running=False)
    ticket = SeatTicket(seat=a, pod_uid=pod.uid, epoch=ledger.epoch + 1, call="c", vram_bytes=0, age_seconds=1.0)

    restarted(world, ledger=ledger, tickets=(ticket,))

    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G0")
    assert not world.managed(a).facts.unlocated


def test_a_ticket_that_outlived_the_ledger_is_not_given_again_beside_a_seat_that_is_found_there_later(
    world: World,
    a: str,
    b: str,
) -> None:
    world.pod(b, "b")
    ticket = SeatTicket(seat=b, pod_uid=world.pods[b].uid, epoch=1, call="c", vram_bytes=0, age_seconds=100.0)
    restarted(world, seen(world, a, UNKNOWN), tickets=(ticket,))
    answer(world, seen(world, a, "active", "GPU-0"))
    assert world.state(b) is S.STARTING

    world.call(b)
    world.look(2)

    assert not world.sent(StartTicket, b)
    assert "it gets no other ticket: a holds group G0 and is quarantined" in world.stage(b).text
    world.wait(300)
    for _ in range(2):
        answer(world, seen(world, a, "active", "GPU-0"))
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.WAITING)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_seat_that_comes_back_from_a_group_that_nothing_tells_serves_or_starts_cold(
    world: World, a: str, arrives: bool
) -> None:
    back = seen(world, a, "started")
    job = JobStatus(op="op-1", epoch=1, group="G0", activate=back)
    restarted(world, back, ledger=old(world, S.PARKED), jobs=(job,))
    assert (world.state(a), world.managed(a).facts.unlocated) == (S.QUARANTINED, True)

    now = seen(world, a, "active", "GPU-0") if arrives else seen(world, a, "parked")
    done = job.model_copy(update={"activate": now.model_copy(update={"gpus": ()}), "done": True})
    world.receive(JobsReported(JobReply(accepted=True, jobs=(done,), seats=(now,))))

    assert world.state(a) is (S.ACTIVE if arrives else S.LOST)


@pytest.mark.parametrize(
    ("outcome", "group", "container", "state"),
    [
        ("started", "G0", "", S.STARTING),
        ("started", "G1", "", S.STARTING),
        ("lost", "G0", "", S.LOST),
        (UNKNOWN, "G0", "process://before", S.QUARANTINED),
    ],
    ids=["at home", "elsewhere", "lost", "of another container"],
)
def test_a_seat_in_its_rehearsal_is_on_the_group_of_that_job(
    world: World, a: str, outcome: str, group: str, container: str, state: S
) -> None:
    """One of another container tells nothing, and none revives a lost seat."""
    rehearsed = seen(world, a, "started")
    rehearsed = rehearsed.model_copy(update={"container_id": container or rehearsed.container_id})
    job = JobStatus(op=f"{REHEARSAL}1", epoch=1, group=group, park=(rehearsed,))

    restarted(world, seen(world, a, outcome), jobs=(job,))

    assert world.state(a) is state
    assert world.managed(a).facts.unlocated is (state is not S.STARTING)
    assert state is not S.STARTING or world.managed(a).group.name == group


def test_a_seat_that_was_being_moved_may_be_on_either_group(world: World, a: str) -> None:
    kept = recovery.ledger(world.node, "boot")
    entries = tuple(entry.model_copy(update={"state": S.MIGRATING}) for entry in kept.seats)

    restarted(world, seen(world, a, UNKNOWN), ledger=kept.model_copy(update={"seats": entries}))

    assert world.managed(a).facts.unlocated


def test_that_its_group_is_unknown_survives_another_restart(world: World) -> None:
    a = lost(world)
    again = Ledger.model_validate_json(recovery.ledger(world.node, "boot").model_dump_json())

    restarted(world, seen(world, a, UNKNOWN), ledger=again)
    assert not started(world, 1)
    restarted(world, seen(world, a, "active", "GPU-1"), ledger=recovery.ledger(world.node, "boot"))
    assert not world.managed(a).facts.unlocated
    answer(world, seen(world, a, "active", "GPU-1"))

    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G1")


def test_a_copy_whose_gpus_nothing_names_is_not_restored(world: World) -> None:
    a = lost(world)

    answer(world, seen(world, a, "parked"))

    assert world.state(a) is S.LOST
    assert world.last(KillJob).target.seat == a
    assert not started(world, 1), "until it has ended"
    world.end_processes(a)
    world.tick(1)
    assert (world.state(a), world.managed(a).facts.unlocated) == (S.WAITING, False)
    assert started(world, 1)


def test_a_copy_that_cannot_be_ended_is_killed_once(world: World) -> None:
    a = lost(world)
    answer(world, seen(world, a, "parked"))
    failed = seen(world, a, UNKNOWN).model_copy(update={"reason": "it does not end; delete its pod"})
    status = JobStatus(op="kill-a", epoch=world.managed(a).epoch, group="G0", park=(failed,), done=True)
    world.receive(JobsReported(JobReply(accepted=True, jobs=(status,))))
    kills = sum(isinstance(effect, KillJob) for effect in world.effects)

    answer(world, seen(world, a, "parked"))

    assert (world.state(a), world.managed(a).reason) == (S.QUARANTINED, failed.reason)
    assert sum(isinstance(effect, KillJob) for effect in world.effects) == kills
    assert not started(world, 1)
    world.end_processes(a)
    assert started(world, 1)


@pytest.mark.parametrize(("group", "gpus"), [(2, ("GPU-2",)), (4, ("GPU-3", "GPU-4"))], ids=["pool", "alone"])
def test_a_copy_that_is_found_late_keeps_as_much_memory_as_one_that_is_found_at_the_start(
    world: World, group: int, gpus: tuple[str, ...]
) -> None:
    """Else a start beside it, on GPUs that seats share, finds no memory."""
    (seat,) = world.fill("v", group=group, vram="40GiB")
    restarted(world, seen(world, seat, UNKNOWN))

    answer(world, seen(world, seat, "parked", *gpus))

    assert world.state(seat) is S.PARKED
    assert world.managed(seat).durable.residue_bytes == 4 * GIB


def test_a_copy_that_is_found_late_is_on_the_account_of_host_memory(world: World) -> None:
    (seat,) = world.fill("v", group=2)
    restarted(world, seen(world, seat, UNKNOWN))

    answer(world, seen(world, seat, "parked", "GPU-2").model_copy(update={"vram_bytes": 30 * GIB}))

    assert world.managed(seat).durable.vram_bytes == 30 * GIB
    assert host_memory.account(world.managed(seat)).taken_bytes >= 30 * GIB


def test_its_pod_can_be_deleted_and_the_pool_waits_for_its_processes(world: World) -> None:
    a = lost(world)
    uid = world.pods[a].uid
    world.delete(a)
    assert (world.state(a), world.managed(a).facts.unlocated) == (S.RELEASING, True)
    assert not started(world, 1)
    gone = seen(world, a, "gone")
    del world.pods[a]
    world.receive(Owners(tuple(world.pods.values()), frozenset({uid})))
    assert not started(world, 1)

    answer(world, gone)
    assert started(world, 1)


def test_a_deleted_pod_whose_gpus_nothing_names_keeps_the_pool(world: World, a: str) -> None:
    world.pods[a] = replace(world.pods[a], deleting=True)

    restarted(world, seen(world, a, UNKNOWN))

    assert world.state(a) is S.RELEASING
    assert not started(world, 1)
    answer(world, seen(world, a, "active", "GPU-1"))
    assert (world.state(a), world.managed(a).group.name) == (S.RELEASING, "G1")
    assert started(world, 2)


def test_it_is_in_nobodys_way_where_it_only_may_be(world: World, a: str, b: str) -> None:
    """Its home is held by another one that the driver lists: no conflict, since it is elsewhere."""
    world.serve(b, "b")

    restarted(world, seen(world, a, UNKNOWN), seen(world, b, "active", "GPU-0"))
    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.ACTIVE)
    assert not world.managed(a).facts.conflict
    answer(world, seen(world, a, "active", "GPU-1"))

    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.ACTIVE)


def test_evidence_that_names_a_group_that_is_held_contradicts_itself(world: World, a: str, b: str) -> None:
    world.serve(b, "b")
    restarted(world, seen(world, a, UNKNOWN), seen(world, b, "active", "GPU-0"))

    answer(world, seen(world, a, "active", "GPU-0"))

    assert (world.state(a), world.managed(a).facts.conflict) == (S.QUARANTINED, True)
    assert "no room beside b;" in world.managed(a).reason


@pytest.mark.parametrize("outcome", ["deleted", "lost"])
def test_a_seat_that_is_ending_and_is_found_on_a_held_group_is_no_bug(world: World, outcome: str) -> None:
    """The world asserts that no invariant is broken."""
    a, b = world.seat(0, 0), world.seat(0, 1)
    world.serve(b, "b")
    if outcome == "deleted":
        world.pods[a] = replace(world.pods[a], deleting=True)
    state = UNKNOWN if outcome == "deleted" else "lost"
    restarted(world, seen(world, a, state), seen(world, b, "active", "GPU-0"))
    ending = world.state(a)

    answer(world, seen(world, a, state, "GPU-0"))
    assert (world.state(a), world.managed(a).facts.conflict) == (ending, True)

    world.end_processes(a)
    assert not world.managed(a).facts.conflict or world.state(a) is S.RELEASING


@pytest.mark.parametrize("ending", ["deleted", "lost"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_copy_that_ends_and_is_found_late_reserves_only_what_it_keeps(ending: str, measured: bool) -> None:
    """a was being moved to G1, where its lease reserved 50 GiB, and is still on G0, where b has 50 of 80 GiB."""
    packed = [make_packed(f"G{n}", [n], 2) for n in range(2)]
    movable = [replace(one, profile=one.profile.model_copy(update={"rebalance": True})) for one in packed]
    world = booted(*movable)
    a, b = world.fill("a", "b", vram="50GiB")
    world.order(MigrateSeat, seat=a, to="G1")
    world.managed(a).durable.measured = measured
    ledger = recovery.ledger(world.node, "").model_copy(update={"lost": True})
    world.pods[a] = replace(world.pods[a], deleting=ending == "deleted")
    restarted(world, seen(world, a, "lost" if ending == "lost" else UNKNOWN), seen(world, b, UNKNOWN), ledger=ledger)
    assert world.managed(a).lease
    state = world.state(a)

    answer(
        world, seen(world, a, "parked", "GPU-0"), seen(world, b, "active", "GPU-0")
    )  # the world asserts that it fits

    assert (world.state(a), world.managed(a).group.name, world.managed(a).lease) == (state, "G0", False)
    assert (world.state(b), world.managed(b).lease) == (S.ACTIVE, True)
    assert world.managed(a).durable.residue_bytes == (0 if measured else 5 * GIB)


def test_a_copy_with_an_open_ticket_keeps_its_lease_when_it_is_found(world: World) -> None:
    """A container may come of the ticket, beside the copy of the one before."""
    (seat,) = world.fill("v", group=2)
    ledger = recovery.ledger(world.node, "").model_copy(update={"lost": True})
    ticket = SeatTicket(seat, "call-9", world.pods[seat].uid, ledger.epoch + 1, age_seconds=10.0)
    world.pods[seat] = replace(world.pods[seat], running=False, deleting=True)
    restarted(world, seen(world, seat, UNKNOWN), ledger=ledger, tickets=(ticket,))
    assert world.managed(seat).facts.unlocated

    answer(world, seen(world, seat, "parked", "GPU-2"))

    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)


def test_the_seats_of_an_adopted_switch_are_where_it_has_them(world: World, a: str, b: str) -> None:
    world.managed(a).group = world.managed(a).memory_on = world.groups[0]
    world.pod(b, "b")
    world.tick(10)
    world.traffic(b, waiting=1)
    world.call(b)
    world.quiet(a)
    job = world.job()

    restarted(world, seen(world, a, "started"), jobs=(status(job, "started", "pending", done=False),))

    assert (world.state(a), world.managed(a).group.name, world.managed(a).reason) == (S.PARKING, "G0", "")
    assert not world.managed(a).facts.unlocated


def test_operators_learn_why_and_what_to_do(world: World) -> None:
    a, c = world.seat(0, 0), world.seat(2, 0)
    world.serve(c, "c")
    restarted(world, seen(world, a, UNKNOWN), seen(world, c, "active", "GPU-2"))
    waiting = world.seat(2, 1)
    world.at_gate(waiting, "w")
    world.tick(1)

    assert "delete its pod" in world.stage(a).text
    assert "the driver does not answer" in world.stage(a).text
    stage = world.stage(waiting)
    assert (stage.stage, "delete the pod default/a" in stage.text) == ("unlocated-seat", True)
    assert "delete the pod" in record(world.node, world.managed(waiting), world.now).blocked
    refused = world.order(MigrateSeat, seat=c, to="G1")
    assert (refused.code, "delete the pod" in refused.reason) == ("blocked", True)


def test_the_drain_of_a_group_waits_for_a_seat_that_may_be_there(world: World) -> None:
    a = lost(world)

    world.order(DrainNode, group="G2")
    world.tick(1)
    assert world.ordered("G2").outcome == ""

    answer(world, seen(world, a, "active", "GPU-1"))
    assert world.ordered("G2").outcome == "done"


def test_a_seat_whose_pod_is_deleted_before_its_move_holds_the_group_to_which_the_job_brings_it(world: World) -> None:
    a = world.seat(0, 0)
    world.look_at(a, "active")
    node_seat = world.managed(a)
    node_seat.group = node_seat.memory_on = world.groups[0]
    node_seat.know(COPY)
    c = world.seat(2, 0)
    world.serve(c, "c")
    world.order(MigrateSeat, seat=a, to="G2")
    world.quiet(c)
    job = world.job()
    assert (job.group, job.activate and job.activate.seat) == ("G2", a)
    world.delete(a)

    world.receive(JobsReported(JobReply(accepted=True, jobs=(status(job, "parked", "started", done=False),))))

    assert (world.state(a), world.managed(a).lease, world.managed(a).group.name) == (S.RELEASING, True, "G2")
