"""The span of a call, from its head to the end of its answer: made by OpenTelemetry's SDK, exported by OTLP from its
thread. The only module that imports opentelemetry; the router imports it where ``OTEL_*`` turn traces on.

Names and attributes follow OpenTelemetry's conventions for HTTP servers and generative AI; those that Kybernate adds
begin with ``kybernate.``. The engine gets the span as the parent of the engine's spans.
"""

import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kybernate
from kybernate.http.head import Head
from kybernate.logs import get_logger
from kybernate.messages import WAITED_IN_VAIN
from services.router.request_log import CallRecord

CLOSE_SECONDS = 2.0
"""How long a router that ends exports what waits; the SDK would take half a minute."""
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_W3C = TraceContextTextMapPropagator()
_OPERATIONS = dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat")
_OPERATIONS |= {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class Tracer:
    """Begins spans. The SDK reads the environment (``OTEL_*``); what that says of the resource counts."""

    def __init__(self, instance: str, node: str, exporter: SpanExporter | None = None) -> None:
        logging.getLogger("opentelemetry").handlers = [_FirstWarning(instance)]
        known = {"service.name": "kybernate-router", "service.version": kybernate.__version__}
        known |= {"service.instance.id": instance, "host.name": node}
        resource = Resource.create(known).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("kybernate", kybernate.__version__)

    def begin(self, call: CallRecord, head: Head, withheld: frozenset[bytes], tenant: str) -> "RequestSpan":
        """Begin the span of a call in its caller's trace, without a valid one in a new trace."""
        given = {
            name.decode(): [value.decode("latin-1") for lower, _, value in head.pairs if lower == name]
            for name in _TRACE_HEADERS - withheld
        }
        path = head.target.partition(b"?")[0].decode("latin-1")
        facts = {"http.request.method": "POST", "http.route": path, "url.path": path, "kybernate.cause": call.cause}
        facts |= {"gen_ai.operation.name": _OPERATIONS.get(path, ""), "kybernate.tenant": tenant}
        span = self._tracer.start_span(f"POST {path}", _W3C.extract(given), SpanKind.SERVER, _known(facts))
        return RequestSpan(span)

    def close(self) -> None:
        """Export what waits, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class RequestSpan:
    """A span that has begun."""

    def __init__(self, span: Span) -> None:
        self._span, lines = span, dict[str, str]()
        _W3C.inject(lines, set_span_in_context(span))
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
        self.traceparent = lines.get("traceparent")

    def passed(self, head: Head, without: frozenset[bytes]) -> bytes:
        """Return the header lines that an engine gets: those of the head, and this span as the parent."""
        return head.passed(without | _TRACE_HEADERS) + self._lines

    def end(self, call: CallRecord, status: int) -> None:
        """End the span, with what is known of the call."""
        facts: dict[str, str | float] = {"http.response.status_code": status, "kybernate.reason": call.reason}
        facts["gen_ai.request.model"] = call.model
        if (to := call.to) is not None:
            op = to.opened.op if to.opened is not None else ""
            facts |= {"kybernate.node": to.key.partition(".")[0], "kybernate.seat": to.seat, "kybernate.op": op}
        if call.reason in WAITED_IN_VAIN or status == 499 or to is not None:
            facts["kybernate.held_seconds"] = call.held_seconds(time.time())
        if call.first_byte_at is not None:
            facts["kybernate.first_byte_seconds"] = max(0.0, call.first_byte_at - call.arrived_at)
        if status >= 500:
            facts["error.type"] = call.reason or str(status)
            self._span.set_status(StatusCode.ERROR, call.reason or str(status))
        self._span.set_attributes(_known(facts))
        self._span.end()


def _known(facts: Mapping[str, str | float]) -> dict[str, str | float]:
    return {name: value for name, value in facts.items() if value}


class _FirstWarning(logging.Handler):
    """The SDK's first warning goes to the log: it has one for each failure, and some that callers can provoke."""

    def __init__(self, instance: str) -> None:
        super().__init__(logging.WARNING)
        self._log = get_logger().bind(service="router", instance=instance)  # the SDK's thread does not know them

    def emit(self, record: logging.LogRecord) -> None:
        """Log it, and none after it."""
        self.setLevel(logging.CRITICAL + 1)
        meaning = "spans may be lost; further warnings of OpenTelemetry are not logged"
        self._log.warning("traces.warning", reason=record.getMessage()[:300], meaning=meaning)
