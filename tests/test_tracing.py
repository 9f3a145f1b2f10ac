"""Traces: what turns them on, what happens where they cannot be made, and that they never cost more than a line."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from kybernate.messages import ActivateSeat
from kybernate.tracing import TracingError, open_tracer, trace_id_of, wanted
from tests.spans import Spans, parent, span_id, trace_id

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
    with Spans("gpu-manager") as spans:
        spans.tracer.begin("x", 1.0).end(2.0)
        known = dict(spans.of("x")[0].resource.attributes)
    assert (known["service.name"], known["service.instance.id"]) == ("kybernate-gpu-manager", "gpu-manager-0")
    assert known["host.name"] == "n1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "inference")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    with Spans() as spans:
        spans.tracer.begin("x", 1.0).end(2.0)
        known = dict(spans.of("x")[0].resource.attributes)
    assert (known["service.name"], known["deployment.environment"]) == ("inference", "prod")


def test_a_span_continues_the_trace_of_its_parent_and_keeps_its_times():
    with Spans() as spans:
        first = spans.tracer.begin("switch", 100.5, {"kybernate.op": "op-1"}, parent=GIVEN)
        inner = first.child("drain", 101.0, link=f"00-{'1' * 32}-{'2' * 16}-01")
        inner.event("cut", 101.5)
        inner.end(102.25, error="too slow")
        first.end(103.0)
        [switch], [drain] = spans.of("switch"), spans.of("drain")
    assert (trace_id(switch), parent(switch)) == (TRACE, SPAN)
    assert (switch.start_time, switch.end_time) == (100_500_000_000, 103_000_000_000)
    assert parent(drain) == span_id(switch)
    assert [f"{link.context.trace_id:032x}" for link in drain.links] == ["1" * 32]
    assert (drain.status.is_ok, drain.status.description) == (False, "too slow")
    assert [event.name for event in drain.events] == ["cut"]


@pytest.mark.parametrize("given", [None, "", "00-1-2-01", GIVEN.replace(TRACE, "0" * 32), "ff" + GIVEN[2:], "x" * 9999])
def test_what_is_no_traceparent_begins_a_new_trace(given: str | None):
    assert trace_id_of(given) is None
    with Spans() as spans:
        spans.tracer.begin("x", 1.0, parent=given).end(2.0)
        [span] = spans.of("x")
    assert parent(span) == ""


def test_a_trace_that_is_not_sampled_is_continued_and_not_exported():
    with Spans() as spans:
        span = spans.tracer.begin("x", 1.0, parent=f"00-{TRACE}-{SPAN}-00")
        span.child("y", 1.0).end(1.5)
        span.end(2.0)
        assert spans.all() == []
        assert span.traceparent.endswith("-00")
        assert trace_id_of(span.traceparent) == TRACE


@pytest.mark.parametrize("given", [17, "no", GIVEN + "\n", GIVEN + "-more", "x" * 10_000, {"a": 1}])
def test_a_message_with_something_else_in_its_place_is_read_without_it(given: object):
    message = {"cause": "r-1", "node": "n1", "seat": "s0", "traceparent": given}
    assert ActivateSeat.model_validate(message).traceparent is None
    assert ActivateSeat.model_validate(message | {"traceparent": GIVEN}).traceparent == GIVEN
    assert b"traceparent" not in ActivateSeat(cause="r-1", node="n1", seat="s0").body()


class _Broken:
    """Fails as long as it is ``down``; ``raises``: by an exception."""

    def __init__(self, *, raises: bool = False) -> None:
        self.down, self.raises = True, raises

    def export(self, _: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self.down and self.raises:
            raise RuntimeError("the exporter is broken")
        return SpanExportResult.FAILURE if self.down else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("raises", [False, True])
def test_an_exporter_that_fails_is_one_line_and_two_counts(raises: bool):
    pytest.importorskip("opentelemetry.sdk")
    from kybernate.otel import Tracer

    exporter: Any = _Broken(raises=raises)
    tracer, registry = Tracer("router", "router-0", "n1", lambda: exporter), CollectorRegistry()
    registry.register(tracer)

    def export(spans: int) -> tuple[float | None, float | None]:
        for _ in range(spans):
            tracer.begin("x", 1.0).end(2.0)
        tracer.flush()
        found = [
            registry.get_sample_value("kybernate_trace_spans_total", {"outcome": o}) for o in ("ended", "exported")
        ]
        return found[0], found[1]

    with capture_logs() as logs:
        assert export(2) == (2, 0)
        assert export(3) == (5, 0)
        exporter.down = False
        assert export(1) == (6, 1)
        assert export(1) == (7, 2)
        tracer.close()
    assert [(line["event"], line.get("lost")) for line in logs] == [
        ("traces.export_failed", None),
        ("traces.exported_again", 5),
    ]
    assert logs[0]["reason"] == ("RuntimeError: the exporter is broken" if raises else "")
