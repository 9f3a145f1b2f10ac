"""What a seat waits for: one test per stage, made through the board."""

import json
from dataclasses import replace

import pytest

from kybernate.messages import ActivateSeat, DrainNode, JobReply, PinSeat
from kybernate.policy import KybBalanced
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import (
    BusChanged,
    ForeignProcess,
    ForeignProcessesSeen,
    JobAnswered,
    WallTime,
)
from services.gpu_manager.http import why_answer
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.publish import gate_texts
from tests.manager.test_rows import CASES
from tests.manager.world import World, booted, make_group


@pytest.fixture
def full(world: World) -> tuple[World, str, str]:
    """a waits with a request; b is active and has one in flight."""
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    return world, a, b


def waits(world: World, seat: str, stage: str) -> tuple[str, dict[str, object]]:
    """The text and data of the stage that a seat is in, as ``kyb why -o json`` gives them."""
    found = json.loads(json.dumps(world.stage(seat).as_json(world.now)))
    assert found["stage"] == stage, found
    return found["text"], found["data"]


def test_a_drain_names_the_router_that_it_waits_for_and_then_the_engine(world: World) -> None:
    a, b = world.fill("a", "b")
    world.router("router-1")
    world.tick(10)
    world.beat()
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING

    world.tick(70)
    text, data = waits(world, a, "drain")
    assert "b drains: the roster does not say yet that it drains, for 70 s" in text
    assert data["seconds"] == 60

    world.beat()
    world.announce(b)
    world.ack(b, in_flight=2)
    text, data = waits(world, a, "drain")
    assert "b drains: router router-0 has 2 in flight; router router-1 has not answered" in text
    assert text.endswith(", for 70 s (cut at 2 min 10 s)")
    assert (data["routers"], data["engine"], data["victim"]) == ({"router-0": 2, "router-1": None}, None, b)
    assert waits(world, b, "drain") == (text, data)

    world.ack(b)
    world.ack(b, router="router-1")
    text, data = waits(world, a, "drain")
    assert "its engine http://127.0.0.9" in text
    assert (data["routers"], str(data["engine"])[:7]) == ({}, "http://")


def test_a_park_waits_for_the_evidence_that_its_vram_is_free(world: World) -> None:
    a, b = world.drained_switch()
    text, data = waits(world, a, "vram-evidence")
    assert "b is being parked; its VRAM counts as free on evidence only" in text
    since = data["drained_seconds"]
    assert data["journaled"] is False
    world.tick(7)
    later = waits(world, a, "vram-evidence")[1]
    assert (later["journaled"], later["drained_seconds"]) == (False, pytest.approx(float(str(since)) + 7))
    world.receive(JobAnswered(world.job(), JobReply(accepted=True)))
    assert waits(world, b, "vram-evidence")[1]["journaled"] is True


def test_a_deleted_neighbour_holds_its_group_until_its_processes_are_found_gone(full: tuple[World, str, str]) -> None:
    world, a, b = full
    world.traffic(a, waiting=1)
    world.vanish(b)
    text, data = waits(world, a, "vram-evidence")
    assert "b: its pod is deleted; group G0 is held until the checkpointer finds none of its processes" in text
    assert data == {"seat": b, "processes_gone": False}


def test_a_seat_waits_while_its_gpus_are_cleared_for_a_larger_group() -> None:
    world, case = CASES[280]()
    a, b, pair = case.seat, world.seat(1, 0), world.seat(2, 0)
    world.traffic(a, waiting=1)

    text, data = waits(world, a, "barrier")
    assert "the GPUs of group G0 are being cleared for p of group G01" in text
    assert data == {"group": "G01", "seat": pair}
    assert waits(world, pair, "drain")[1]["victim"] == b


def test_a_pinned_neighbour_is_named(full: tuple[World, str, str]) -> None:
    world, a, b = full
    world.command(PinSeat, b)
    world.tick(30)
    world.beat()
    world.traffic(a, waiting=1)
    text, data = waits(world, a, "pinned-neighbour")
    assert "group G0 is kept by pinned b; kyb unpin it" in text
    assert data == {"seats": [b]}


def test_the_start_gate_names_the_holder_and_that_it_is_pinned(full: tuple[World, str, str]) -> None:
    world, _, b = full
    world.command(PinSeat, b)
    new = world.seat(0, 2)
    world.pod(new, "new")
    world.call(new)
    text = gate_texts(world.node, world.now)[new]
    assert "group G0 is held by b (active, pinned)" in text
    assert ", pinned); place 1 of 1 at the start gate" in text


def test_the_start_gate_names_no_model_or_pod_of_another_namespace(full: tuple[World, str, str]) -> None:
    world, _, b = full
    world.command(PinSeat, b)
    new = world.seat(0, 2)
    world.pod(new, "new")
    world.pods[new] = replace(world.pods[new], namespace="other")
    world.look()
    world.call(new)
    text = gate_texts(world.node, world.now)[new]
    they = "a seat of another namespace"
    assert f"kept by pinned {they}; kyb unpin it; group G0 is held by {they} (active, pinned)" in text


def test_the_start_gate_names_a_model_to_its_owner_although_another_namespace_has_one_of_that_name(
    full: tuple[World, str, str],
) -> None:
    world, _, b = full
    new = world.seat(0, 2)
    world.pods[new] = replace(world.pods[b], seat=new, namespace="other", uid="u", container_id=None, running=False)
    world.look()
    world.call(new)
    world.managed(new).backoff.activation.reason = "did not start once"
    world.managed(new).backoff.activation.until = WallTime(world.wall + 100)
    text = gate_texts(world.node, world.now)[new]
    assert text.startswith("b waits: b did not start once"), text


def test_the_start_gate_hides_the_policys_names_from_another_namespace_and_shows_no_id(world: World) -> None:
    a, b = world.fill("secret-a", "secret-b")
    world.traffic(b, in_flight=1)
    new = world.seat(0, 2)
    world.pod(new, "new")
    world.look()
    world.call(new)
    world.traffic(a, waiting=1)
    group = world.node.groups["G0"]
    group.picked, group.why = a, "secret-a > secret-b"
    text = gate_texts(world.node, world.now)[new]
    assert text.startswith("new waits: ")
    assert "secret-b" in text
    assert not any(seat in text for seat in world.node.seats)
    world.pods[new] = replace(world.pods[new], namespace="other")
    world.look()
    group.picked, group.why = a, "secret-a > secret-b"
    text = gate_texts(world.node, world.now)[new]
    assert "secret" not in text
    assert "a seat of another namespace" in text


def test_the_minimum_active_time_of_the_holder_has_an_end() -> None:
    world, case = CASES[360]()
    text, data = waits(world, case.seat, "minimum-active-time")
    assert "b keeps the group for 20.0 s more" in text
    assert data == {"seats": [world.seat(0, 1)], "seconds": pytest.approx(20.0)}


def test_a_back_off_says_until_when(world: World) -> None:
    a, b = world.drained_switch()
    world.progress(world.job(), activate="parked")
    world.traffic(b, waiting=1)
    text, data = waits(world, a, "backoff")
    assert "group G0 pauses: a was not activated: " in text
    assert "; tried again in" in text
    assert (data["of"], data["name"]) == ("group", "G0")
    world.tick(world.node.groups["G0"].backoff.until - world.wall + 0.01)
    world.finish()
    world.traffic(b, in_flight=1)
    text, data = waits(world, a, "backoff")
    assert "did not come back once" in text
    assert "tried again in" in text
    assert (data["of"], data["name"], data["failures"]) == ("seat", a, 1)
    assert float(str(data["until"])) > float(world.now.unix)


def test_a_holder_that_could_not_be_parked_is_named_with_the_end_of_its_back_off() -> None:
    """While another one can leave; that one is too small."""
    world = booted(make_group("G0", [0], 3, slots=2))
    a, b, c = world.seat(0, 0), world.seat(0, 1), world.seat(0, 2)
    for seat, model, vram in ((a, "a", "70GiB"), (b, "b", "50GiB"), (c, "c", "20GiB")):
        world.serve(seat, model, vram=vram)
    assert (world.state(a), world.state(b), world.state(c)) == (S.PARKED, S.ACTIVE, S.ACTIVE)
    world.managed(b).backoff.park.until = world.wall + 50
    world.traffic(a, waiting=1)
    text, data = waits(world, a, "backoff")
    assert "b of group G0 could not be parked; tried again in 50 s" in text
    assert (data["of"], data["name"]) == ("park", b)


def test_a_foreign_process_is_named(full: tuple[World, str, str]) -> None:
    world, a, _ = full
    world.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 4711, "python3"),)))
    text, data = waits(world, a, "foreign-process")
    assert "group G0 is quarantined: python3 (pid 4711) on GPU 0 belongs to no seat" in text
    assert data == {"processes": [{"gpu": "GPU-0", "pid": 4711, "name": "python3"}]}


@pytest.mark.parametrize(("group", "scope"), [("G0", "G0"), ("", "n1")])
def test_a_drained_group_or_node_says_who_drained_it_and_how_it_ends(world: World, group: str, scope: str) -> None:
    (a,) = world.fill("a")
    world.order(DrainNode, group=group, purpose="upgrade")
    world.finish()
    text, data = waits(world, a, "drained")
    assert f"{'group' if group else 'node'} {scope} is drained for upgrade by alice; it ends with: kyb resume" in text
    assert data == {"scope": scope, "for": "upgrade", "actor": "alice"}


def test_without_the_bus_nothing_is_evicted(full: tuple[World, str, str]) -> None:
    world, a, _ = full
    world.traffic(a, waiting=1)
    world.receive(BusChanged(False))
    assert waits(world, a, "routers") == ("nothing is evicted: the bus is away", {"bus": False})


def test_a_neighbour_that_starts_is_named(world: World) -> None:
    (a,) = world.fill("a")
    b = world.seat(0, 1)
    world.tick(10)
    world.pod(b, "b")
    world.call(b)
    world.finish()
    assert world.state(b) is S.STARTING
    world.traffic(a, waiting=1)
    assert "b starts on group G0: no process came yet" in waits(world, a, "starting")[0]
    world.start(b)
    text = waits(world, b, "starting")[0]
    assert f"its engine loads and is not healthy yet at {world.pods[b].endpoint}" in text


def test_a_quarantined_neighbour_is_named_with_its_reason(world: World) -> None:
    a, b = world.drained_switch()
    world.progress(world.job(), "quarantined", "pending")
    world.tick(60)
    world.beat()
    assert "b holds group G0 and is quarantined: made quarantined" in waits(world, a, "quarantined")[0]
    assert waits(world, b, "quarantined")[0] == "made quarantined"


def test_what_serves_or_is_not_wanted_waits_for_nothing(world: World) -> None:
    a, b = world.fill("a", "b")
    assert waits(world, a, "idle") == ("", {})
    assert waits(world, b, "active") == ("", {})
    c = world.seat(0, 2)
    world.pod(c, "c")
    assert "its container has not come to the start gate" in waits(world, c, "start-gate")[0]
    world.exit(b)
    assert "its container starts again" in waits(world, b, "container")[0]


def test_the_policy_says_why_it_waits(full: tuple[World, str, str]) -> None:
    world, a, b = full
    world.traffic(b, in_flight=40, waiting=40, oldest=1.0)
    world.tick(30)
    world.beat()
    world.traffic(a, waiting=1)
    assert waits(world, a, "policy")[0] == world.node.groups["G0"].why


def test_a_seat_that_is_brought_back_says_so(world: World) -> None:
    (a,) = world.fill("a")
    world.order(DrainNode, group="G0")
    world.finish()
    world.node.drains.clear()
    world.command(ActivateSeat, a)
    assert "the checkpointer activates a on group G0" in waits(world, a, "activating")[0]


def test_http_gives_stage_and_operations(world: World) -> None:
    (a,) = world.fill("a")
    world.order(DrainNode, group="G0", purpose="upgrade")
    world.finish()
    body = json.loads(json.dumps(why_answer(world.node, GuardedPolicy("kyb-balanced", KybBalanced()), world.now)))
    (group,) = [one for one in body["groups"] if one["group"] == "G0"]
    assert group["seats"][0]["stage"]["stage"] == "drained"
    assert "is drained for upgrade" in group["drained"]
    (ordered,) = body["operations"]
    assert (ordered["target"], ordered["outcome"], ordered["purpose"]) == ("G0", "done", "upgrade")
    assert a in group["seats"][0]["seat"]


def test_http_gives_the_groups_to_which_seats_may_move() -> None:
    pool = (make_group("G0", [0], 1, rebalance=True), make_group("G1", [1], 1, rebalance=True))
    world = World(groups=(*pool, make_group("G23", [2, 3], 1, rebalance=True)))
    body = why_answer(world.node, GuardedPolicy("kyb-balanced", KybBalanced()), world.now)
    assert {one["group"]: one["peers"] for one in body["groups"]} == {"G0": ["G1"], "G1": ["G0"], "G23": []}
