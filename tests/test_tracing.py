"""Traces: what turns them on, what happens where they cannot be made, and that they never cost more than a line."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from kybernate.tracing import TracingError, open_tracer, trace_id_of, wanted
from tests.spans import Spans, parent, trace_id

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


def test_the_set_up_has_the_extra():
    import opentelemetry.sdk.trace

    import kybernate.otel

    assert opentelemetry.sdk.trace.TracerProvider
    assert kybernate.otel.Tracer


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_SDK_DISABLED": "True", **ENDPOINT}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **ENDPOINT}, True),
        ({"OTEL_SERVICE_NAME": "router", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_the_standard_variables_turn_traces_on(env: Mapping[str, str], on: bool):
    assert wanted(env) is on


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER=console: only otlp and none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **ENDPOINT}, "only http/protobuf is spoken here"),
    ],
)
def test_what_is_wanted_and_not_there_is_named(env: Mapping[str, str], text: str):
    with pytest.raises(TracingError, match=text):
        wanted(env)


def test_without_the_extra_a_service_goes_on_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delattr("kybernate.otel", raising=False)
    monkeypatch.setitem(sys.modules, "kybernate.otel", None)
    with capture_logs() as logs, open_tracer("router", "router-0", "n1") as tracer:
        assert tracer is None
    [line] = logs
    assert line["event"] == "traces.unavailable"
    assert "kybernate[otel]" in line["reason"]


def test_a_fault_in_the_set_up_stops_no_service(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "foo")
    with capture_logs() as logs, open_tracer("router", "router-0", "n1") as tracer:
        assert tracer is None
    [line] = logs
    assert (line["event"], "foo" in line["reason"]) == ("traces.unavailable", True)


@pytest.mark.parametrize("sampler", ["parentbased_always_on", "traceidratio"])
def test_an_empty_variable_of_the_sampler_or_the_exporter_counts_as_none(monkeypatch: pytest.MonkeyPatch, sampler: str):
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)

    def opened() -> list[Any]:
        with capture_logs() as logs, open_tracer("router", "router-0", "n1") as tracer:
            assert tracer is not None
            assert int(tracer.begin("x", 1.0).traceparent[-2:], 16) & 1, "it is sampled"
        return logs

    without = opened()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "")
    assert opened() == without


def test_off_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kybernate.otel", None)
    with capture_logs() as logs, open_tracer("router", "router-0", "n1") as tracer:
        assert tracer is None
    assert logs == []


def test_the_environment_names_the_service_and_else_the_service_itself(monkeypatch: pytest.MonkeyPatch):
    with Spans() as spans:
        spans.tracer.begin("x", 1.0).end(2.0, {})
        known = dict(spans.of("x")[0].resource.attributes)
    assert (known["service.name"], known["service.instance.id"]) == ("kybernate-router", "router-0")
    assert known["host.name"] == "n1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "inference")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    with Spans() as spans:
        spans.tracer.begin("x", 1.0).end(2.0, {})
        known = dict(spans.of("x")[0].resource.attributes)
    assert (known["service.name"], known["deployment.environment"]) == ("inference", "prod")


def test_a_span_continues_the_trace_of_its_parent_and_keeps_its_times():
    with Spans() as spans:
        spans.tracer.begin("call", 100.5, parent=GIVEN).end(103.0, {"kybernate.op": "op-1"}, error="too slow")
        [call] = spans.of("call")
    assert (trace_id(call), parent(call)) == (TRACE, SPAN)
    assert (call.start_time, call.end_time) == (100_500_000_000, 103_000_000_000)
    assert (call.status.is_ok, call.status.description) == (False, "too slow")
    assert call.attributes["kybernate.op"] == "op-1"


@pytest.mark.parametrize("given", ["", "00-1-2-01", GIVEN.replace(TRACE, "0" * 32), "ff" + GIVEN[2:], "x" * 9999])
def test_what_is_no_traceparent_begins_a_new_trace(given: str):
    assert trace_id_of(given) is None
    with Spans() as spans:
        spans.tracer.begin("x", 1.0, parent=given).end(2.0, {})
        [span] = spans.of("x")
    assert parent(span) == ""


def test_a_trace_that_is_not_sampled_is_continued_and_not_exported():
    with Spans() as spans:
        span = spans.tracer.begin("x", 1.0, parent=f"00-{TRACE}-{SPAN}-00")
        span.end(2.0, {})
        assert spans.all() == []
        assert span.traceparent.endswith("-00")
        assert trace_id_of(span.traceparent) == TRACE


def test_a_collector_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with capture_logs() as logs, open_tracer("router", "router-0", "n1") as tracer:
        assert tracer is not None
        for _ in range(2):
            tracer.begin("x", 1.0).end(2.0, {})
            tracer._provider.force_flush()
    assert [line["event"] for line in logs] == ["traces.warning"]
    assert "127.0.0.1" in logs[0]["reason"]
