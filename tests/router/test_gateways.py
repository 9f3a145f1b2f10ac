"""Routes for other gateways (hold, wake, signals, events), and for operators."""

import asyncio
import json
from typing import Any

import pytest

from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    CommandReply,
    DrainNode,
    MigrateSeat,
    OrderChanged,
    OrderStatus,
    ParkSeat,
    ResumeNode,
    TrafficSignal,
)
from kybernate.seat import SeatState
from tests.router.world import World, world
from tests.until import until


def cloud_event(**data: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": "e1", "type": "ai.kyb.v1.signal", "source": "litellm/pod-3", "data": data}


LABELS = '{model="llama",tier="standard"}'


async def test_hold_waits_for_the_model_and_names_the_engine():
    async with world(permit_seconds=0.3) as w:
        engine = await w.seat("s0", "llama")
        answer = await w.call("GET", "/v1/hold?model=llama&timeout=30s")
        assert answer.status == 200
        assert answer.json["endpoint"] == engine.endpoint
        assert (answer.json["seat"], answer.json["valid_ms"]) == ("s0", 300)
        assert answer.json["epoch"] == w.manager.rows["s0"].epoch


async def test_hold_names_the_model_of_an_alias_as_the_engine_knows_it():
    async with world(aliases="small=llama") as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        for name in ("small", "llama"):
            answer = await w.call("GET", f"/v1/hold?model={name}")
            assert (answer.headers["X-Kyb-Model"], answer.json["model"]) == ("llama", "llama"), name


async def test_parking_waits_for_a_permit():
    async with world(permit_seconds=0.3) as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        assert (await w.call("GET", "/v1/hold?model=llama")).status == 200
        await w.manager.move("s0", SeatState.DRAINING)
        await until(
            lambda: w.manager.acks("s0")[:1] == [1],
            what="the first acknowledgement has one request in flight",
            saw=lambda: w.manager.acks("s0"),
        )
        await until(
            lambda: w.manager.acks("s0")[-1] == 0,
            what="the last acknowledgement has no request in flight",
            saw=lambda: w.manager.acks("s0"),
        )


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("model=unknown", 404, "model_not_found"),
        ("", 400, "model_missing"),
        ("model=llama&timeout=soon", 400, "invalid_timeout"),
        ("model=llama&timeout=50ms", 503, "hold_timeout"),
    ],
)
async def test_hold_returns_an_error_with_its_reason(query: str, status: int, code: str):
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        answer = await w.call("GET", f"/v1/hold?{query}")
        assert (answer.status, answer.code) == (status, code)
        assert ("Retry-After" in answer.headers) == (status == 503)


async def test_hold_for_auth_request_answers_2xx_or_403_only():
    async with world() as w:
        engine = await w.seat("s0", "llama")
        answer = await w.call("GET", "/v1/hold?auth=1&model=llama")
        assert (answer.status, answer.headers["X-Kyb-Endpoint"]) == (200, engine.endpoint)
        for query, status in (("model=unknown", 404), ("", 400), ("model=llama&timeout=soon", 400)):
            answer = await w.call("GET", f"/v1/hold?auth=1&{query}")
            assert (answer.status, answer.headers["X-Kyb-Status"]) == (403, str(status))
            assert answer.headers["X-Kyb-Code"] == answer.code
        await w.manager.move("s0", SeatState.PARKED)
        w.manager.auto = False
        answer = await w.call("GET", "/v1/hold?auth=1&model=llama&timeout=50ms")
        assert (answer.status, answer.headers["X-Kyb-Status"]) == (403, "503")
        assert int(answer.headers["Retry-After"]) >= 1


async def test_a_gateway_that_leaves_ends_its_hold():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        call = asyncio.create_task(w.call("GET", "/v1/hold?model=llama"))
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
        call.cancel()
        await until(lambda: w.held("llama") == 0, what="requests for llama that the router holds: 0")


async def test_wake_requests_an_activation_and_does_not_wait():
    async with world() as w:
        await w.seat("s0", "llama")
        answer = await w.call("POST", "/v1/wake", json={"model": "llama"})
        assert (answer.status, answer.json["state"]) == (202, "waking")
        await until(
            lambda: w.upstream("s0").record.state is SeatState.ACTIVE,
            what="the seat is active",
            saw=lambda: w.upstream("s0").record,
        )
        assert w.manager.of(ActivateSeat)[0].cause == answer.json["cause"]
        again = await w.call("POST", "/v1/wake", json={"model": "llama"})
        assert (again.status, again.json["state"]) == (200, "active")
        assert (await w.call("POST", "/v1/wake", json={"model": "unknown"})).status == 404


async def test_a_signal_becomes_a_level_of_its_source():
    async with world() as w:
        await w.seat("s0", "llama")
        await w.seat("s1", "qwen")
        await w.seat("s2", "qwen")
        events = [cloud_event(model="llama", waiting=5, inflight=2, oldest_wait_ms=1200), cloud_event(model="qwen")]
        answer = await w.call("POST", "/v1/signals", json=events)
        assert (answer.status, answer.json) == (202, {"accepted": 2, "errors": []})
        signals = await until(
            lambda: len(s := w.manager.of(TrafficSignal)) == 2 and s,
            what="two traffic signals",
            saw=lambda: w.manager.of(TrafficSignal),
        )
        one, two = signals
        assert (one.source, one.seat, one.waiting, one.in_flight, one.cause) == ("litellm/pod-3", "s0", 5, 2, "e1")
        assert (one.oldest_wait_seconds, one.ttl_seconds) == (1.2, 15.0)
        assert (two.model, two.seat) == ("qwen", None)
        assert two.seq > one.seq
        seats = (await w.call("GET", "/v1/seats")).json["seats"]
        assert [(s["seat"], s["waiting"], s["in_flight"]) for s in seats if s["waiting"]] == [("s0", 5, 2)]


async def test_invalid_signals_of_a_batch_are_listed_with_their_index():
    async with world() as w:
        await w.seat("s0", "llama")
        kind = {"Content-Type": "application/cloudevents+json"}
        answer = await w.call("POST", "/v1/signals", data=json.dumps(cloud_event(model="unknown")), headers=kind)
        assert (answer.status, answer.code) == (404, "model_not_found")
        mixed = [cloud_event(model="llama"), cloud_event(model="llama", waiting=-1), cloud_event(model="unknown"), 7]
        answer = await w.call("POST", "/v1/signals", json=mixed)
        assert (answer.status, answer.json["accepted"]) == (207, 1)
        assert [(e["index"], e["status"]) for e in answer.json["errors"]] == [(1, 400), (2, 404), (3, 400)]
        answer = await w.call("POST", "/v1/signals", data=b"x", headers={"Content-Type": "text/plain"})
        assert (answer.status, answer.code) == (415, "unsupported_content_type")
        w.bus.cut()
        answer = await w.call("POST", "/v1/signals", json=cloud_event(model="llama"))
        assert (answer.status, answer.code) == (503, "bus_down")


async def read_events(w: World, count: int, **headers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with w.http.get(f"{w.url}/v1/events", headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


async def test_events_stream_and_resume_from_memory_and_from_the_stream():
    async with world() as w:
        await w.seat("s0", "llama")
        live = asyncio.create_task(read_events(w, 2))
        await until(lambda: w.router.events._readers, what="a reader follows the event log")
        await w.manager.activate("s0")
        first, second = await live
        assert [e["type"] for e in (first, second)] == ["ai.kyb.v1.seat-leased", "ai.kyb.v1.seat-activated"]
        assert second["state"] == "active"
        assert await read_events(w, 1, Last_Event_ID=first["id"]) == [second]
        # An unknown id: the stream returns all events that it has.
        assert await read_events(w, 2, Last_Event_ID="unknown") == [first, second]


async def test_seats_returns_nodes_groups_and_models():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.ACTIVE, resource="kyb.ai/gpu-1x-seat")
        await w.seat("s1", "qwen")
        body = (await w.call("GET", "/v1/seats")).json
        (node,) = body["nodes"]
        (group,) = node["groups"]
        assert (node["node"], group["group"], group["active"], group["seats"]) == ("n1", "G0", ["s0"], ["s0", "s1"])
        assert [(m["model"], m["state"]) for m in body["models"]] == [("llama", "active"), ("qwen", "parked")]
        one = await w.call("GET", "/v1/models/qwen")
        assert (one.json["id"], one.json["state"]) == ("qwen", "parked")
        assert (await w.call("GET", "/v1/models/unknown")).status == 404


@pytest.mark.parametrize("name", ["s0", "seat/s0", "org/llama", "model/org/llama", "model%2Forg%2Fllama"])
async def test_a_seat_has_several_names(name: str):
    async with world() as w:
        await w.seat("s0", "org/llama")
        answer = await w.call("POST", f"/v1/seats/{name}/park", headers={"X-Request-Id": "op-7"})
        assert (answer.status, answer.json["seat"], answer.json["op"]) == (202, "s0", "op1")
        (command,) = w.manager.of(ParkSeat)
        assert (command.actor, command.cause, command.node) == ("operator", "op-7", "n1")
        audit = await until(lambda: w.manager.of(AuditRecord), what="an audit record")
        assert (audit[0].verb, audit[0].seat, audit[0].accepted, audit[0].remote) == ("park", "s0", True, "127.0.0.1")


async def test_an_ambiguous_name_lists_the_candidates():
    async with world() as w:
        await w.seat("s0", "llama")
        await w.seat("s1", "llama")
        answer = await w.call("POST", "/v1/seats/llama/activate")
        assert (answer.status, answer.code) == (409, "ambiguous_name")
        assert "seat/s0, seat/s1" in answer.json["error"]["message"]
        assert (await w.call("POST", "/v1/seats/unknown/activate")).code == "seat_not_found"


async def test_refused_and_unanswered_commands_return_the_reason():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.reply = CommandReply(accepted=False, code="quarantined", reason="foreign process 4711")
        answer = await w.call("POST", "/v1/seats/s0/activate")
        assert (answer.status, answer.code) == (409, "quarantined")
        assert answer.json["error"]["message"] == "seat s0: foreign process 4711"
        w.manager.reply = CommandReply(accepted=False, code="pinned", reason="seat s0 is pinned; unpin it first")
        answer = await w.call("POST", "/v1/seats/s0/park")
        assert answer.json["error"]["message"] == "seat s0 is pinned; unpin it first"
        await w.manager.put("s9", node="elsewhere", model="far")
        await until(
            lambda: "elsewhere.s9" in w.router.traffic.table.upstreams,
            what="the router knows the seat of the other node",
        )
        answer = await w.call("POST", "/v1/seats/s9/pin")
        assert (answer.status, answer.code) == (503, "manager_unanswered")
        w.bus.cut()
        answer = await w.call("POST", "/v1/seats/s0/unpin")
        assert (answer.status, answer.code) == (503, "bus_down")


async def test_a_manager_that_is_not_ready_makes_a_command_one_to_repeat():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.reply = CommandReply(accepted=False, code="not-ready", reason="just started", retry_after_seconds=0.5)
        answer = await w.call("POST", "/v1/seats/s0/park")
        assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "not-ready", "1")


async def test_an_operation_is_sent_to_the_manager_of_its_node_and_its_repetition_is_not_audited():
    async with world() as w:
        await w.seat("s0", "llama")
        status = OrderStatus(op="op-1", verb="drain", target="G0", phase="draining")
        w.manager.reply = CommandReply(accepted=True, op="op-1", order=status)
        body = {"op": "op-1", "purpose": "upgrade"}
        for path in ("groups/G0", "groups/group/G0", "groups/n1/G0"):
            answer = await w.call("POST", f"/v1/{path}/drain", json=body)
            assert (answer.status, answer.json["operation"]["phase"]) == (202, "draining")
            w.manager.reply = w.manager.reply.model_copy(update={"repeated": True})
        assert {(one.node, one.group, one.purpose, one.op) for one in w.manager.of(DrainNode)} == {
            ("n1", "G0", "upgrade", "op-1")
        }
        await w.call("POST", "/v1/nodes/node/n1/resume")
        assert [(one.node, one.group, one.op, one.actor) for one in w.manager.of(ResumeNode)] == [
            ("n1", "", "", "operator")
        ]
        await w.call("POST", "/v1/seats/llama/migrate", json={"to": "group/G1", "dry_run": True})
        assert [(one.seat, one.to, one.dry_run) for one in w.manager.of(MigrateSeat)] == [("s0", "G1", True)]
        w.manager.reply = CommandReply(accepted=False, code="pinned", reason="pinned s0 would stay")
        refused = await w.call("POST", "/v1/nodes/n1/drain")
        assert (refused.status, refused.code, refused.json["error"]["message"]) == (
            409,
            "pinned",
            "pinned s0 would stay",
        )
        audits = await until(lambda: len(w.manager.of(AuditRecord)) == 2, what="two audit records")
        assert audits
        assert [(one.verb, one.accepted) for one in w.manager.of(AuditRecord)] == [("drain", True), ("drain", False)]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("seats/llama/migrate", {}, "group_missing"),
        ("seats/llama/migrate", {"to": 7}, "invalid_field"),
        ("seats/unknown/migrate", {"to": "G1"}, "seat_not_found"),
        ("nodes/n1/drain", {"purpose": "fun"}, "purpose_unknown"),
        ("nodes/n1/drain", {"force": True}, "invalid_field"),
        ("nodes/n1/resume", {"purpose": "upgrade"}, "invalid_field"),
        ("nodes/n1/resume", {"op": ""}, "invalid_field"),
        ("nodes/nowhere/drain", {}, "node_not_found"),
    ],
)
async def test_an_operation_that_cannot_be_sent_is_refused(path: str, body: dict[str, Any], code: str):
    async with world() as w:
        await w.seat("s0", "llama")
        answer = await w.call("POST", f"/v1/{path}", json=body)
        assert answer.code == code
        assert not w.manager.of(DrainNode)


async def test_an_unknown_node_is_refused_with_twenty_names_at_most():
    async with world() as w:
        for number in range(30):
            await w.manager.put(f"s{number}", node=f"node-{number:02}")
        await until(lambda: len(w.router.traffic.table.nodes) == 30, what="the router knows all nodes")
        answer = await w.call("POST", "/v1/nodes/nowhere/drain", json={})
        assert answer.json["error"]["message"].endswith("node-18, node-19 and 10 more: kyb status")


async def test_a_refusal_for_a_drain_ends_with_the_drain_and_another_seat_of_the_model_serves_meanwhile():
    async with world() as w:
        await w.seat("s0", "llama")
        drained = "group G0 is drained for upgrade by alice; it ends with: kyb resume group G0"
        await w.manager.put("s0", drained=drained, blocked=drained)
        w.manager.reply = CommandReply(accepted=False, code="drained", reason=drained)
        refused = await w.ask("llama")
        assert (refused.status, refused.code) == (503, "activation_refused")
        assert drained in refused.json["error"]["message"]
        assert "Retry-After" in refused.headers
        w.manager.reply = None
        await w.seat("s1", "llama", SeatState.ACTIVE)
        assert (await w.ask("llama")).headers["x-kyb-seat"] == "s1"
        await w.manager.put("s1", SeatState.QUARANTINED)
        row = w.manager.rows["s0"]
        await w.manager.put("s0", epoch=row.epoch, drained="", blocked="")
        await until(lambda: w.upstream("s1").record.state is SeatState.QUARANTINED, what="the router knows of s1")
        await until(lambda: not w.upstream("s0").record.drained, what="the router knows that the drain is over")
        assert (await w.ask("llama")).headers["x-kyb-seat"] == "s0"


async def test_a_group_that_several_nodes_have_must_name_its_node():
    async with world() as w:
        await w.seat("s0", "llama")
        await w.manager.put("s9", node="elsewhere", model="far", group="G0")
        await until(
            lambda: "elsewhere.s9" in w.router.traffic.table.upstreams, what="the seat of the other node is known"
        )
        answer = await w.call("POST", "/v1/groups/G0/drain")
        assert (answer.status, answer.code) == (409, "ambiguous_name")
        assert "elsewhere/G0, n1/G0" in answer.json["error"]["message"]


async def test_events_show_operations():
    async with world() as w:
        async with w.http.get(f"{w.url}/v1/events") as stream:
            status = OrderStatus(op="op-1", verb="drain", phase="done", outcome="done")
            await w.manager.bus.publish(OrderChanged(cause="c", node="n1", op="op-1", order=status))
            async with asyncio.timeout(20):
                async for line in stream.content:
                    if line.startswith(b"data: "):
                        break
        event = json.loads(line[6:])
        assert (event["type"], event["order"]["phase"]) == ("ai.kyb.v1.order-changed", "done")


async def test_metrics_have_the_published_names():
    async with world() as w:
        await w.seat("s0", "llama")
        assert (await w.ask("llama")).status == 200
        text = (await w.call("GET", "/metrics")).body.decode()
        assert 'kybernate_router_requests_total{code="200",model="llama"} 1.0' in text
        assert 'kybernate_router_held_requests{model="llama"} 0.0' in text
        labels = {"hold_seconds": LABELS, "time_to_first_byte_seconds": LABELS, "control_overhead_seconds": ""}
        for name, label in labels.items():
            assert f"kybernate_router_{name}_count{label} 1.0" in text
