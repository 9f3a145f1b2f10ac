"""A span for each request, made by OpenTelemetry's SDK and exported by OTLP from its thread. The only module that
imports opentelemetry.

Of the environment the SDK reads the resource, the sampler, the batches and the exporter's settings (``OTEL_*``).
"""

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kybernate
from kybernate.logs import get_logger

CLOSE_SECONDS = 2.0
"""How long a process that ends exports what waits."""
Attributes = Mapping[str, str | int | float]
_W3C = TraceContextTextMapPropagator()


class Span:
    """A request's span that has begun. Times are unix seconds."""

    __slots__ = ("_span", "traceparent", "tracestate")

    def __init__(self, span: trace.Span) -> None:
        self._span, context = span, span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """Names this span to others."""
        self.tracestate = context.trace_state.to_header()
        """What other tracing systems have added to the trace; empty: nothing."""

    def end(self, at: float, attributes: Attributes, *, error: str = "") -> None:
        """End the span; ``error``: why the request failed."""
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(_ns(at))


class Tracer:
    """Begins spans."""

    def __init__(
        self, service: str, instance: str, node: str, exporter: Callable[[], SpanExporter] = OTLPSpanExporter
    ) -> None:
        """Exports by OTLP over HTTP, as ``OTEL_EXPORTER_OTLP_*`` say, or by ``exporter``."""
        log = logging.getLogger("opentelemetry")
        log.handlers, log.propagate = [_Warnings()], False
        self._provider = TracerProvider(resource=_resource(service, instance, node), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter()))
        self._tracer = self._provider.get_tracer("kybernate", kybernate.__version__)

    def begin(
        self, name: str, at: float, attributes: Attributes | None = None, *, parent: str = "", tracestate: str = ""
    ) -> Span:
        """Begin a span in the trace of ``parent`` (W3C); without a valid one, the first of a new trace."""
        carrier = {"traceparent": parent, "tracestate": tracestate}
        within = _W3C.extract({name: value for name, value in carrier.items() if value}, Context())
        return Span(self._tracer.start_span(name, within, trace.SpanKind.SERVER, attributes, start_time=_ns(at)))

    def close(self) -> None:
        """Export what waits, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _Warnings(logging.Handler):
    """The SDK's first warning goes to the log: it has one for each failure, and some that callers can provoke."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged = False
        self._fields = contextvars.copy_context()
        """What each line of this process' log has, also in the SDK's thread."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it, unless one was logged."""
        if not self._logged:
            self._logged, meaning = True, "spans may be lost; further warnings of OpenTelemetry are not logged"
            self._fields.run(get_logger().warning, "traces.warning", reason=record.getMessage()[:300], meaning=meaning)


def _resource(service: str, instance: str, node: str) -> Resource:
    """Return what the environment says of this process, before what is known of it."""
    known = {"service.name": f"kybernate-{service}", "service.version": kybernate.__version__}
    known |= {"service.instance.id": instance, "host.name": node}
    return Resource.create(known).merge(OTELResourceDetector().detect())


def _ns(at: float) -> int:
    return int(at * 1e9)
