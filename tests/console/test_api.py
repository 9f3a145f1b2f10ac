"""The operators' API: state, commands, events, and what it asks routers."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from kybernate.dev.nats_server import free_port
from kybernate.http.server import HttpServer
from kybernate.messages import (
    AuditRecord,
    CommandReply,
    DrainNode,
    GroupDecided,
    MigrateSeat,
    OrderStatus,
    ParkSeat,
    Presence,
    ResumeNode,
)
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.console.events import EventLog, as_sse
from tests.console.world import Shown, shown
from tests.keys import key_file
from tests.test_tls import make as make_certificate
from tests.until import until


async def read_events(w: Shown, count: int, **headers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with w.http.get(f"{w.url}/v1/events", headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


async def test_events_stream_and_resume_from_memory_and_from_the_stream(w: Shown):
    await w.seat("s0", "llama")
    live = asyncio.create_task(read_events(w, 2))
    await until(lambda: w.console.events._readers, what="a reader follows the event log")
    await w.manager.activate("s0")
    first, second = await live
    assert [e["type"] for e in (first, second)] == ["ai.kyb.v1.seat-leased", "ai.kyb.v1.seat-activated"]
    assert second["state"] == "active"
    assert await read_events(w, 1, Last_Event_ID=first["id"]) == [second]
    # An unknown id: the stream returns all events that it has.
    assert await read_events(w, 2, Last_Event_ID="unknown") == [first, second]


async def test_seats_returns_nodes_groups_and_models(w: Shown):
    await w.seat("s0", "llama", SeatState.ACTIVE, resource="kyb.ai/gpu-1x-seat")
    await w.seat("s1", "qwen")
    body = (await w.call("GET", "/v1/seats")).json
    (node,) = body["nodes"]
    (group,) = node["groups"]
    assert (node["node"], group["group"], group["active"], group["seats"]) == ("n1", "G0", ["s0"], ["s0", "s1"])
    assert [(m["model"], m["state"]) for m in body["models"]] == [("llama", "active"), ("qwen", "parked")]


@pytest.mark.parametrize("name", ["s0", "seat/s0", "org/llama", "model/org/llama", "model%2Forg%2Fllama"])
async def test_a_seat_has_several_names(w: Shown, name: str):
    await w.seat("s0", "org/llama")
    answer = await w.call("POST", f"/v1/seats/{name}/park", headers={"X-Request-Id": "op-7"})
    assert (answer.status, answer.json["seat"], answer.json["op"]) == (202, "s0", "op1")
    (command,) = w.manager.of(ParkSeat)
    assert (command.actor, command.cause, command.node) == ("operator", "op-7", "n1")
    audit = await until(lambda: w.manager.of(AuditRecord), what="an audit record")
    assert (audit[0].verb, audit[0].seat, audit[0].accepted, audit[0].remote) == ("park", "s0", True, "127.0.0.1")


async def test_an_ambiguous_name_lists_the_candidates(w: Shown):
    await w.seat("s0", "llama")
    await w.seat("s1", "llama")
    answer = await w.call("POST", "/v1/seats/llama/activate")
    assert (answer.status, answer.code) == (409, "ambiguous_name")
    assert "seat/s0, seat/s1" in answer.json["error"]["message"]
    assert (await w.call("POST", "/v1/seats/unknown/activate")).code == "seat_not_found"
    w.console.cluster.complete = False
    for path in ("seats/unknown/activate", "groups/n9/G7/drain", "groups/G7/drain"):
        answer = await w.call("POST", f"/v1/{path}")
        assert answer.status in (503, 202), f"a roster that is still read denies nothing: {answer.json}"
    assert (await w.call("POST", "/v1/seats/unknown/activate")).code == "roster_incomplete"


async def test_a_state_that_no_seat_has_is_refused_with_those_that_are(w: Shown):
    answer = await w.call("GET", "/v1/seats?state=zzz")
    assert (answer.status, answer.code) == (400, "invalid_query")
    assert "state='zzz' is none of free, waiting, starting" in answer.json["error"]["message"]
    assert [(await w.call("GET", f"/v1/seats?state={state}")).status for state in SeatState] == [200] * len(SeatState)


async def test_refused_and_unanswered_commands_return_the_reason(w: Shown):
    await w.seat("s0", "llama")
    w.manager.reply = CommandReply(accepted=False, code="quarantined", reason="group G0: foreign process 4711")
    answer = await w.call("POST", "/v1/seats/s0/activate")
    assert (answer.status, answer.code) == (409, "quarantined")
    assert answer.json["error"]["message"] == "group G0: foreign process 4711", "the manager names what it is about"
    w.manager.reply = CommandReply(accepted=False, code="pinned", reason="llama is pinned; unpin it first")
    answer = await w.call("POST", "/v1/seats/s0/park")
    assert answer.json["error"]["message"] == "llama is pinned; unpin it first"
    await w.manager.put("s9", node="elsewhere", model="far")
    await w.known("s9", "elsewhere")
    answer = await w.call("POST", "/v1/seats/s9/pin")
    assert (answer.status, answer.code) == (503, "manager_unanswered")
    w.bus.cut()
    answer = await w.call("POST", "/v1/seats/s0/unpin")
    assert (answer.status, answer.code) == (503, "bus_down")


async def test_a_manager_that_is_not_ready_makes_a_command_one_to_repeat(w: Shown):
    await w.seat("s0", "llama")
    w.manager.reply = CommandReply(accepted=False, code="not-ready", reason="just started", retry_after_seconds=0.5)
    answer = await w.call("POST", "/v1/seats/s0/park")
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "not-ready", "1")


async def test_an_order_is_sent_to_the_manager_of_its_node_and_audited(w: Shown):
    await w.seat("s0", "llama")
    status = OrderStatus(verb="drain", target="G0", text="llama drains")
    w.manager.reply = CommandReply(accepted=True, order=status)
    body = {"purpose": "upgrade"}
    for path in ("groups/G0", "groups/group/G0", "groups/n1/G0"):
        answer = await w.call("POST", f"/v1/{path}/drain", json=body)
        assert (answer.status, answer.json["operation"]["text"]) == (202, "llama drains")
    assert {(one.node, one.group, one.purpose) for one in w.manager.of(DrainNode)} == {("n1", "G0", "upgrade")}
    await w.call("POST", "/v1/nodes/node/n1/resume")
    assert [(one.node, one.group, one.actor) for one in w.manager.of(ResumeNode)] == [("n1", "", "operator")]
    await w.call("POST", "/v1/seats/llama/migrate", json={"to": "group/G1"})
    assert [(one.seat, one.to) for one in w.manager.of(MigrateSeat)] == [("s0", "G1")]
    w.manager.reply = CommandReply(accepted=False, code="pinned", reason="pinned s0 would stay")
    refused = await w.call("POST", "/v1/nodes/n1/drain")
    assert (refused.status, refused.code) == (409, "pinned")
    await until(lambda: len(w.manager.of(AuditRecord)) == 6, what="six audit records")
    told = [(one.verb, one.accepted) for one in w.manager.of(AuditRecord)]
    assert told == [*[("drain", True)] * 3, ("resume", True), ("migrate", True), ("drain", False)]


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
async def test_an_operation_that_cannot_be_sent_is_refused(w: Shown, path: str, body: dict[str, Any], code: str):
    await w.seat("s0", "llama")
    answer = await w.call("POST", f"/v1/{path}", json=body)
    assert answer.code == code
    assert not w.manager.of(DrainNode)


async def test_an_unknown_node_is_refused_with_twenty_names_at_most(w: Shown):
    for number in range(30):
        await w.manager.put(f"s{number}", node=f"node-{number:02}")
    await until(lambda: len(w.console.cluster.seats.nodes) == 30, what="the console knows all nodes")
    answer = await w.call("POST", "/v1/nodes/nowhere/drain", json={})
    assert answer.json["error"]["message"].endswith("node-18, node-19 and 10 more: kyb status")


async def test_a_group_that_several_nodes_have_must_name_its_node(w: Shown):
    await w.seat("s0", "llama")
    await w.manager.put("s9", node="elsewhere", model="far", group="G0")
    await w.known("s9", "elsewhere")
    answer = await w.call("POST", "/v1/groups/G0/drain")
    assert (answer.status, answer.code) == (409, "ambiguous_name")
    assert "elsewhere/G0, n1/G0" in answer.json["error"]["message"]


async def test_the_load_of_all_sources_is_shown_at_its_seat(w: Shown):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    await w.seat("s1", "qwen")
    engine.gate.clear()
    running = w.ask("llama")
    body = {"specversion": "1.0", "id": "e1", "source": "litellm", "data": {"model": "qwen", "waiting": 5}}
    assert (await w.fetch("POST", f"{w.router.url}/v1/signals", json=body)).status == 202

    async def loads() -> list[tuple[str, int, int]]:
        seats = (await w.call("GET", "/v1/seats")).json["seats"]
        return [(one["seat"], one["waiting"], one["in_flight"]) for one in seats]

    async def complete() -> bool:
        return await loads() == [("s0", 0, 1), ("s1", 5, 0)]

    await until(complete, what="the console shows both")
    engine.gate.set()
    assert (await running).status == 200


async def test_routers_that_are_alive_are_shown_with_what_is_wrong(w: Shown):
    await until(lambda: w.console.cluster.routers(0.0), what="the router reports itself")
    body = (await w.call("GET", "/v1/routers")).json
    assert body == {"routers": [{"router": "router-0", "url": w.router.url, "unmet": {}, "faults": []}]}
    w.router.health.conditions["broken"] = lambda: "it is broken"
    w.router.health.notes["files"] = lambda: "it takes 1 connection at a time"

    async def reported() -> bool:
        row = (await w.call("GET", "/v1/routers")).json["routers"][0]
        found = row["unmet"], row.get("notes")
        return found == ({"broken": "it is broken"}, {"files": "it takes 1 connection at a time"})

    await until(reported, what="its presence says what is wrong")


async def test_an_address_of_the_bus_gets_no_request():
    asked = list[str]()

    async def listen(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", listen)
    async with HttpServer(app, "127.0.0.1", 0) as thief, shown(router_url="") as w:
        forged = Presence(cause="p", component="router", instance="aaa", incarnation="x", url=thief.url)
        await w.bus.publish(forged)
        await until(lambda: w.console.cluster.routers(0.0)[:1] == [forged], what="the console has received it")
        headers = {"Authorization": "Bearer secret"}
        for path in ("/v1/routers", "/v1/usage", "/ui/usage", "/readyz"):
            await w.call("GET", path, headers=headers)
        await w.console.problems._examine()
        assert (await w.call("POST", "/ui/chat", headers=headers, json={"model": "m"})).code == "no_router"
        assert asked == []


@pytest.mark.parametrize("url", ["ftp://h", "http://h\n", "//h", "http://h\x1b[2J", "http://" + "h" * 600])
def test_a_presence_or_row_with_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ValueError, match="url"):
        Presence(cause="p", component="router", instance="a", incarnation="x", url=url)
    for field in ("manager_url", "endpoint"):
        with pytest.raises(ValueError, match=field):
            SeatRecord(node="n", seat="s", state=SeatState.ACTIVE, **{field: url})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_the_renewed_certificate_of_a_router_is_trusted_without_a_restart(tmp_path: Path):
    for ca in ("old", "new"):
        make_certificate(tmp_path, ca=ca)
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes((tmp_path / "old.crt").read_bytes())
    async with shown(router={"tls_cert_file": tmp_path / "new-server.crt"}, router_ca_file=trusted) as w:
        refused = await w.call("POST", "/ui/chat", json={"model": "m"})
        assert (refused.status, refused.code) == (502, "router_unanswered")
        assert "certificate verify failed" in refused.json["error"]["message"]
        trusted.write_bytes((tmp_path / "new.crt").read_bytes())

        async def answers() -> bool:
            return (await w.call("POST", "/ui/chat", json={"model": "m"})).code == "model_not_found"

        await until(answers, what="the console trusts the renewed certificate")


SCOPED = [
    ("GET", "/v1/seats", {"board", "ops"}),
    ("GET", "/v1/why", {"board", "ops"}),
    ("GET", "/v1/events", {"board", "ops"}),
    ("GET", "/v1/history", {"board", "ops"}),
    ("GET", "/v1/requests/r", {"board", "ops"}),
    ("GET", "/v1/routers", {"board", "ops"}),
    ("POST", "/v1/seats/m/park", {"ops"}),
    ("POST", "/v1/seats/m/migrate", {"ops"}),
    ("POST", "/v1/groups/G0/drain", {"ops"}),
    ("POST", "/v1/nodes/n1/resume", {"ops"}),
]


@pytest.mark.parametrize(("method", "path", "allowed"), SCOPED)
async def test_each_route_needs_its_scope(tmp_path: Path, method: str, path: str, allowed: set[str]):
    file, keys = key_file(tmp_path, app=["infer", "signals"], board=["view"], ops=["admin"])
    async with shown(api_keys_file=file) as w:
        assert (await status(w, method, path)) == 401
        for name, key in keys.items():
            answered = await status(w, method, path, Authorization=f"Bearer {key}")
            assert (answered != 403) == (name in allowed), name


async def test_a_body_without_a_key_is_refused_unread(tmp_path: Path):
    async with shown(api_keys_file=key_file(tmp_path, ops=["admin"])[0]) as w:
        reader, writer = await w.connect()
        writer.write(b"POST /v1/seats/m/park HTTP/1.1\r\nHost: c\r\nContent-Length: 9\r\n\r\n")
        assert (await asyncio.wait_for(reader.readexactly(12), 5))[9:] == b"401"
        writer.close()


async def status(w: Shown, method: str, path: str, **headers: str) -> int:
    async with w.http.request(method, w.url + path, headers=headers) as answer:
        return answer.status


async def test_with_keys_and_without_an_operations_port_there_is_no_page(tmp_path: Path):
    keys, _ = key_file(tmp_path, ops=["admin"])
    async with shown(api_keys_file=keys) as w:
        assert w.console.page_url == ""
        assert (await w.call("GET", "/ui/")).status == 404
        assert (await w.call("GET", "/readyz")).status == 200
    async with shown() as w:
        assert (await w.call("GET", "/ui/")).status == 200
        async with w.http.get(w.url + "/") as answer:
            assert (answer.status, answer.url.path) == (200, "/ui/")
        assert b"kybernate_bus_troubles" in (await w.call("GET", "/metrics")).body
    async with shown(api_keys_file=keys, health_port=free_port()) as w:
        assert [(await w.call("GET", path)).status for path in ("/ui/", "/metrics", "/healthz")] == [404, 404, 200]


async def test_a_router_says_where_the_operators_api_is(w: Shown):
    for method, path in (("GET", "seats"), ("GET", "why"), ("GET", "requests/r"), ("POST", "seats/s0/park")):
        answer = await w.fetch(method, f"{w.router.url}/v1/{path}")
        assert (answer.status, answer.code) == (404, "at_the_console"), path
        assert "8781" in answer.json["error"]["message"]


async def test_a_console_that_lost_nats_shows_what_it_knew_and_says_so(w: Shown):
    await w.seat("s0", "llama")
    w.bus.cut()
    assert [seat["seat"] for seat in (await w.call("GET", "/v1/seats")).json["seats"]] == ["s0"]
    ready = await w.call("GET", "/readyz")
    assert (ready.status, list(ready.json["notes"])) == (200, ["bus"])


@pytest.mark.parametrize("form", ["ops-7", "{}", "Bearer {}"])
async def test_an_audit_record_names_the_key_and_never_holds_it(tmp_path: Path, form: str):
    file, keys = key_file(tmp_path, ops=["admin"])
    key = keys["ops"]
    async with shown(api_keys_file=file) as w:
        await w.seat("s0", "m")
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": form.format(key)}
        answer = await w.call("POST", "/v1/seats/m/park", headers=headers)
        assert answer.status == 202
        [record] = await until(lambda: w.manager.of(AuditRecord), what="an audit record")
        assert (record.actor, w.manager.of(ParkSeat)[0].actor) == ("ops", "ops")
        assert (record.cause == "ops-7") == (form == "ops-7")
        assert key not in f"{w.manager.received} {answer.body!r} {answer.headers}"


async def test_changed_keys_are_applied(tmp_path: Path):
    file, old = key_file(tmp_path, a=["view"])
    async with shown(api_keys_file=file) as w:
        _, new = key_file(tmp_path, b=["view"])

        async def applied() -> bool:
            return await status(w, "GET", "/v1/seats", **{"X-Kyb-Key": new["b"]}) == 200

        await until(applied, what="the new key is known")
        assert await status(w, "GET", "/v1/seats", **{"X-Kyb-Key": old["a"]}) == 401


async def test_events_that_arrive_together_are_one_write_and_no_event_comes_twice():
    first, known, last = (GroupDecided(cause="c", node="n", group="G0", decision="stay", id=name) for name in "abc")
    reader: asyncio.Queue[Any] = asyncio.Queue()
    for event in (first, known, last, None):
        reader.put_nowait(event)
    pieces = [piece async for piece in EventLog(cast(Any, None), cast(Any, None))._live(reader, {"b"})]
    assert pieces == [as_sse(first) + as_sse(last)]
