"""How the hold of a start ends: by evidence that nothing comes of its permission, and by nothing else."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.messages import KillJob, SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core import phases, recovery
from services.gpu_manager.core.facts import Process
from services.gpu_manager.core.inputs import (
    StartCall,
    StartCalls,
    StartTicket,
    UnixTime,
    WallTime,
)
from services.gpu_manager.core.starts import INSIDE_SECONDS, KUBELET_SECONDS
from services.gpu_manager.publish import GateFiles
from tests.manager.pulling import Pulls
from tests.manager.test_recovery import restart
from tests.manager.test_restarts import busy_home, call
from tests.manager.world import World, booted, make_group


@pytest.fixture
def paused(world: World) -> World:
    """kubelet has started the container of a, and its kyb-run is stopped before its first fork; b waits."""
    a, b = world.seat(0, 0), world.seat(0, 1)
    world.pod(a, "a")
    world.pods[a] = replace(world.pods[a], restarts_inside=True)
    world.pod(b, "b")
    world.call(a)
    world.start(a)
    world.call(b)
    assert (world.state(a), world.managed(a).facts.process) == (S.STARTING, Process.LOADS)
    return world


def inside(world: World, *, backend: str = "restart") -> tuple[str, str]:
    """kyb-run of a has a ticket; b was parked for it."""
    a, b = world.fill("a", "b", backend=backend)
    world.call(a, inside=True)
    world.look_at(a, "gone")
    world.look()
    world.traffic(a, waiting=1)
    world.later(1.0, times=20)
    world.quiet(b)
    world.finish()
    world.traffic(a)
    world.calls.pop(a)
    assert (world.state(a), world.managed(a).starts_inside) == (S.STARTING, True)
    return a, b


def test_kyb_run_that_is_stopped_before_its_first_fork_keeps_its_hold(paused: World) -> None:
    """It is alone in its container, and starts its engine once it goes on."""
    a, b = paused.seat(0, 0), paused.seat(0, 1)
    paused.wait(70)
    paused.look_at(a, "gone")
    assert (paused.state(a), paused.managed(a).lease) == (S.STARTING, True)
    paused.wait(KUBELET_SECONDS - 60)
    paused.look_at(a, "gone", asked=30)
    assert paused.managed(a).lease, "the question was sent before the end of its permission"
    paused.look_at(a, "gone")
    assert not paused.managed(a).lease
    paused.call(b)
    assert paused.sent(StartTicket, b)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_manager_that_restarts_meanwhile_keeps_its_hold(paused: World, *, deleted: bool) -> None:
    """The grace of a deleted pod may last longer than its permission."""
    a = paused.seat(0, 0)
    if deleted:
        paused.delete(a)
    held = (S.RELEASING if deleted else S.STARTING, True)
    paused.look_at(a, "gone")
    assert (paused.state(a), paused.managed(a).lease) == held
    restart(paused, a="gone")
    assert (paused.state(a), paused.managed(a).lease) == held
    paused.look_at(a, "gone")
    assert paused.managed(a).lease
    paused.wait(KUBELET_SECONDS + 1)
    paused.look_at(a, "gone")
    assert not paused.managed(a).lease


def test_a_container_that_is_gone_ends_its_hold_at_once(paused: World) -> None:
    a = paused.seat(0, 0)
    paused.look_at(a, "gone", keeper=False)
    assert (paused.state(a), paused.managed(a).lease) == (S.BACKOFF, False)


def test_kyb_run_alone_after_the_end_of_its_permission_ends_its_hold(world: World) -> None:
    a, _ = inside(world)
    given_at = float(world.managed(a).gate.given)
    world.look_at(a, "gone")
    assert world.managed(a).lease
    world.tick(given_at + INSIDE_SECONDS + 5 - world.wall)
    world.look_at(a, "gone", asked=5.1)
    assert world.managed(a).lease, "as it was before the end of its permission"
    world.look_at(a, "gone")
    assert (world.state(a), world.managed(a).lease) == (S.PARKED, False)
    assert world.managed(a).reason == "kyb-run did not start its engine"


@pytest.mark.parametrize("deleted", [False, True])
def test_kyb_run_that_is_gone_ends_the_hold_of_its_ticket_at_once(world: World, *, deleted: bool) -> None:
    """No process is left that could use it: the group was held for 270 s, with another reason shown."""
    a, _ = inside(world)
    if deleted:
        world.delete(a)
    stage = phases.unproven(world.node, world.managed(a), world.now)
    if deleted:
        assert stage.text.endswith("until the checkpointer finds that kyb-run has not started its engine by its ticket")
        assert stage.clock.deadline == world.managed(a).gate.expires
        assert not stage.data["processes_gone"]
    world.look_at(a, "gone", keeper=False)
    world.tick(1.0)
    assert not world.managed(a).lease


def test_the_ticket_of_a_pod_that_vanished_is_named_with_its_end(world: World, a: str, b: str) -> None:
    world.pod(a, "a")
    world.pod(b, "b")
    world.call(a)
    world.calls.clear()
    del world.pods[a]
    world.wait(20)
    world.call(b)
    stage = world.stage(b)
    assert stage.text.endswith("is held until its ticket is over, by which its container may still start")
    assert stage.clock.deadline == world.managed(a).gate.given + KUBELET_SECONDS


def test_a_process_that_was_seen_has_used_the_permission(paused: World) -> None:
    """kyb-run without it, soon after, is the node's doing."""
    a = paused.seat(0, 0)
    paused.look_at(a, "active")
    paused.look_at(a, "gone")
    assert not paused.managed(a).lease


def test_time_in_which_kubelet_is_stopped_does_not_count(world: World, a: str) -> None:
    world.at_gate(a, "a")
    world.calls.clear()
    world.wait(200)
    world.tick(100_000)
    world.look()
    assert world.managed(a).lease
    world.wait(KUBELET_SECONDS - 210)
    assert not world.managed(a).lease


def test_a_ticket_that_is_over_is_not_written(tmp_path: Path) -> None:
    """The manager was stopped, or the ledger's disk was slow."""
    gate, folder = GateFiles(tmp_path), tmp_path / "seats" / "s00"
    folder.mkdir(parents=True)
    ticket = StartTicket("s00", "call-1", "uid-a", 7, WallTime(time.monotonic()))
    gate.write_ticket(ticket)
    assert not [*folder.iterdir()]
    gate.write_ticket(replace(ticket, expires=WallTime(time.monotonic() + 30)))
    (read,) = gate.tickets(["s00"])
    assert read.expires == json.loads((folder / "ticket.json").read_text())["expires"]


# --- where a container starts -----------------------------------------------------------------------------------------


def away(stage: str) -> tuple[World, str, str]:
    """a, of home G01, has a ticket of kyb-run for G23, or loads or serves there, or its pod is deleted then; b serves
    on G01."""
    groups = (make_group("G01", [0, 1], 3, rebalance=True), make_group("G23", [2, 3], 3, rebalance=True))
    world = booted(*groups, policy=Pulls(), warmup=False)
    a, b = busy_home(world)
    for _ in range(40):
        if world.state(a) is S.STARTING:
            break
        world.traffic(a, waiting=1, oldest=30.0)
        if world.state(a) in (S.PARKED, S.WAITING):
            call(world, a)
        if world.state(a) is S.PARKED:
            world.look_at(a, "gone")
            world.look()
        world.later(1.0)
        world.traffic(b, in_flight=1)
    world.calls.pop(a, None)
    if stage in ("loads", "serves"):
        world.look_at(a, "active")
    if stage == "serves":
        world.healthy(a)
    if stage == "leaves":
        world.delete(a)
    assert (world.managed(a).group.name, world.state(b), world.managed(b).group.name) == ("G23", S.ACTIVE, "G01")
    return world, a, b


@pytest.mark.parametrize("stage", ["ticket", "loads", "serves", "leaves"])
def test_a_container_that_skips_the_gate_is_at_home_wherever_its_seat_was(stage: str) -> None:
    """Its container has ended, and kubelet, which has just restarted, has started the next one."""
    world, a, b = away(stage)
    world.shows(a, container_id="process://777", restarts=world.pods[a].restarts + 1)
    seat = world.managed(a)
    assert (seat.group.name, seat.memory_on.name, seat.lease, seat.facts.conflict) == ("G01", "G01", True, True)
    assert world.state(a) is (S.RELEASING if stage == "leaves" else S.QUARANTINED)
    assert world.state(b) is S.ACTIVE
    if stage != "leaves":
        assert "its container was started again" in [event.reason for event in world.events(a)]
    world.end_processes(a)
    assert not seat.lease


def test_a_seat_without_a_process_is_at_home_after_a_restart_of_the_manager() -> None:
    """The ledger has the place of kyb-run's ticket, and the container that came after it has ended."""
    world, a, _ = away("leaves")
    world.pods[a] = replace(world.pods[a], container_id="process://777", deleting=False, restarts_inside=False)
    restart(world, a="gone")
    seat = world.managed(a)
    assert (world.state(a), seat.group.name, seat.memory_on.name) == (S.BACKOFF, "G01", "G01")


def test_an_engine_that_kyb_run_starts_although_ledger_and_seat_folder_were_damaged_is_ended(world: World) -> None:
    """The last line of the ledger was damaged: what it has of the seat is kept, and what let its engine in is not."""
    a, _ = inside(world)
    kept = recovery.ledger(world.node, "boot").model_copy(update={"lost": True})
    target = world.managed(a).target()
    gone = SeatProgress(seat=a, pod_uid=target.pod_uid, container_id=target.container_id, outcome="gone", keeper=True)
    world.next_manager(kept, gone)
    world.receive(StartCalls(dict(world.calls)))
    assert (world.state(a), world.managed(a).starts_inside) == (S.LOST, True)

    world.look_at(a, "active")

    kills = [effect.target for effect in world.effects if isinstance(effect, KillJob) and effect.target.seat == a]
    assert [one.container_id for one in kills] == [target.container_id]
    world.end_processes(a)
    world.tick(1)
    assert not world.managed(a).lease


def test_a_call_from_inside_that_cannot_be_on_its_group_ends_no_start(world: World) -> None:
    """A GPU failed between ticket and fork. The word of a container ends nothing: its engine may load."""
    a, _ = inside(world)
    world.started += 1
    closed = frozenset({world.managed(a).group.name})
    until = UnixTime(float(world.now.unix) + 25)
    world.calls[a] = StartCall("again", world.now.unix, until, inside=True, closed=closed)
    world.receive(StartCalls(dict(world.calls)))
    world.look(3)
    assert (world.state(a), world.managed(a).lease) == (S.STARTING, True)
    world.tick(INSIDE_SECONDS + 1)
    world.look_at(a, "gone")
    assert not world.managed(a).lease
