"""Spans that tests can read: the SDK's exporter to memory behind the tracer of a router."""

from typing import Any

import pytest


class Spans:
    """``tracer`` for a router; ``of(name)`` its spans that have ended."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk")  # test_request_spans.py asserts that set-up installs it
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from services.router.request_spans import Tracer

        self._memory = InMemorySpanExporter()
        self.tracer = Tracer("router-0", "n1", self._memory)

    def __enter__(self) -> "Spans":
        return self

    def __exit__(self, *_: object) -> None:
        self.tracer.close()

    def all(self) -> list[Any]:
        self.tracer._provider.force_flush()
        return sorted(self._memory.get_finished_spans(), key=lambda span: span.start_time)

    def of(self, name: str) -> list[Any]:
        return [span for span in self.all() if span.name == name]


def trace_id(span: Any) -> str:
    return f"{span.context.trace_id:032x}"


def traceparent(span: Any) -> str:
    return f"00-{trace_id(span)}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def parent(span: Any) -> str:
    """The id of its parent span; empty: it is the first of its trace."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"
