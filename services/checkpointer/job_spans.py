"""The spans of a job: each half, what is asked of the engine in it, and its steps as events, in the switch's trace.

A job without a parent has none: traces are off, or a checkpointer that has ended began it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kybernate.messages import SeatProgress, SeatTarget
from services.checkpointer.records import HalfName

if TYPE_CHECKING:
    from kybernate.otel import Span, Tracer


class JobSpans:
    """The spans of one job under way."""

    def __init__(self, tracer: "Tracer | None", op: str, parent: str | None) -> None:
        self._tracer = tracer if parent is not None else None
        self._op, self._parent = op, parent
        self._halves: dict[tuple[HalfName, str], Span] = {}

    def begin(self, half: HalfName, target: SeatTarget) -> None:
        """Begin the span of a half."""
        if self._tracer is not None:
            facts = {"kybernate.op": self._op, "kybernate.seat": target.seat, "kybernate.backend": target.backend}
            self._halves[half, target.seat] = self._tracer.begin(half, time.time(), facts, parent=self._parent)

    def step(self, half: HalfName, seat: str, step: str) -> None:
        """Note the beginning of a step."""
        if (span := self._halves.get((half, seat))) is not None:
            span.event(step, time.time())

    @contextmanager
    def within(self, half: HalfName, seat: str, name: str) -> Iterator[None]:
        """A span within that of a half."""
        span = self._halves.get((half, seat))
        inner = span.child(name, time.time()) if span is not None else None
        try:
            yield
        finally:
            if inner is not None:
                inner.end(time.time())

    def end(self, half: HalfName, progress: SeatProgress) -> None:
        """End the span of a half with its outcome."""
        span = self._halves.pop((half, progress.seat), None)
        if span is not None:
            seconds = {f"kybernate.seconds.{step}": round(value, 6) for step, value in progress.seconds.items()}
            span.set({"kybernate.outcome": progress.outcome, "kybernate.vram_bytes": progress.vram_bytes, **seconds})
            span.end(time.time(), error=progress.reason)
