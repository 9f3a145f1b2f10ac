"""The spans of a call: the request, its hold, and the time to the first byte of the engine's answer.

Names and attributes follow OpenTelemetry's conventions for HTTP servers and generative AI; those that Kybernate adds
begin with ``kybernate.``. The engine gets the request's span as the parent of the engine's spans.
"""

import time
from typing import TYPE_CHECKING

from kybernate.messages import WAITED_IN_VAIN
from services.router.core.head import Head
from services.router.core.step import Forward
from services.router.request_log import CallRecord

if TYPE_CHECKING:
    from kybernate.otel import Span, Tracer

TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def begin_span(tracer: "Tracer", call: CallRecord, head: Head, withheld: frozenset[bytes], tenant: str) -> "Span":
    """Begin the span of a call, in its caller's trace if its head names exactly one."""
    path = head.target.partition(b"?")[0].decode("latin-1")
    facts = {"http.request.method": "POST", "http.route": path, "url.path": path, "kybernate.cause": call.cause}
    if path in _OPERATIONS:
        facts["gen_ai.operation.name"] = _OPERATIONS[path]
    if tenant:
        facts["kybernate.tenant"] = tenant
    parents = [value for lower, _, value in head.pairs if lower == b"traceparent"]
    states = [value for lower, _, value in head.pairs if lower == b"tracestate" and lower not in withheld]
    return tracer.begin(
        f"POST {path}",
        call.arrived_at,
        facts,
        parent=parents[0].decode("latin-1") if len(parents) == 1 else None,
        tracestate=b",".join(states).decode("latin-1"),
        kind="server",
    )


def trace_lines(span: "Span") -> list[bytes]:
    """Return the header lines that an engine gets."""
    lines = [b"traceparent: %b\r\n" % span.traceparent.encode()]
    if state := span.tracestate:
        lines.append(b"tracestate: %b\r\n" % state.encode())
    return lines


def end_engine_span(span: "Span", call: CallRecord, sent_at: float | None, error: str) -> None:
    """Record the span of the engine that the call was sent to at ``sent_at``. ``error``: why no byte came, if so."""
    if call.to is not None and sent_at is not None:
        now, first = time.time(), call.first_byte_at
        child = span.child("first byte", sent_at, _place(call.to), kind="client")
        child.end(max(sent_at, first or now), error="" if first else error)


def _place(to: Forward) -> dict[str, str]:
    return {"kybernate.node": to.key.partition(".")[0], "kybernate.seat": to.seat}


def end_span(span: "Span", call: CallRecord, status: int, sent_at: float | None) -> None:
    """End the span of a call, with those of its wait and of its engine's first byte."""
    now, to = time.time(), call.to
    facts: dict[str, str | int | float] = {"http.response.status_code": status}
    if call.model:
        facts["gen_ai.request.model"] = call.model
    if call.reason:
        facts["kybernate.reason"] = call.reason
    in_vain = call.reason in WAITED_IN_VAIN or status == 499 or to is not None
    waited = call.held_seconds(now) if in_vain else 0.0
    link = None
    if to is not None:
        facts |= _place(to)
        link = to.opened.traceparent if to.opened is not None and to.opened.cause != call.cause else None
        end_engine_span(span, call, sent_at, call.reason)
    if waited > 0:
        facts["kybernate.held_seconds"] = waited
        span.child("hold", call.arrived_at, link=link).end(call.arrived_at + call.lost_seconds + waited)
    if call.first_byte_at is not None:
        facts["kybernate.first_byte_seconds"] = max(0.0, call.first_byte_at - call.arrived_at)
    error = call.reason or str(status) if status >= 500 else ""
    if error:
        facts["error.type"] = error
    span.set(facts)
    span.end(now, error=error)
