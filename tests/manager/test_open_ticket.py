"""A ticket reserves its group until it is proven that no process comes of it, whatever becomes of the pod.

Seen when kubelet was killed with all its pods: the same seats went to new pods, and a call of a new one took a ticket
in the name of the one before.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.messages import JobReply
from kybernate.seat import SeatState as S
from services.gpu_manager import recovery
from services.gpu_manager.inputs import BusChanged, Recovered, SeatTicket, StartCalls, StartTicket
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import GateFiles
from services.gpu_manager.seat_pod import SeatPod
from tests.manager.world import World


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
    os.utime(written.with_name(name), (time.time() - 100, time.time() - 100))
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


def test_an_old_ticket_or_one_whose_container_runs_holds_nothing(world: World) -> None:
    seat = world.seat(0, 0)
    world.serve(seat, "a")
    found = (SeatTicket(seat, "call-1", "uid-a", 1, 10.0), SeatTicket(world.seat(0, 1), "call-2", "uid-b", 2, 271.0))

    assert recovery.open_tickets(Ledger(), world.owners(), found) == ()
