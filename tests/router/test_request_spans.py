"""Traces of requests: what turns them on, whose trace they continue, what engines get of it, what is never passed on,
and that a trace that cannot be made costs a line."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kybernate.http.head import Head
from kybernate.messages import ActivateSeat
from kybernate.seat import SeatState
from services.router.__main__ import open_tracer
from services.router.request_log import CallRecord, trace_id_of
from tests.keys import key_file
from tests.router.world import world
from tests.spans import Spans, parent, trace_id, traceparent
from tests.until import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"
NAME = "POST /v1/completions"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


def begun(tracer: Any, *given: tuple[str, str]) -> tuple[Any, str]:
    """Begin a span; return it, and what an engine gets of the head."""
    pairs = [(name.encode(), name.encode(), value.encode()) for name, value in given]
    head = Head(pairs, 0, False, True, "1.1", b"POST", b"/v1/completions?a=1")
    span = tracer.begin(CallRecord(time.time(), "req-1"), head, frozenset(), "")
    return span, span.passed(head, frozenset()).decode()


def end(span: Any, status: int = 200) -> None:
    span.end(CallRecord(time.time(), "req-1"), status)


# --- what turns them on -----------------------------------------------------------------------------------------------


def test_the_set_up_has_the_extra():
    from services.router.request_spans import Tracer

    assert Tracer


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "OTLP"}, True),
        ({"OTEL_TRACES_EXPORTER": "", **ENDPOINT}, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_TRACES_EXPORTER": "console", **ENDPOINT}, False),
        ({"OTEL_SERVICE_NAME": "router", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_the_standard_variables_turn_traces_on(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], on: bool):
    pytest.importorskip("opentelemetry.sdk")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
        assert (tracer is not None) is on
    assert logs == []


def test_off_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "services.router.request_spans", None)
    with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
        assert tracer is None
    assert logs == []


def test_without_the_extra_a_router_goes_on_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delitem(sys.modules, "services.router.request_spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
        assert tracer is None
    [line] = logs
    assert (line["event"], "opentelemetry" in line["reason"]) == ("traces.unavailable", True)
    assert "kybernate[otel]" in line["remedy"]


def test_a_fault_in_the_set_up_stops_no_router(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "foo")
    with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
        assert tracer is None
    [line] = logs
    assert (line["event"], "foo" in line["reason"]) == ("traces.unavailable", True)


@pytest.mark.parametrize("sampler", ["parentbased_always_on", "traceidratio"])
def test_an_empty_variable_of_the_sampler_or_the_exporter_counts_as_none(monkeypatch: pytest.MonkeyPatch, sampler: str):
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)

    def opened() -> list[Any]:
        with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
            span, _ = begun(tracer)
            assert int(span.traceparent[-2:], 16) & 1, "it is sampled"
        return logs

    without = opened()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "")
    assert opened() == without


def test_the_environment_names_the_service_and_else_the_router_itself(monkeypatch: pytest.MonkeyPatch):
    with Spans() as spans:
        end(begun(spans.tracer)[0])
        known = dict(spans.of(NAME)[0].resource.attributes)
    assert (known["service.name"], known["service.instance.id"]) == ("kybernate-router", "router-0")
    assert known["host.name"] == "n1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "inference")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    with Spans() as spans:
        end(begun(spans.tracer)[0])
        known = dict(spans.of(NAME)[0].resource.attributes)
    assert (known["service.name"], known["deployment.environment"]) == ("inference", "prod")


def test_a_collector_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with capture_logs() as logs, open_tracer("router-0", "n1") as tracer:
        for _ in range(2):
            end(begun(tracer)[0])
            tracer._provider.force_flush()
    assert [(line["event"], line["instance"]) for line in logs] == [("traces.warning", "router-0")]
    assert "127.0.0.1" in logs[0]["reason"]


# --- whose trace they continue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "00-1-2-01", GIVEN.replace(TRACE, "0" * 32), "ff" + GIVEN[2:], "x" * 9999, "é"])
def test_what_is_no_traceparent_begins_a_new_trace(given: str):
    assert trace_id_of(given) is None
    with Spans() as spans:
        span, lines = begun(spans.tracer, ("traceparent", given), ("tracestate", "a=1"))
        end(span)
        [found] = spans.of(NAME)
    assert (parent(found), lines) == ("", f"traceparent: {traceparent(found)}\r\n")


def test_fields_of_tracestate_pass_as_one():
    with Spans() as spans:
        given = ("traceparent", GIVEN), ("tracestate", "a=1"), ("x-a", "b"), ("tracestate", "b=2")
        span, lines = begun(spans.tracer, *given)
    assert lines == f"x-a: b\r\ntraceparent: {span.traceparent}\r\ntracestate: a=1,b=2\r\n"


def test_a_trace_that_is_not_sampled_is_continued_and_not_exported():
    with Spans() as spans:
        span, _ = begun(spans.tracer, ("traceparent", f"00-{TRACE}-{SPAN}-00"))
        end(span, 503)
        assert spans.all() == []
    assert span.traceparent.endswith("-00")
    assert (trace_id_of(span.traceparent), SPAN in span.traceparent) == (TRACE, False)


def test_a_disabled_sdk_passes_the_callers_trace_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Spans() as spans:
        span, lines = begun(spans.tracer, ("traceparent", GIVEN), ("tracestate", "a=1"))
        end(span, 503)
        without, none = begun(spans.tracer)
        assert spans.all() == []
    assert (span.traceparent, lines) == (GIVEN, f"traceparent: {GIVEN}\r\ntracestate: a=1\r\n")
    assert (without.traceparent, none) == (None, "")


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
                held = time.time_ns()
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
    assert request.start_time < held < request.end_time
    heads = {head["X-Request-Id"]: head for head in engine.headers}
    assert heads["req-1"].getall("traceparent") == [traceparent(request)]
    assert heads["req-1"].getall("tracestate") == ["rojo=00f067aa0ba902b7"]
    assert (parent(later), heads["req-2"]["traceparent"]) == ("", traceparent(later))
    assert "tracestate" not in heads["req-2"]

    assert record.trace_id == TRACE
    traces = {line["cause"]: line["trace_id"] for line in logs if line["event"] == "request.ended"}
    assert traces == {"req-1": TRACE, "req-2": trace_id(later)}


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
    assert (waited.status.is_ok, waited.status.description) == (False, "hold_timeout")
    assert waited.attributes["error.type"] == "hold_timeout"
    assert (unknown.status.status_code.name, unknown.attributes["kybernate.reason"]) == ("UNSET", "model_not_found")
    assert "error.type" not in unknown.attributes


async def test_a_key_in_tracestate_reaches_neither_engine_nor_collector(tmp_path: Path):
    path, keys = key_file(tmp_path, app=["infer"])
    key = keys["app"]
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
