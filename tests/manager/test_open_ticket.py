"""A ticket reserves its group until it is proven that no process comes of it, whatever becomes of the pod.

Seen when kubelet was killed with all its pods: the same seats went to new pods, and a call of a new one took a ticket
in the name of the one before.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate import files
from kybernate.messages import JobReply
from kybernate.seat import SeatState as S
from services.gpu_manager import recovery
from services.gpu_manager.inputs import BusChanged, Recovered, SeatTicket, StartCalls, StartTicket
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import GateFiles
from services.gpu_manager.seat_pod import SeatPod
from tests.manager.world import GIB, World


@pytest.fixture
def world() -> World:
    world = World()
    world.boot()
    return world


def tickets(world: World, seat: str) -> list[StartTicket]:
    return [effect for effect in world.effects if isinstance(effect, StartTicket) and effect.seat == seat]


def given(world: World, seat: str, model: str) -> None:
    """Kubelet gives the seat to another pod; the pods were not read yet."""
    world.pods[seat] = SeatPod(
        seat, "kyb.ai/x", "default", model, f"uid-{model}", "engine", ip="127.0.0.9", annotations={}
    )


def takes_its_ticket(world: World, seat: str) -> None:
    del world.calls[seat]
    world.receive(StartCalls(dict(world.calls)))


def look(world: World, times: int = 4) -> None:
    for _ in range(times):
        world.tick(1)
        world.beat()
        world.look()


def rival(world: World) -> str:
    """Another pod of the group waits at the gate all the time."""
    seat = world.seat(0, 1)
    world.pod(seat, "rival")
    world.call(seat)
    world.calls[seat] = replace(world.calls[seat], until=world.now.unix + 1e6)
    world.receive(StartCalls(dict(world.calls)))
    return seat


def starting(world: World, model: str = "a") -> str:
    """Its ticket is taken, and its container not seen yet."""
    seat = world.seat(0, 0)
    world.pod(seat, model)
    world.call(seat)
    takes_its_ticket(world, seat)
    assert world.state(seat) is S.STARTING
    return seat


def test_a_ticket_that_the_next_owner_of_the_seat_took_is_its_own(world: World) -> None:
    seat = world.seat(0, 0)
    world.pod(seat, "a")
    given(world, seat, "b")
    world.call(seat)
    (ticket,) = tickets(world, seat)
    assert ticket.pod_uid == "uid-a", "the gate does not know who calls"
    takes_its_ticket(world, seat)
    other = rival(world)

    look(world)

    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert world.managed(seat).pod == world.pods[seat]
    world.pods[seat] = replace(world.pods[seat], container_id="process://77", running=True)
    look(world)
    world.healthy(seat)
    assert world.state(seat) in (S.ACTIVE, S.DRAINING)
    assert not tickets(world, other)


def test_a_pod_that_vanishes_with_a_ticket_holds_its_group_for_as_long_as_a_start_may_take(world: World) -> None:
    seat = starting(world)
    other = rival(world)
    del world.pods[seat]

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    world.tick(250)
    look(world)
    assert not tickets(world, other)

    world.tick(20)
    look(world)
    assert world.state(seat) is S.FREE
    assert tickets(world, other)


def test_a_pod_that_was_seen_in_deletion_has_no_process_once_it_is_gone(world: World) -> None:
    seat = starting(world)
    other = rival(world)
    world.pods[seat] = replace(world.pods[seat], deleting=True)
    look(world)
    assert not tickets(world, other), "its container may come as long as it is listed"
    del world.pods[seat]

    look(world)

    assert world.state(seat) is S.FREE
    assert tickets(world, other)


@pytest.mark.parametrize(("late", "restarts"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_next_owner_that_calls_itself_waits_for_the_ticket_before(
    world: World, *, late: bool, restarts: bool
) -> None:
    seat = starting(world)
    given(world, seat, "b")
    if late:
        look(world)
    if restarts:
        ledger = recovery.ledger(world.node, "boot")
        world.board = world.new_board()
        world.receive(BusChanged(True))
        world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True)))
    world.call(seat)
    world.calls[seat] = replace(world.calls[seat], until=world.now.unix + 1e6)
    world.receive(StartCalls(dict(world.calls)))
    before = len(tickets(world, seat))

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING if late else S.RELEASING, True)
    assert len(tickets(world, seat)) == before

    world.tick(280)
    look(world)
    assert world.state(seat) is S.STARTING
    assert tickets(world, seat)[-1].pod_uid == "uid-b"


def test_a_call_of_the_next_owner_does_not_end_the_lease_of_a_pod_that_still_runs(world: World) -> None:
    seat = world.seat(0, 0)
    world.serve(seat, "a")
    other = rival(world)
    given(world, seat, "b")
    world.call(seat)
    look(world)

    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    assert not tickets(world, other)
    assert len(tickets(world, seat)) == 1

    world.end_processes(seat)
    look(world)
    assert len(tickets(world, other)) + len(tickets(world, seat)) == 2, "one of them, with evidence"


def test_a_manager_that_died_meanwhile_remembers_the_ticket(world: World) -> None:
    seat = starting(world)
    ledger = recovery.ledger(world.node, "boot")
    world.board = world.new_board()
    del world.pods[seat]
    world.receive(BusChanged(True))
    world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True)))
    other = rival(world)
    look(world)
    again = recovery.ledger(world.node, "boot")
    world.board = world.new_board()
    world.receive(BusChanged(True))
    world.receive(Recovered(world.owners(), again, JobReply(accepted=True)))
    world.receive(StartCalls(dict(world.calls)))

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    assert not tickets(world, other)

    world.tick(280)
    look(world)
    assert tickets(world, other)


def test_an_heir_that_is_deleted_proves_nothing_about_the_pod_that_took_the_ticket(world: World) -> None:
    seat = starting(world)
    given(world, seat, "b")
    look(world)
    assert world.managed(seat).durable.inherited
    other = rival(world)
    world.pods[seat] = replace(world.pods[seat], deleting=True)
    look(world)
    del world.pods[seat]

    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING, True)
    assert not tickets(world, other)

    world.tick(270)
    look(world)
    assert world.state(seat) is S.FREE
    assert tickets(world, other)


@pytest.mark.parametrize("vanished", [False, True])
@pytest.mark.parametrize("name", ["ticket.json", "ticket.taken.json"])
def test_a_start_under_way_survives_the_loss_of_the_ledger(
    world: World, tmp_path: Path, name: str, *, vanished: bool
) -> None:
    seat = starting(world)
    other = rival(world)
    (ticket,) = tickets(world, seat)
    gate = GateFiles(tmp_path)
    (tmp_path / "seats" / seat).mkdir(parents=True)
    gate.write_ticket(ticket)
    written = tmp_path / "seats" / seat / "ticket.json"
    written.rename(written.with_name(name))
    written = written.with_name(name)
    written.write_text(json.dumps({**json.loads(written.read_text()), "given": time.monotonic() - 100}))
    os.utime(written, (time.time() - 3600, time.time() - 3600))  # the clock of the day was set since
    if vanished:
        del world.pods[seat]
    found = recovery.open_tickets(Ledger(), world.owners(), gate.tickets(world.node.seats))
    ledger = recovery.with_tickets(Ledger(), found)

    world.board = world.new_board()
    world.receive(BusChanged(True))
    world.receive(Recovered(world.owners(), ledger, JobReply(accepted=True), found))
    world.receive(StartCalls(dict(world.calls)))
    world.tick(160)
    look(world)
    assert (world.state(seat), world.managed(seat).lease) == (S.RELEASING if vanished else S.STARTING, True)
    assert len(tickets(world, other)) == 0

    world.tick(10)
    look(world)
    assert not world.managed(seat).lease
    assert tickets(world, other)


def test_a_ticket_is_open_although_the_ledger_that_is_left_is_older(world: World) -> None:
    seat = world.seat(0, 0)
    world.pod(seat, "a", vram="30GiB")
    before = recovery.ledger(world.node, "")
    world.call(seat)
    (ticket,) = tickets(world, seat)
    read = SeatTicket(seat, ticket.call, ticket.pod_uid, ticket.epoch, 5.0, ticket.vram_bytes)

    found = recovery.open_tickets(before, world.owners(), (read,))
    ledger = recovery.with_tickets(before, found)

    assert found == (read,)
    (entry,) = ledger.seats
    assert (entry.state, entry.lease, entry.pod, entry.epoch) == (S.STARTING, True, "default/a", ticket.epoch)
    assert entry.durable.vram_bytes == 30 * GIB
    assert ledger.epoch == ticket.epoch
    assert not recovery.open_tickets(recovery.ledger(world.node, ""), world.owners(), (read,))


def test_the_ticket_of_a_seat_that_was_freed_is_not_open_again_after_a_restart(world: World) -> None:
    seat = starting(world)
    other = rival(world)
    (ticket,) = tickets(world, seat)
    world.pods[seat] = replace(world.pods[seat], deleting=True)
    world.look()
    del world.pods[seat]
    world.look()
    world.look()
    assert (world.state(seat), len(tickets(world, other))) == (S.FREE, 1)
    read = tuple(SeatTicket(t.seat, t.call, t.pod_uid, t.epoch, 5.0) for t in (ticket, *tickets(world, other)))

    assert recovery.open_tickets(recovery.ledger(world.node, ""), world.owners(), read) == ()


def test_a_start_is_not_given_up_while_the_pods_cannot_be_read(world: World) -> None:
    seat = starting(world)
    other = rival(world)

    world.tick(600)  # no observation: a container may run unseen
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)
    assert not tickets(world, other)

    world.look()
    assert world.state(seat) is S.WAITING


def test_an_old_ticket_or_one_whose_container_runs_holds_nothing(world: World) -> None:
    seat = world.seat(0, 0)
    world.serve(seat, "a")
    found = (SeatTicket(seat, "call-1", "uid-a", 1, 10.0), SeatTicket(world.seat(0, 1), "call-2", "uid-b", 2, 271.0))

    assert recovery.open_tickets(Ledger(), world.owners(), found) == ()


def test_a_call_that_has_ended_gets_no_ticket(world: World) -> None:
    seat, other = world.seat(0, 0), world.seat(0, 1)
    world.serve(seat, "a")
    world.pod(other, "b")
    world.call(other)
    world.tick(25)

    world.exit(seat)
    assert not tickets(world, other), "kubelet does not wait for it any more"
    world.call(other)

    assert [ticket.call for ticket in tickets(world, other)] == [world.calls[other].call]


def test_a_pod_that_is_missing_in_the_list_gets_no_ticket(world: World) -> None:
    seat, other = world.seat(0, 0), world.seat(0, 1)
    world.serve(seat, "a")
    world.pod(other, "b")
    world.call(other)
    waits = world.pods.pop(other)

    world.exit(seat)
    assert not tickets(world, other)
    world.pods[other] = waits
    world.look()

    assert tickets(world, other)


def test_a_call_whose_ticket_was_used_ends_no_container(world: World) -> None:
    """The plugin was killed before it removed the announcement of the call."""
    seat = world.seat(0, 0)
    world.pod(seat, "a")
    world.call(seat)
    world.pods[seat] = replace(world.pods[seat], container_id="process://9", running=True)
    world.look()
    world.healthy(seat)

    for _ in range(4):
        world.receive(StartCalls(dict(world.calls)))
        world.look()

    assert (world.state(seat), world.managed(seat).lease) == (S.ACTIVE, True)
    assert len(tickets(world, seat)) == 1


def test_a_call_whose_ticket_is_taken_does_not_wait(tmp_path: Path) -> None:
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)
    (folder / "call.json").write_text('{"call": "call-1", "since": 1.0, "until": 26.0}')
    assert set(gate.calls(["s00"])) == {"s00"}

    (folder / "ticket.taken.json").write_text('{"call": "call-1", "seat": "s00"}')

    assert gate.calls(["s00"]) == {}


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
