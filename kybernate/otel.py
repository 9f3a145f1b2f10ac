"""Spans in OpenTelemetry's SDK, exported by OTLP from a thread. The only module that imports opentelemetry.

Of the environment the SDK reads the resource, the sampler, the batches and the exporter's settings (``OTEL_*``).
"""

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import kybernate
from kybernate.logs import get_logger

CLOSE_SECONDS = 2.0
"""How long a process that ends exports what waits."""
Attributes = Mapping[str, str | int | float | Sequence[str]]
Kind = Literal["internal", "server", "client"]
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()


class Span:
    """A span that has begun. Times are unix seconds."""

    __slots__ = ("_span", "_tracer", "traceparent")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """Names this span to others."""

    @property
    def tracestate(self) -> str:
        """What other tracing systems have added to the trace; empty: nothing."""
        return self._span.get_span_context().trace_state.to_header()

    def child(
        self,
        name: str,
        at: float,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        link: str | None = None,
    ) -> "Span":
        """Begin a span within this one; ``link``: the traceparent of one in another trace that it has to do with."""
        within = trace.set_span_in_context(self._span, Context())
        return _begin(self._tracer, name, at, within, kind, attributes, link)

    def event(self, name: str, at: float) -> None:
        """Note an instant within the span."""
        self._span.add_event(name, timestamp=_ns(at))

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def end(self, at: float, *, error: str = "") -> None:
        """End the span; ``error``: why it failed."""
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(_ns(at))


class Tracer(Collector):
    """Begins spans; a Prometheus collector of how many were ended and exported."""

    def __init__(self, service: str, instance: str, node: str, exporter: Callable[[], SpanExporter]) -> None:
        warnings, log = _Warnings(), logging.getLogger("opentelemetry")
        log.handlers, log.propagate = [warnings], False
        self._exporter = _Exporter(exporter(), warnings)
        self._processor = _Processor(self._exporter)
        self._provider = TracerProvider(resource=_resource(service, instance, node), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kybernate", kybernate.__version__)
        if warnings.last:
            get_logger().warning("traces.misconfigured", reason=warnings.last, meaning="the default is used")
            warnings.kept.clear()

    def begin(
        self,
        name: str,
        at: float,
        attributes: Attributes | None = None,
        *,
        parent: str | None = None,
        tracestate: str = "",
        kind: Kind = "internal",
    ) -> Span:
        """Begin a span in the trace of ``parent`` (W3C); without a valid one, the first of a new trace."""
        return _begin(self._tracer, name, at, _context(parent, tracestate), kind, attributes)

    def flush(self) -> None:
        """Export what waits."""
        self._processor.force_flush()

    def close(self) -> None:
        """Export what waits, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def collect(self) -> Iterable[Metric]:
        """Yield the counts of now."""
        spans = CounterMetricFamily("kybernate_trace_spans", "Sampled spans by what became of them", labels=["outcome"])
        spans.add_metric(["ended"], self._processor.ended)
        spans.add_metric(["exported"], self._exporter.exported)
        yield spans


def exporting_tracer(service: str, instance: str, node: str) -> Tracer:
    """Return a tracer that exports by OTLP over HTTP, as ``OTEL_EXPORTER_OTLP_*`` say."""
    return Tracer(service, instance, node, OTLPSpanExporter)


class _Processor(BatchSpanProcessor):
    """Counts the spans that have ended; the queue is the SDK's and drops the oldest when it is full."""

    ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.ended += span.context is not None and span.context.trace_flags.sampled
        super().on_end(span)


class _Exporter(SpanExporter):
    """Counts what was exported, and logs when that begins to fail and when it is over. Runs in the SDK's thread."""

    def __init__(self, exporter: SpanExporter, warnings: "_Warnings") -> None:
        self._exporter, self._warnings = exporter, warnings
        self._fields = contextvars.copy_context()
        """What each line of this process' log has."""
        self.exported = self._failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; one that fails is lost."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._warnings.kept.append(f"{type(error).__name__}: {error}"[:300])
            result = SpanExportResult.FAILURE
        failed, self._failed = self._failed, 0
        if result is not SpanExportResult.SUCCESS:
            self._failed = failed + len(spans)
            if not failed:
                meaning = "spans are lost until OTEL_EXPORTER_OTLP_ENDPOINT answers; kybernate_trace_spans_total counts"
                self._fields.run(
                    get_logger().warning, "traces.export_failed", reason=self._warnings.last, meaning=meaning
                )
            return result
        self.exported += len(spans)
        if failed:
            self._fields.run(get_logger().info, "traces.exported_again", lost=failed)
        return result

    def shutdown(self) -> None:
        """Give up what is being exported."""
        self._exporter.shutdown()


class _Warnings(logging.Handler):
    """Keeps the last two of the SDK's warnings: it has one for each failure, and some that callers can provoke."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: deque[str] = deque(maxlen=2)

    @property
    def last(self) -> str:
        """The last two: the exporter logs why, and then that it gives up."""
        return "; ".join(self.kept)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, unless it is that the queue is full."""
        if not record.name.startswith("opentelemetry.sdk._shared_internal"):
            self.kept.append(record.getMessage()[:300])


def _begin(
    tracer: trace.Tracer,
    name: str,
    at: float,
    within: Context,
    kind: Kind,
    attributes: Attributes | None,
    link: str | None = None,
) -> Span:
    links = [trace.Link(trace.get_current_span(_context(link)).get_span_context())] if link is not None else None
    return Span(tracer, tracer.start_span(name, within, _KINDS[kind], attributes, links, start_time=_ns(at)))


def _context(traceparent: str | None, tracestate: str = "") -> Context:
    carrier = {"traceparent": traceparent or "", "tracestate": tracestate}
    return _W3C.extract({name: value for name, value in carrier.items() if value}, Context())


def _resource(service: str, instance: str, node: str) -> Resource:
    """Return what the environment says of this process, before what is known of it."""
    known = {"service.name": f"kybernate-{service}", "service.version": kybernate.__version__}
    known |= {"service.instance.id": instance, "host.name": node}
    return Resource.create(known).merge(OTELResourceDetector().detect())


def _ns(at: float) -> int:
    return int(at * 1e9)
