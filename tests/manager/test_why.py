"""What a seat waits for: one test per stage, made through the board."""

import json
from dataclasses import replace

import pytest

from kybernate.messages import ActivateSeat, DrainNode, PinSeat
from kybernate.policy import KybBalanced
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import (
    WallTime,
)
from services.gpu_manager.core.obstacles import blocked
from services.gpu_manager.http import why_answer
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.publish import gate_texts
from tests.manager.test_rows import CASES
from tests.manager.world import World, booted, make_group


@pytest.fixture
def full(world: World) -> World:
    """a is parked; b is active and has a request in flight."""
    _, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    return world


def waits(world: World, seat: str, stage: str) -> tuple[str, dict[str, object]]:
    """The text and data of the stage that a seat is in, as ``kyb why -o json`` gives them."""
    found = json.loads(json.dumps(world.stage(seat).as_json(world.now)))
    assert found["stage"] == stage, found
    return found["text"], found["data"]


STAGES: dict[int, tuple[str, str, dict[str, object]]] = {
    110: (
        "foreign-process",
        "group G0 is quarantined: x (pid 1) on GPU 0 belongs to no seat",
        {"processes": [{"gpu": "GPU-0", "pid": 1, "name": "x"}]},
    ),
    140: ("quarantined", "b holds group G0 and is quarantined: made quarantined", {"seat": "b"}),
    170: ("pinned-neighbour", "group G0 is kept by pinned b; kyb unpin it", {"seats": ["b"]}),
    230: ("container", "its container starts again", {}),
    235: ("container", "its container does not start: port 9001 of 127.0.0.1 is taken", {"called": False}),
    240: ("start-gate", "its container has not come to the start gate", {"called": False}),
    250: ("idle", "", {}),
    260: ("routers", "nothing is evicted: the bus is away", {"bus": False}),
    280: ("barrier", "the GPUs of group G0 are being cleared for p of group G01", {"group": "G01", "seat": "p"}),
    330: (
        "vram-evidence",
        "b: its pod is deleted; group G0 is held until the checkpointer finds none of its processes",
        {"seat": "b", "processes_gone": False},
    ),
    360: ("minimum-active-time", "b keeps the group for 20.0 s more", {"seats": ["b"], "seconds": pytest.approx(20)}),
}
"""By row: stage, text and data, with the names of seats for their ids."""


@pytest.mark.parametrize("nr", STAGES)
def test_a_row_that_is_first_is_the_stage_with_its_text_and_data(nr: int) -> None:
    world, seat, _ = next(CASES[nr]())
    if nr > 250:  # nothing later counts before a request waits
        world.traffic(seat, waiting=1)
    stage, expected, data = STAGES[nr]
    text, found = waits(world, seat, stage)
    assert expected in text
    names = json.dumps(found)
    for one in world.node.seats.values():
        names = names.replace(one.id, one.name)
    assert json.loads(names) == data


def test_a_container_that_kubelet_cannot_make_is_named_also_to_requests_and_in_the_roster() -> None:
    world, seat, _ = next(CASES[235]())
    world.traffic(seat, waiting=1)
    assert "port 9001 of 127.0.0.1 is taken" in waits(world, seat, "container")[0]
    assert blocked(world.node, world.managed(seat), world.now).endswith("port 9001 of 127.0.0.1 is taken")


def test_a_pair_waits_for_the_single_that_drains_for_it() -> None:
    world, _, _ = next(CASES[280]())
    assert waits(world, world.seat(2, 0), "drain")[1]["victim"] == world.seat(1, 0)


def test_what_serves_waits_for_nothing(full: World, b: str) -> None:
    assert waits(full, b, "active") == ("", {})


def test_a_drain_names_the_router_that_it_waits_for_and_then_the_engine(world: World) -> None:
    a, b = world.fill("a", "b")
    world.router("router-1")
    world.later(10)
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING

    world.tick(70)
    text, data = waits(world, a, "drain")
    assert "b drains: the roster does not say yet that it drains, for 70 s" in text
    assert data["seconds"] == 60

    world.beat()
    world.answered(b, 2)
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
    world.journaled()
    assert waits(world, b, "vram-evidence")[1]["journaled"] is True


@pytest.mark.parametrize(("namespace", "they"), [("default", "b"), ("other", "a seat of another namespace")])
def test_the_start_gate_names_the_holder_and_that_it_is_pinned_and_none_of_another_namespace(
    full: World, b: str, namespace: str, they: str
) -> None:
    full.command(PinSeat, b)
    new = full.seat(0, 2)
    full.pod(new, "new")
    full.shows(new, namespace=namespace)
    full.call(new)
    text = gate_texts(full.node, full.now)[new]
    held = f"kept by pinned {they}; kyb unpin it; group G0 is held by {they} (active, pinned)"
    assert f"{held}; place 1 of 1 at the start gate" in text


def test_the_start_gate_names_a_model_to_its_owner_although_another_namespace_has_one_of_that_name(
    full: World,
    b: str,
) -> None:
    new = full.seat(0, 2)
    full.pods[new] = replace(full.pods[b], seat=new, namespace="other", uid="u", container_id=None, running=False)
    full.look()
    full.call(new)
    full.managed(new).backoff.activation.reason = "did not start once"
    full.managed(new).backoff.activation.until = WallTime(full.wall + 100)
    text = gate_texts(full.node, full.now)[new]
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
    world.shows(new, namespace="other")
    group.picked, group.why = a, "secret-a > secret-b"
    text = gate_texts(world.node, world.now)[new]
    assert "secret" not in text
    assert "a seat of another namespace" in text


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


@pytest.mark.parametrize(("group", "scope"), [("G0", "G0"), ("", "n1")])
def test_a_drained_group_or_node_says_who_drained_it_and_how_it_ends(world: World, group: str, scope: str) -> None:
    (a,) = world.fill("a")
    world.order(DrainNode, group=group, purpose="upgrade")
    world.finish()
    text, data = waits(world, a, "drained")
    assert f"{'group' if group else 'node'} {scope} is drained for upgrade by alice; it ends with: kyb resume" in text
    assert data == {"scope": scope, "for": "upgrade", "actor": "alice"}


def test_a_neighbour_that_starts_is_named(world: World, b: str) -> None:
    (a,) = world.fill("a")
    world.tick(10)
    world.at_gate(b, "b")
    world.finish()
    assert world.state(b) is S.STARTING
    world.traffic(a, waiting=1)
    assert "b starts on group G0: no process came yet" in waits(world, a, "starting")[0]
    world.start(b)
    text = waits(world, b, "starting")[0]
    assert f"its engine loads and is not healthy yet at {world.pods[b].endpoint}" in text


def test_the_policy_says_why_it_waits(full: World, a: str, b: str) -> None:
    full.traffic(b, in_flight=40, waiting=40, oldest=1.0)
    full.later(30)
    full.traffic(a, waiting=1)
    assert waits(full, a, "policy")[0] == full.node.groups["G0"].why


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
