"""Invalid requests and responses: each caller gets one clear error, and the router goes on."""

import asyncio
import gzip
import json

import pytest

from kybernate.messages import ActivateSeat, TrafficSignal
from kybernate.seat import SeatState
from tests.router.world import World, world

CALL = b'{"model": "llama"}'


async def raw(w: World, path: str, *headers: bytes, body: bytes = CALL) -> bytes:
    """Send a POST that no client library would send; return the raw response."""
    reader, writer = await w.connect()
    length = b"Content-Length: %d" % len(body)
    head = (b"POST " + path.encode() + b" HTTP/1.1", b"Host: x", b"Connection: close", length, *headers)
    writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_request_id_that_is_not_printable_is_replaced(w: World):
    await w.seat("s0", "llama")
    assert b" 200 " in await raw(w, "/v1/completions", b"X-Request-Id: caf\xe9")
    (asked,) = w.manager.of(ActivateSeat)
    assert len(asked.cause) == 32
    assert (await w.call("POST", "/v1/wake", data=CALL, headers={"X-Request-Id": "x" * 600})).json["cause"] != "x" * 600


async def test_unknown_models_are_not_labels_of_metrics():
    async with world(connected=False, hold_seconds=0.1) as w:
        assert (await w.ask("made-up")).code == "hold_timeout"
        text = (await w.call("GET", "/metrics")).body.decode()
        assert 'kybernate_router_requests_total{code="503",model="unknown"} 1.0' in text
        assert "made-up" not in text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/wake"])
async def test_a_compressed_body_is_refused_with_the_remedy(w: World, path: str):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    answer = await raw(w, path, b"Content-Encoding: GZip", body=gzip.compress(CALL))
    assert b" 415 " in answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["type"]) == ("unsupported_content_encoding", "invalid_request_error")
    assert "'GZip': send the body uncompressed" in error["message"]
    assert not engine.requests


async def test_a_body_whose_encoding_is_identity_passes_without_this_header(w: World):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    for headers in ((b"Content-Encoding: Identity",), (b"Content-Encoding: identity", b"Content-Encoding: gzip")):
        for path in ("/v1/completions", "/v1/wake"):
            assert b" 200 " in await raw(w, path, *headers)
    assert not any("Content-Encoding" in head for head in engine.headers)


async def test_an_absolute_request_target_is_served_like_a_path(w: World):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    assert b" 200 " in await raw(w, "http://elsewhere:80/v1/completions?a=%20b")


@pytest.mark.parametrize(
    "signal",
    [
        b'{"source": "\\ud800", "data": {"model": "llama"}}',
        b'{"source": "s", "data": {"model": "llama", "window_seconds": 1e999}}',
        b'{"source": "s", "data": {"model": "llama", "oldest_wait_ms": Infinity}}',
        b'{"source": "s", "data": {"model": "llama", "waiting": 1' + b"0" * 400 + b"}}",
        b"[" * 100_000,
    ],
)
async def test_signals_with_invalid_numbers_or_nesting_are_bad_requests(w: World, signal: bytes):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    answer = await w.call("POST", "/v1/signals", data=signal, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


async def test_a_signal_with_an_unprintable_id_is_accepted(w: World):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    signal = {"id": "\ud800", "source": "elsewhere", "data": {"model": "llama", "waiting": 3}}
    assert (await w.call("POST", "/v1/signals", json=signal)).status == 202
    await w.last(TrafficSignal, lambda level: level.source == level.cause == "elsewhere")


async def test_a_wrong_method_gets_the_allowed_ones(w: World):
    answer = await w.call("GET", "/v1/chat/completions")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_an_internal_error_has_the_openai_shape(w: World):
    w.router.traffic.table.models["broken"] = None  # type: ignore[assignment]
    answer = await w.call("GET", "/v1/models")
    assert (answer.status, answer.code) == (500, "internal_error")
    del w.router.traffic.table.models["broken"]


async def test_a_call_that_arrives_while_the_router_stops_is_rejected(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    w.router.front.stop()
    answer = await w.ask("llama")
    assert (answer.status, answer.code) == (503, "router_stopping")


async def test_a_refused_head_leaves_no_body_before_the_next_answer(w: World):
    reader, writer = await w.connect()
    writer.write(b"HEAD /nowhere HTTP/1.1\r\nHost: r\r\n\r\nGET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(4096), 5)
    assert b" 404 " in answer
    assert b"Connection: close" in answer
    assert not await asyncio.wait_for(reader.read(), 5)
    writer.close()
