"""Traces of requests: whose trace they continue, what engines get of it, and what is never passed on."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kybernate.api_keys import dump, make
from kybernate.messages import ActivateSeat
from kybernate.seat import SeatState
from tests.router.world import world
from tests.spans import Spans, parent, trace_id, traceparent
from tests.until import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


async def test_a_held_request_continues_its_callers_trace_to_the_engine():
    with Spans() as spans:
        async with world(tracer=spans.tracer, access_log=True) as w:
            engine = await w.seat("s0", "llama")
            w.manager.auto = False
            with capture_logs() as logs:
                first = w.ask("llama", x_request_id="req-1", traceparent=GIVEN, tracestate="rojo=00f067aa0ba902b7")
                await until(lambda: w.manager.of(ActivateSeat), what="the activation is requested")
                second = w.ask("llama", x_request_id="req-2")
                await until(lambda: w.held("llama") == 2, what="both are held")
                await w.manager.move("s0", SeatState.ACTIVE, cause="req-1", op="op-1")
                assert [(await each).status for each in (first, second)] == [200, 200]
            record = await w.bus.ended("req-1")
        by_cause = {span.attributes["kybernate.cause"]: span for span in spans.of("POST /v1/chat/completions")}
        request, later = by_cause["req-1"], by_cause["req-2"]

    assert (trace_id(request), parent(request), request.kind.name) == (TRACE, SPAN, "SERVER")
    assert dict(request.attributes) | {
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "llama",
        "gen_ai.operation.name": "chat",
        "kybernate.seat": "s0",
        "kybernate.node": "n1",
        "kybernate.op": "op-1",
    } == dict(request.attributes)
    assert request.attributes["kybernate.held_seconds"] < request.attributes["kybernate.first_byte_seconds"]
    heads = {head["X-Request-Id"]: head for head in engine.headers}
    assert heads["req-1"].getall("traceparent") == [traceparent(request)]
    assert heads["req-1"].getall("tracestate") == ["rojo=00f067aa0ba902b7"]
    assert (parent(later), heads["req-2"]["traceparent"]) == ("", traceparent(later))
    assert "tracestate" not in heads["req-2"]

    assert record is not None
    assert record.trace_id == TRACE
    traces = {line["cause"]: line["trace_id"] for line in logs if line["event"] == "request.ended"}
    assert traces == {"req-1": TRACE, "req-2": trace_id(later)}


@pytest.mark.parametrize("given", ["00-1-2-01", "00-" + "0" * 32 + f"-{SPAN}-01", "\u00e9" * 5])
async def test_a_head_without_a_valid_trace_begins_one(given: str):
    with Spans() as spans:
        async with world(tracer=spans.tracer) as w:
            engine = await w.seat("s0", "llama", SeatState.ACTIVE)
            assert (await w.ask("llama", traceparent=given, tracestate="a=1")).status == 200
        [request] = spans.of("POST /v1/chat/completions")
    assert parent(request) == ""
    [head] = engine.headers
    assert head.getall("traceparent") == [traceparent(request)]
    assert "tracestate" not in head


async def test_without_tracing_the_callers_headers_pass_untouched_and_the_log_has_their_trace():
    async with world(access_log=True) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        with capture_logs() as logs:
            assert (await w.ask("llama", traceparent=GIVEN, tracestate="rojo=1")).status == 200
            assert (await w.ask("llama", traceparent="anything")).status == 200
            assert (await w.ask("llama")).status == 200
    found = [(head.get("traceparent"), head.get("tracestate")) for head in engine.headers]
    assert found == [(GIVEN, "rojo=1"), ("anything", None), (None, None)]
    assert [line.get("trace_id") for line in logs if line["event"] == "request.ended"] == [TRACE, None, None]


async def test_requests_that_fail_say_why_and_are_held_only_if_they_waited():
    with Spans() as spans:
        async with world(tracer=spans.tracer, hold_seconds=0.2) as w:
            await w.seat("s0", "llama")
            w.manager.auto = False
            assert (await w.ask("llama")).status == 503
            assert (await w.ask("unknown")).status == 404
        waited, unknown = spans.of("POST /v1/chat/completions")
    assert waited.attributes["kybernate.held_seconds"] > 0
    assert "kybernate.held_seconds" not in unknown.attributes
    assert (waited.status.is_ok, waited.attributes["error.type"]) == (False, "hold_timeout")
    assert (unknown.status.status_code.name, unknown.attributes["kybernate.reason"]) == ("UNSET", "model_not_found")
    assert "error.type" not in unknown.attributes


async def test_a_key_in_tracestate_reaches_neither_engine_nor_collector(tmp_path: Path):
    path, (entry, key) = tmp_path / "keys.yaml", make("app", ("infer",))
    path.write_text(dump([entry]))
    with Spans() as spans:
        async with world(tracer=spans.tracer, api_keys_file=path) as w:
            engine = await w.seat("s0", "llama", SeatState.ACTIVE)
            headers = {"authorization": f"Bearer {key}", "traceparent": GIVEN, "tracestate": f"a=1,b=x {key}"}
            assert (await w.ask("llama", **headers)).status == 200
        [request] = spans.of("POST /v1/chat/completions")
    assert request.attributes["kybernate.tenant"] == "app"
    assert (trace_id(request), len(request.context.trace_state)) == (TRACE, 0)
    [head] = engine.headers
    assert "tracestate" not in head
    assert key not in str(dict(head))
