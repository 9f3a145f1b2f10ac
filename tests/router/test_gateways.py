"""Routes for other gateways: hold, wake, signals; and the list of models."""

import asyncio
import json
import time
from typing import Any

import pytest

from kybernate.clock import Clock
from kybernate.messages import ActivateSeat, CommandReply, DrainAck, TrafficSignal
from kybernate.seat import SeatState
from services.router.auth import ANYBODY
from services.router.core.tenants import Tenants
from services.router.gateways import GatewayApi
from services.router.limits import TenantLimits
from services.router.settings import RouterSettings
from tests.router.world import World, world
from tests.until import until


def cloud_event(**data: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": "e1", "type": "ai.kyb.v1.signal", "source": "litellm/pod-3", "data": data}


async def test_hold_waits_for_the_model_and_names_the_engine():
    async with world(permit_seconds=0.3) as w:
        engine = await w.seat("s0", "llama")
        answer = await w.call("GET", "/v1/hold?model=llama&timeout=30s")
        assert answer.status == 200
        assert answer.json["endpoint"] == engine.endpoint
        assert (answer.json["seat"], answer.json["valid_ms"]) == ("s0", 300)
        assert answer.json["epoch"] == w.manager.rows["s0"].epoch


async def test_parking_waits_for_a_permit():
    async with world(permit_seconds=0.3) as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        assert (await w.call("GET", "/v1/hold?model=llama")).status == 200
        await w.manager.move("s0", SeatState.DRAINING)
        await w.last(DrainAck, lambda ack: ack.in_flight == 0)
        assert w.manager.of(DrainAck)[0].in_flight == 1


async def test_a_page_of_a_browser_takes_no_permit(w: World):
    """Of an image of a page elsewhere a browser marks nothing where this port has no TLS."""
    await w.seat("s0", "llama")
    for query in ("model=llama&timeout=1s", "model=llama&auth=1"):
        refused = await w.call("GET", f"/v1/hold?{query}", headers={"User-Agent": "Mozilla/5.0"})
        assert refused.status == 403
    assert not w.manager.of(ActivateSeat)
    gateway = {"User-Agent": "Mozilla/5.0", "X-Model": "llama"}  # nginx passes on what its caller sent
    assert (await w.call("GET", "/v1/hold?model=llama&auth=1", headers=gateway)).status == 200


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("model=unknown", 404, "model_not_found"),
        ("", 400, "model_missing"),
        ("model=llama&timeout=soon", 400, "invalid_timeout"),
        ("model=llama&timeout=50ms", 503, "hold_timeout"),
    ],
)
async def test_hold_returns_an_error_with_its_reason(w: World, query: str, status: int, code: str):
    await w.seat("s0", "llama")
    w.manager.auto = False
    answer = await w.call("GET", f"/v1/hold?{query}")
    assert (answer.status, answer.code) == (status, code)
    assert ("Retry-After" in answer.headers) == (status == 503)


async def test_hold_for_auth_request_answers_2xx_or_403_only(w: World):
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


async def test_a_gateway_that_leaves_ends_its_hold(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    call = asyncio.create_task(w.call("GET", "/v1/hold?model=llama"))
    await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
    call.cancel()
    await until(lambda: w.held("llama") == 0, what="requests for llama that the router holds: 0")


async def test_wake_requests_an_activation_and_does_not_wait(w: World):
    await w.seat("s0", "llama")
    answer = await w.call("POST", "/v1/wake", json={"model": "llama"})
    assert (answer.status, answer.json["state"]) == (202, "waking")
    await until(lambda: w.upstream("s0").record.state is SeatState.ACTIVE, what="the seat is active")
    assert w.manager.of(ActivateSeat)[0].cause == answer.json["cause"]
    again = await w.call("POST", "/v1/wake", json={"model": "llama"})
    assert (again.status, again.json["state"]) == (200, "active")
    assert (await w.call("POST", "/v1/wake", json={"model": "unknown"})).status == 404


async def test_a_signal_becomes_a_level_of_its_source(w: World):
    await w.seat("s0", "llama")
    await w.seat("s1", "qwen")
    await w.seat("s2", "qwen")
    events = [cloud_event(model="llama", waiting=5, inflight=2, oldest_wait_ms=1200), cloud_event(model="qwen")]
    answer = await w.call("POST", "/v1/signals", json=events)
    assert (answer.status, answer.json) == (202, {"accepted": 2, "errors": []})
    await w.last(TrafficSignal, lambda level: level.model == "qwen")
    one, two = w.manager.of(TrafficSignal)
    assert (one.source, one.seat, one.waiting, one.in_flight, one.cause) == ("litellm/pod-3", "s0", 5, 2, "e1")
    assert (one.oldest_wait_seconds, one.ttl_seconds) == (1.2, 15.0)
    assert (two.model, two.seat) == ("qwen", None)
    assert two.seq > one.seq


async def test_invalid_signals_of_a_batch_are_listed_with_their_index(w: World):
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


async def test_a_refusal_for_a_drain_ends_with_the_drain_and_another_seat_of_the_model_serves_meanwhile(w: World):
    await w.seat("s0", "llama")
    drained = "group G0 is drained for upgrade by alice; it ends with: kyb resume group G0"
    await w.manager.put("s0", drained=drained, blocked=drained)
    w.manager.reply = CommandReply(accepted=False, code="drained", reason=drained)
    refused = await w.ask("llama")
    assert (refused.status, refused.code, "Retry-After" in refused.headers) == (503, "activation_refused", True)
    assert drained in refused.json["error"]["message"]
    w.manager.reply = None
    await w.seat("s1", "llama", SeatState.ACTIVE)
    assert (await w.ask("llama")).headers["x-kyb-seat"] == "s1"
    await w.manager.put("s1", SeatState.QUARANTINED)
    await w.manager.put("s0", epoch=w.manager.rows["s0"].epoch, drained="", blocked="")
    await until(lambda: w.upstream("s1").record.state is SeatState.QUARANTINED, what="the router knows of s1")
    await until(lambda: not w.upstream("s0").record.drained, what="the router knows that the drain is over")
    assert (await w.ask("llama")).headers["x-kyb-seat"] == "s0"


async def test_a_model_has_the_state_of_its_best_seat(w: World):
    await w.seat("s0", "qwen")
    one = await w.call("GET", "/v1/models/qwen")
    assert (one.json["id"], one.json["state"]) == ("qwen", "parked")
    assert (await w.call("GET", "/v1/models/unknown")).status == 404
    assert "incomplete" not in (await w.call("GET", "/v1/models")).json
    w.router.dispatcher.traffic.trust.written("n9", 7, 1, time.monotonic())
    assert (await w.call("GET", "/v1/models")).json["incomplete"] == "not all rows of node n9 have arrived"
    assert (await w.call("GET", "/v1/models/unknown")).status == 503


async def test_metrics_have_the_published_names(w: World):
    await w.seat("s0", "llama")
    assert (await w.ask("llama")).status == 200
    text = (await w.call("GET", "/metrics")).body.decode()
    assert 'kybernate_router_requests_total{code="200",model="llama"} 1.0' in text
    assert 'kybernate_router_held_requests{model="llama"} 0.0' in text
    of_model = '{model="llama",tier="standard"}'
    labels = {"hold_seconds": of_model, "time_to_first_byte_seconds": of_model, "control_overhead_seconds": ""}
    for name, label in labels.items():
        assert f"kybernate_router_{name}_count{label} 1.0" in text


def test_a_router_with_no_keys_remembers_no_wakes() -> None:
    limits = TenantLimits(Tenants(), Any, lambda _: None)  # type: ignore[arg-type]
    api = GatewayApi(RouterSettings(), Clock(1.0), Any, Any, limits)  # type: ignore[arg-type]
    for at in range(3):
        api._wakes(ANYBODY, f"no-such-model-{at}")
    assert not any(api._waking.values())
