"""A ticket reserves its group until it is proven that no process comes of it, whatever becomes of the pod.

Seen when kubelet was killed with all its pods: the same seats went to new pods, and a call of a new one took a ticket
in the name of the one before.
"""

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate import files
from kybernate.messages import JobProgress, JobReply, JobStatus, KillJob, SeatActivated, SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.facts import Residence, Ticket
from services.gpu_manager.core.inputs import (
    ForeignProcessesSeen,
    JobsReported,
    Recovered,
    RecoveryBegun,
    SeatTicket,
    StartCalls,
    StartTicket,
    WallTime,
)
from services.gpu_manager.core.seat_pod import SeatPod
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import GateFiles
from tests.manager.world import GIB, World, booted, make_group


def given(world: World, seat: str, model: str) -> None:
    """Kubelet gives the seat to another pod; the pods were not read yet."""
    world.pods[seat] = SeatPod(seat, "default", model, f"uid-{model}", "engine", ip="127.0.0.9", annotations={})


def takes_its_ticket(world: World, seat: str) -> None:
    del world.calls[seat]
    world.receive(StartCalls(dict(world.calls)))


def look(world: World, times: int = 4) -> None:
    for _ in range(times):
        world.later(1)
        world.look()


def recovers(world: World, ledger: Ledger, found: tuple[SeatTicket, ...], seat: str, outcome: str) -> None:
    """A new manager reads this ledger and these tickets; the driver tells this about the container in the list."""
    pod = world.pods[seat]
    seen = SeatProgress(seat=seat, pod_uid=pod.uid, container_id=pod.container_id or "", outcome=outcome, keeper=False)
    (asked,) = world.question(ledger, tickets=found).targets
    assert (asked.pod_uid, asked.container_id) == (seen.pod_uid, seen.container_id)
    begun = RecoveryBegun(world.owners(), ledger, tickets=found)
    world.receive(Recovered(begun, JobReply(accepted=True, seats=(seen,))))


def calls_for_long(world: World, seat: str) -> None:
    world.call(seat)
    world.calls[seat] = replace(world.calls[seat], until=world.now.unix + 1e6)
    world.receive(StartCalls(dict(world.calls)))


def rival(world: World) -> str:
    """Another pod of the group waits at the gate all the time."""
    seat = world.seat(0, 1)
    world.pod(seat, "rival")
    calls_for_long(world, seat)
    return seat


def starting(world: World, model: str = "a") -> str:
    """Its ticket is taken, and its container not seen yet."""
    seat = world.seat(0, 0)
    world.at_gate(seat, model)
    takes_its_ticket(world, seat)
    assert world.state(seat) is S.STARTING
    return seat


def test_a_ticket_that_the_next_owner_of_the_seat_took_is_its_own(world: World, a: str) -> None:
    world.pod(a, "a")
    given(world, a, "b")
    world.call(a)
    (ticket,) = world.sent(StartTicket, a)
    assert ticket.pod_uid == "uid-a", "the gate does not know who calls"
    takes_its_ticket(world, a)
    other = rival(world)

    look(world)

    assert (world.state(a), world.managed(a).lease) == (S.STARTING, True)
    assert world.managed(a).pod == world.pods[a]
    world.pods[a] = replace(world.pods[a], container_id="process://77", running=True)
    look(world)
    world.healthy(a)
    assert world.state(a) in (S.ACTIVE, S.DRAINING)
    assert not world.sent(StartTicket, other)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pod_that_vanishes_with_a_ticket_holds_its_group_for_as_long_as_a_start_may_take(
    world: World, *, restarts: bool
) -> None:
    seat = starting(world)
    other = rival(world)
    del world.pods[seat]
    if restarts:
        world.next_manager()

    look(world)
    if restarts:
        world.next_manager()
        world.receive(StartCalls(dict(world.calls)))
        look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    world.wait(250)
    look(world)
    assert not world.sent(StartTicket, other)

    world.wait(20)
    look(world)
    assert world.state(seat) is S.FREE
    assert world.sent(StartTicket, other)


@pytest.mark.parametrize(("late", "restarts"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_next_owner_that_calls_itself_waits_for_the_ticket_before(
    world: World, *, late: bool, restarts: bool
) -> None:
    seat = starting(world)
    given(world, seat, "b")
    if late:
        look(world)
    if restarts:
        world.next_manager()
    calls_for_long(world, seat)
    before = len(world.sent(StartTicket, seat))

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING if late else S.RELEASING, True)
    assert len(world.sent(StartTicket, seat)) == before

    world.wait(280)
    look(world)
    assert world.state(seat) is S.STARTING
    assert world.sent(StartTicket, seat)[-1].pod_uid == "uid-b"


def test_a_call_of_the_next_owner_does_not_end_the_lease_of_a_pod_that_still_runs(world: World, a: str) -> None:
    world.serve(a, "a")
    other = rival(world)
    given(world, a, "b")
    world.call(a)
    look(world)

    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, True)
    assert not world.sent(StartTicket, other)
    assert len(world.sent(StartTicket, a)) == 1

    world.end_processes(a)
    look(world)
    assert len(world.sent(StartTicket, other)) + len(world.sent(StartTicket, a)) == 2, "one of them, with evidence"


def test_an_heir_that_is_deleted_proves_nothing_about_the_pod_that_took_the_ticket(world: World) -> None:
    seat = starting(world)
    given(world, seat, "b")
    look(world)
    assert world.managed(seat).facts.ticket is Ticket.FORMER
    other = rival(world)
    world.pods[seat] = replace(world.pods[seat], deleting=True)
    look(world)
    del world.pods[seat]

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    assert not world.sent(StartTicket, other)

    world.wait(270)
    look(world)
    assert world.state(seat) is S.FREE
    assert world.sent(StartTicket, other)


@pytest.mark.parametrize("vanished", [False, True])
@pytest.mark.parametrize("name", ["ticket.json", "ticket.taken.json"])
def test_a_start_under_way_survives_the_loss_of_the_ledger(
    world: World, tmp_path: Path, name: str, *, vanished: bool
) -> None:
    seat = starting(world)
    other = rival(world)
    (ticket,) = world.sent(StartTicket, seat)
    gate = GateFiles(tmp_path)
    (tmp_path / "seats" / seat).mkdir(parents=True)
    gate.write_ticket(replace(ticket, expires=WallTime(time.monotonic() + 270)))
    written = tmp_path / "seats" / seat / "ticket.json"
    written.rename(written.with_name(name))
    written = written.with_name(name)
    written.write_text(json.dumps({**json.loads(written.read_text()), "given": time.monotonic() - 100}))
    os.utime(written, (time.time() - 3600, time.time() - 3600))  # the clock of the day was set since
    if vanished:
        del world.pods[seat]
    found = recovery.open_tickets(Ledger(), gate.tickets(world.node.seats))

    world.next_manager(Ledger(), tickets=found)
    world.receive(StartCalls(dict(world.calls)))
    world.wait(260)  # as this manager counts: for how long kubelet had answered before, nothing tells
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING if vanished else S.STARTING, True)
    assert len(world.sent(StartTicket, other)) == 0

    world.wait(20)
    assert not world.managed(seat).lease
    assert world.sent(StartTicket, other)


def test_a_ticket_is_open_although_the_ledger_that_is_left_is_older(world: World, a: str) -> None:
    world.pod(a, "a", vram="30GiB")
    before = recovery.ledger(world.node, "")
    world.call(a)
    (ticket,) = world.sent(StartTicket, a)
    read = SeatTicket(a, ticket.call, ticket.pod_uid, ticket.epoch, vram_bytes=ticket.vram_bytes, age_seconds=5.0)

    found = recovery.open_tickets(before, (read,))
    ledger = recovery.with_tickets(before, found, world.owners())

    assert found == (read,)
    (entry,) = ledger.seats
    assert (entry.state, entry.lease, entry.pod, entry.epoch) == (S.STARTING, True, "default/a", ticket.epoch)
    assert entry.durable.vram_bytes == 30 * GIB
    assert ledger.epoch == ticket.epoch
    assert not recovery.open_tickets(recovery.ledger(world.node, ""), (read,))


def test_the_question_of_a_start_is_above_the_epoch_of_a_ticket(world: World) -> None:
    """The clock of the day was set back since."""
    seat = starting(world)
    (ticket,) = world.sent(StartTicket, seat)
    read = SeatTicket(seat, ticket.call, ticket.pod_uid, ticket.epoch, age_seconds=5.0)
    world.unix_offset = -3600.0

    assert world.question(Ledger(), tickets=(read,)).epoch > ticket.epoch


def test_the_ticket_of_a_seat_that_was_freed_is_not_open_again_after_a_restart(world: World) -> None:
    seat = starting(world)
    other = rival(world)
    (ticket,) = world.sent(StartTicket, seat)
    world.delete(seat)
    world.vanish(seat)
    assert (world.state(seat), len(world.sent(StartTicket, other))) == (S.FREE, 1)
    read = tuple(
        SeatTicket(t.seat, t.call, t.pod_uid, t.epoch, age_seconds=5.0)
        for t in (ticket, *world.sent(StartTicket, other))
    )

    assert recovery.open_tickets(recovery.ledger(world.node, ""), read) == ()


def test_a_start_is_not_given_up_while_kubelet_does_not_answer(world: World) -> None:
    """It is stopped, or cannot be read: the container that it was about to start may come when it goes on."""
    seat = starting(world)
    other = rival(world)

    world.tick(600)
    world.look()
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert not world.sent(StartTicket, other)

    world.wait(260)
    assert world.state(seat) is S.WAITING


def test_an_old_ticket_or_one_whose_container_runs_holds_nothing(world: World, a: str) -> None:
    world.serve(a, "a")
    young, old = (
        SeatTicket(a, "call-1", "uid-a", 1, age_seconds=10.0),
        SeatTicket(world.seat(0, 1), "call-2", "uid-b", 2, age_seconds=271.0),
    )

    assert recovery.open_tickets(Ledger(), (young, old)) == (young,)
    recovers(world, Ledger(), (young,), a, "active")
    assert (world.state(a), world.managed(a).facts.waits) == (S.ACTIVE, False)
    recovers(world, Ledger(), (young,), a, "parked")
    assert (world.state(a), world.managed(a).lease) == (S.PARKED, False)


def restarting(world: World) -> tuple[str, SeatPod]:
    """Its container has exited and may be on its way again; the pod as it was before that."""
    seat = world.seat(0, 0)
    world.serve(seat, "a")
    before = world.pods[seat]
    world.exit(seat)
    world.call(seat)
    takes_its_ticket(world, seat)
    assert world.state(seat) is S.STARTING
    return seat, before


@pytest.mark.parametrize("lost", [True, False])
def test_a_ticket_is_open_when_the_container_that_a_stale_list_shows_is_gone(world: World, *, lost: bool) -> None:
    """The list shows the container before the ticket; the driver decides."""
    seat, before = restarting(world)
    ledger = Ledger() if lost else recovery.ledger(world.node, "boot")
    exited, world.pods[seat] = world.pods[seat], before
    given = world.sent(StartTicket, seat)[-1]
    read = (SeatTicket(seat, given.call, given.pod_uid, given.epoch, age_seconds=5.0),)
    recovers(world, ledger, recovery.open_tickets(ledger, read), seat, "gone")
    other = rival(world)

    look(world)  # the list is still the old one
    world.pods[seat] = exited
    look(world)

    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert len(world.sent(StartTicket, other)) == 0
    world.pods[seat] = replace(exited, container_id="process://new", running=True)
    world.look()
    world.healthy(seat)
    assert (world.managed(seat).durable.container_id, world.managed(seat).lease) == ("process://new", True)
    assert isinstance(world.last(SeatActivated), SeatActivated)


def test_a_ticket_that_another_pod_of_a_stale_list_did_not_take_is_open(world: World) -> None:
    seat, before = restarting(world)
    world.pods[seat] = replace(before, uid="uid-before")
    given = world.sent(StartTicket, seat)[-1]
    read = (SeatTicket(seat, given.call, given.pod_uid, given.epoch, age_seconds=5.0),)

    recovers(world, Ledger(), read, seat, "gone")

    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    del world.pods[seat]
    world.wait(271)
    look(world)
    assert not world.managed(seat).lease


def test_a_call_that_has_ended_gets_no_ticket(world: World) -> None:
    seat, other = world.seat(0, 0), world.seat(0, 1)
    world.serve(seat, "a")
    world.at_gate(other, "b")
    world.tick(25)

    world.exit(seat)
    assert not world.sent(StartTicket, other), "kubelet does not wait for it any more"
    world.call(other)

    assert [ticket.call for ticket in world.sent(StartTicket, other)] == [world.calls[other].call]


def test_a_pod_that_is_missing_in_the_list_gets_no_ticket(world: World) -> None:
    seat, other = world.seat(0, 0), world.seat(0, 1)
    world.serve(seat, "a")
    world.at_gate(other, "b")
    waits = world.pods.pop(other)

    world.exit(seat)
    assert not world.sent(StartTicket, other)
    world.pods[other] = waits
    world.look()

    assert world.sent(StartTicket, other)


def test_a_call_whose_ticket_was_used_ends_no_container(world: World, a: str) -> None:
    """The plugin was killed before it removed the announcement of the call."""
    world.at_gate(a, "a")
    world.shows(a, container_id="process://9", running=True)
    world.healthy(a)

    for _ in range(4):
        world.receive(StartCalls(dict(world.calls)))
        world.look()

    assert (world.state(a), world.managed(a).lease) == (S.ACTIVE, True)
    assert len(world.sent(StartTicket, a)) == 1


def test_a_call_whose_ticket_is_taken_does_not_wait(tmp_path: Path) -> None:
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)
    (folder / "call.json").write_text('{"call": "call-1", "since": 1.0, "until": 26.0}')
    assert set(gate.calls(["s00"])) == {"s00"}

    (folder / "ticket.taken.json").write_text('{"call": "call-1", "seat": "s00"}')

    assert gate.calls(["s00"]) == {}


def test_a_full_disk_at_the_start_gate_ends_no_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder is a small tmpfs: without room for a text of a seat, switches of all seats go on."""
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(files, "replace", full)
        gate.write_ticket(StartTicket("s00", "call-1", "uid-a", 7, WallTime(time.monotonic() + 30)))
        gate.write_texts({"s00": "seat s00 waits"})
    assert [*folder.iterdir()] == []

    gate.write_texts({"s00": "seat s00 waits"})
    assert json.loads((folder / "status.json").read_text()) == {"text": "seat s00 waits"}


def test_a_change_within_one_step_of_the_file_systems_clock_is_seen(tmp_path: Path) -> None:
    """Folders are read again only where their time has changed, and two changes may have the same time."""
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)
    assert gate.calls(["s00", "unknown"]) == {}
    at = time.time_ns()
    os.utime(folder, ns=(at, at))
    assert gate.calls(["s00"]) == {}
    files.replace(folder / "call.json", '{"call": "call-1", "since": 1.0, "until": 26.0}', durable=False)
    os.utime(folder, ns=(at, at))
    assert gate.calls(["s00"])["s00"].call == "call-1"


def test_a_folder_is_read_again_when_a_file_of_it_is_replaced(tmp_path: Path) -> None:
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)
    for number in range(3):
        call = {"call": f"call-{number}", "since": 1.0, "until": 26.0}
        files.replace(folder / "call.json", json.dumps(call), durable=False)
        at = time.time_ns() - (10 - number) * 1_000_000_000
        os.utime(folder, ns=(at, at))
        for _ in range(2):
            assert gate.calls(["s00"])["s00"].call == f"call-{number}"
    (folder / "call.json").unlink()
    assert gate.calls(["s00"]) == {}


@pytest.mark.parametrize("stale", [False, True])
def test_a_job_of_the_container_before_a_ticket_takes_no_lease_of_the_start(world: World, *, stale: bool) -> None:
    """Its container was parked and brought back by a job when it exited, and kubelet starts it again."""
    seat, before = restarting(world)
    seen = SeatProgress(seat=seat, pod_uid="uid-a", container_id=before.container_id or "", outcome="started")
    comes = seen.model_copy(update={"outcome": "pending"})
    job = JobStatus(op="G0-1", epoch=1, group="G0", activate=comes)
    ledger, exited = recovery.ledger(world.node, "boot"), world.pods[seat]
    world.pods[seat] = before if stale else exited
    world.next_manager(ledger, seen, jobs=(job,))
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert world.managed(seat).facts.residence is Residence.VRAM, "the job tells of the container before"
    other = rival(world)
    world.receive(JobProgress(cause="j", node="n1", status=job.model_copy(update={"done": True})))

    look(world)
    world.pods[seat] = exited
    look(world)

    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert not world.sent(StartTicket, other)


# --- ledger and seat folders are both lost ----------------------------------------------------------------------------


def all_lost(world: World, *reports: SeatProgress, tickets: tuple[SeatTicket, ...] = ()) -> None:
    """A new manager knows nothing but the pods, these tickets, and what the driver tells."""
    world.next_manager(Ledger(lost=True), *reports, tickets=tickets)
    world.later(4)


@pytest.mark.parametrize("pool", [False, True])
def test_what_nothing_remembers_is_ended_and_starts_cold(*, pool: bool) -> None:
    """Where the driver has it, and how, does not matter: in a pool it may be anywhere."""
    world = booted(*(make_group(f"G{n}", [n], 3, rebalance=pool) for n in range(2)))
    a, b = world.fill("a", "b")
    other, idle = world.seat(0, 2), world.seat(1, 0)
    world.pod(other, "c")
    world.pod(idle, "d")
    seen = (world.seen(a, "parked", "GPU-0"), world.seen(b, "active", "GPU-0"))

    kept = tuple(SeatTicket(one, "over", "uid", 0, age_seconds=4000.0) for one in (other, idle))
    all_lost(world, *seen, tickets=kept)

    assert (world.state(a), world.state(b), world.state(idle)) == (S.LOST, S.LOST, S.WAITING)
    assert (len(world.sent(KillJob, a)), len(world.sent(KillJob, b))) == (1, 1)
    assert "seat folder has no ticket" in world.events(b)[-1].reason
    assert "seat folder has no ticket" in world.stage(b).text
    for seat in (other, idle):
        world.call(seat)
    look(world)
    assert not world.sent(StartTicket, other), "their processes may be there"
    assert bool(world.sent(StartTicket, idle)) is not pool
    for seat in (a, b):
        world.end_processes(seat)
    look(world)
    assert world.sent(StartTicket, other)
    assert world.sent(StartTicket, idle)


def test_without_any_memory_of_tickets_a_container_on_its_way_is_waited_for_and_ended(world: World) -> None:
    seat = starting(world)
    all_lost(world)
    other = rival(world)

    look(world, 250)
    assert not world.sent(StartTicket, other), "the container of the first may come"
    assert not world.sent(KillJob, seat)
    assert "also one on its way" in world.stage(other).text
    world.next_manager()
    world.receive(StartCalls(dict(world.calls)))
    look(world, 10)
    assert not world.sent(StartTicket, other), "the manager was restarted meanwhile"

    world.shows(seat, container_id="process://late", running=True)
    assert (world.state(seat), world.managed(seat).lease) == (S.LOST, True)
    assert [job.target.container_id for job in world.sent(KillJob, seat)] == ["process://late"]
    world.end_processes(seat)
    world.look()
    assert world.sent(StartTicket, other)


def test_a_container_that_came_while_no_manager_ran_is_ended(world: World) -> None:
    seat = starting(world)
    all_lost(world)
    world.pods[seat] = replace(world.pods[seat], container_id="process://late", running=True)

    world.next_manager()

    assert (world.state(seat), world.managed(seat).lease) == (S.LOST, True)
    assert [job.target.container_id for job in world.sent(KillJob, seat)] == ["process://late"]


@pytest.mark.parametrize(("outcome", "state"), [("active", S.ACTIVE), ("parked", S.PARKED), ("gone", S.LOST)])
def test_an_engine_that_the_record_before_the_last_one_knows_is_not_ended(world: World, outcome: str, state: S) -> None:
    """Where it is gone, another one may be on its way by a ticket of the last record."""
    (seat,) = world.fill("a")
    ledger = recovery.ledger(world.node, "boot").model_copy(update={"lost": True})
    recovers(world, ledger, (), seat, outcome)
    assert world.state(seat) is state


def test_an_engine_that_kyb_run_starts_by_a_ticket_that_nothing_remembers_is_ended(world: World) -> None:
    (seat,) = world.fill("a")
    gone = world.seen(seat, "gone", keeper=True)
    all_lost(world, gone)
    assert not world.sent(KillJob, seat)
    assert world.asked() == [seat]

    world.receive(JobsReported(JobReply(accepted=True, seats=(gone.model_copy(update={"outcome": "started"}),))))

    assert world.state(seat) is S.LOST
    assert [job.target.container_id for job in world.sent(KillJob, seat)] == [gone.container_id]


def test_a_container_that_did_not_come_is_waited_for_as_long_as_a_start_may_take(world: World) -> None:
    starting(world)
    all_lost(world)
    other = rival(world)

    world.tick(600)  # the pods cannot be read
    assert not world.sent(StartTicket, other)
    look(world, 271)

    assert world.sent(StartTicket, other)


def test_a_seat_that_calls_at_the_gate_is_not_waited_for(world: World) -> None:
    """Its container cannot be on its way. Two observations prove that it is not the call of another pod."""
    seat = starting(world)
    all_lost(world)
    world.call(seat)
    assert len(world.sent(StartTicket, seat)) == 1

    look(world, 2)

    assert len(world.sent(StartTicket, seat)) == 2


def test_a_pod_that_leaves_and_whose_folder_was_lost_holds_for_as_long_as_a_start_may_take(world: World) -> None:
    seat = starting(world)
    world.pods[seat] = replace(world.pods[seat], deleting=True)
    all_lost(world)
    other = rival(world)

    look(world, 250)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    assert not world.sent(StartTicket, other)
    look(world, 30)
    assert world.sent(StartTicket, other)


@pytest.mark.parametrize(
    ("exited", "used"),
    [(1.0, True), (-3.0, False), (0.0, False), (60.0, False), (None, False)],
    ids=["since the call", "before it", "in its second", "before the clock was set back", "none"],
)
def test_only_an_exit_since_the_call_proves_that_its_ticket_was_used(
    world: World, exited: float | None, used: bool
) -> None:
    """Seen beside an API server that was away: a neighbour in a crash loop kept its group for 200 s."""
    seat, other = starting(world), rival(world)
    begun = world.now.unix
    world.tick(20)
    at = None if exited is None else begun + exited
    world.pods[seat] = replace(world.pods[seat], container_id="process://6", ended="exited with code 1", exited=at)
    look(world)
    assert world.state(seat) is (S.BACKOFF if used else S.STARTING)
    assert ("exited with code 1" in world.managed(seat).reason, bool(world.sent(StartTicket, other))) == (used, used)


def test_the_exit_of_an_heirs_container_proves_nothing_about_the_former_owners_ticket(world: World) -> None:
    seat = starting(world)
    given(world, seat, "b")
    world.tick(1)
    world.look(2)
    assert world.managed(seat).facts.ticket is Ticket.FORMER
    world.tick(20)
    world.pods[seat] = replace(
        world.pods[seat], container_id="process://7", ended="exited with code 1", exited=world.now.unix - 1
    )
    look(world)
    assert world.managed(seat).facts.waits


@pytest.mark.parametrize("outcome", ["lost", "parked", "quarantined", "gone", "active"])
def test_a_late_answer_about_the_container_before_ends_no_ticket(world: World, outcome: str) -> None:
    """It hung while the checkpointer looked at it, exited, and is started again by a ticket."""
    seat = starting(world)
    world.shows(seat, container_id="process://7", running=True)
    world.exit(seat)
    world.call(seat)
    look(world)
    assert (world.state(seat), world.managed(seat).facts.waits) == (S.STARTING, True)

    world.look_at(seat, outcome)

    assert (world.managed(seat).facts.waits, world.managed(seat).facts.alive) == (True, False)


def test_a_container_before_a_ticket_is_on_no_gpu(world: World) -> None:
    """It was seen on another group's GPU, and has exited: to end it would end the start."""
    seat = starting(world)
    world.shows(seat, container_id="process://7", running=True)
    before = world.managed(seat).durable.container_id
    assert before in view.places(world.node)
    world.exit(seat)
    world.call(seat)
    look(world)

    world.receive(ForeignProcessesSeen((), {}, frozenset({(before, "GPU-2")})))

    assert (world.state(seat), before in view.places(world.node)) == (S.STARTING, False)
