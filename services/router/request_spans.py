"""The span of a call, from its head to the end of its answer.

Names and attributes follow OpenTelemetry's conventions for HTTP servers and generative AI; those that Kybernate adds
begin with ``kybernate.``. The engine gets the span as the parent of the engine's spans.
"""

import time
from typing import TYPE_CHECKING

from kybernate.http.head import Head
from kybernate.messages import WAITED_IN_VAIN
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
        parent=parents[0].decode("latin-1") if len(parents) == 1 else "",
        tracestate=b",".join(states).decode("latin-1"),
    )


def trace_lines(span: "Span") -> list[bytes]:
    """Return the header lines that an engine gets."""
    lines = [b"traceparent: %b\r\n" % span.traceparent.encode()]
    if span.tracestate:
        lines.append(b"tracestate: %b\r\n" % span.tracestate.encode())
    return lines


def end_span(span: "Span", call: CallRecord, status: int) -> None:
    """End the span of a call."""
    now, to = time.time(), call.to
    facts: dict[str, str | int | float] = {"http.response.status_code": status}
    if call.model:
        facts["gen_ai.request.model"] = call.model
    if call.reason:
        facts["kybernate.reason"] = call.reason
    if to is not None:
        facts |= {"kybernate.node": to.key.partition(".")[0], "kybernate.seat": to.seat}
        if to.opened is not None and to.opened.op:
            facts["kybernate.op"] = to.opened.op
    in_vain = call.reason in WAITED_IN_VAIN or status == 499 or to is not None
    if in_vain and (waited := call.held_seconds(now)) > 0:
        facts["kybernate.held_seconds"] = waited
    if call.first_byte_at is not None:
        facts["kybernate.first_byte_seconds"] = max(0.0, call.first_byte_at - call.arrived_at)
    error = call.reason or str(status) if status >= 500 else ""
    if error:
        facts["error.type"] = error
    span.end(now, facts, error=error)
