"""What decides, what refuses and what explains say the same: where they once contradicted each other."""

import pytest

from kybernate.messages import ActivateSeat, ParkSeat, PinSeat
from kybernate.policy.rules import Quantum
from kybernate.seat import SeatState as S
from services.gpu_manager.core.facts import Promise
from services.gpu_manager.core.inputs import (
    FaultyGpusSeen,
    ForeignProcess,
    ForeignProcessesSeen,
)
from tests.manager.test_host_memory import SIZE, HostWorld
from tests.manager.world import World, make_group, nested

STRANGER = ForeignProcessesSeen((ForeignProcess("GPU-0", 4711, "python3"),))


@pytest.fixture
def overlapping() -> World:
    return nested()


def test_1_a_drain_for_a_seat_beside_a_foreign_process_is_called_off(world: World) -> None:
    a, b = world.draining()

    world.receive(STRANGER)

    assert world.stage(a).stage == "foreign-process"
    assert world.state(b) is S.ACTIVE


def test_3_an_activation_is_refused_where_pinned_seats_of_an_overlapping_group_keep_it(overlapping: World) -> None:
    world = overlapping
    (pair,) = world.fill("p", group=2)
    (single,) = world.fill("s", group=0)
    assert world.state(pair) is S.PARKED
    world.command(PinSeat, single)

    refused = world.command(ActivateSeat, pair)

    assert (refused.accepted, refused.code) == (False, "pinned")
    assert "kyb unpin it" in refused.reason


def test_3_an_operators_activation_is_refused_beside_a_foreign_process(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.receive(STRANGER)

    refused = world.wish(a)

    assert (refused.accepted, refused.code) == (False, "blocked")
    assert "python3 (pid 4711)" in refused.reason
    assert world.command(ActivateSeat, a, actor="router").accepted, "its calls are held"


def test_4_a_faulty_gpu_is_not_the_reason_where_a_pinned_seat_is(world: World) -> None:
    a, b = world.fill("a", "b")
    world.command(PinSeat, b)
    world.traffic(a, waiting=1)

    world.receive(FaultyGpusSeen({"GPU-0": "XID 79"}))

    assert world.stage(a).stage == "pinned-neighbour"


def test_5_a_seat_that_failed_alone_does_not_wait_for_others(world: World) -> None:
    a, b = world.drained_switch()
    world.progress(world.job(), activate="parked")
    assert world.state(a) is S.PARKED
    world.traffic(b)

    assert world.why()[a]["blocked"] == ""
    world.tick(world.node.groups["G0"].backoff.until - world.wall + 0.01)
    assert world.node.switches["G0"].incoming == a, "it is tried before its back-off ends"


def test_6_a_rehearsal_is_no_start_that_is_not_healthy_yet(world: World, a: str) -> None:
    world.loads(a, "a", backend="vllm")
    assert world.stage(a).stage == "starting"

    world.healthy(a)

    assert world.state(a) is S.STARTING
    assert world.stage(a).stage == "rehearsing"


def test_7_the_wait_for_host_memory_is_not_blamed_on_the_checkpointer() -> None:
    world = HostWorld(groups=(make_group("G0", [0], 4),))
    _, b, c = world.fill("a", "b", "c", vram=SIZE)
    world.expect(c, 9)
    world.at_gate(d := world.seat(0, 3), "d", vram=SIZE)
    world.quiet(c)
    assert world.node.switches["G0"].job.sent is None

    found = world.stage(d)

    assert found.stage == "host-memory"
    assert "journaled" not in found.data, "the doctor asks about the checkpointer by this"
    assert Promise.DROPS in {world.managed(seat).facts.promise for seat in (world.seat(0, 0), b)}


def test_8_an_operator_who_parks_a_seat_ends_the_pause_of_its_group_for_all(world: World) -> None:
    _, b = world.drained_switch()
    world.progress(world.job(), "active", "pending")
    assert world.node.groups["G0"].backoff.active(world.now)

    assert world.command(ParkSeat, b).accepted

    assert world.state(b) is S.DRAINING
    assert not world.node.groups["G0"].backoff.active(world.now), "a switch begins in no pause"


def test_11_a_holder_that_is_alone_and_could_not_be_parked_is_taken_again_and_no_wait(world: World) -> None:
    a, b = world.drained_switch()
    world.progress(world.job(), "active", "pending")
    world.tick(world.node.groups["G0"].backoff.until - world.wall - 0.01)
    assert world.managed(b).backoff.park.active(world.now)
    assert world.stage(a).data.get("of") == "group"

    world.wall += 0.02
    assert world.stage(a).data.get("of") != "park"
    world.tick(0.01)

    assert world.managed(b).backoff.park.active(world.now)
    assert (world.state(b), world.stage(a).stage) == (S.DRAINING, "drain")


def test_11_a_holder_in_the_way_of_a_claim_that_could_not_be_parked_ends_the_claim(overlapping: World) -> None:
    world = overlapping
    world.configure(policy=Quantum(5.0, 1.0))
    (pair,) = world.fill("p", group=2)
    (single,) = world.fill("s", group=0)
    world.later(60)
    world.switch(single, pair)
    world.progress(world.job(), "active", "pending")
    world.later(world.node.groups["G0"].backoff.until - world.wall + 0.01)

    assert world.managed(single).backoff.park.active(world.now)
    assert "G01" not in world.node.claims
    assert "could not be parked" in world.stage(pair).text or world.stage(pair).data["of"] == "group"
    assert world.why()["G01"]["why"] == world.stage(pair).text or "backoff" in world.why()["G01"]["why"]


def test_12_a_container_past_the_gate_beside_a_broken_invariant_alone_is_not_quarantined(world: World, a: str) -> None:
    world.pod(a, "a")
    world.node.broken = {"GPU-0": "two groups"}

    world.shows(a, container_id="process://past", running=True)

    assert world.state(a) is S.STARTING
