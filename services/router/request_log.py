"""What is measured and reported of each call: metrics, an access line, the record of one that was held or failed."""

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.logs import get_logger
from kybernate.messages import WAITED_IN_VAIN, RequestEnded, SeatActivated
from kybernate.roster import SeatRecord
from kybernate.tracing import trace_id_of
from services.router.core.step import Forward
from services.router.metrics import Metrics

MOST_WAITING = 1_000
"""Records that wait to be published; further ones are dropped."""
PAUSE_SECONDS = 0.01
"""Between two records: a router publishes at most a hundred in a second."""
ACCESS_FIELDS = {"cause", "model", "node", "seat", "held_seconds", "first_byte_seconds", "seconds", "status", "reason"}
"""Fields of an access line."""


@dataclass(slots=True)
class CallRecord:
    """What is known of one call so far."""

    arrived_at: float
    """Unix seconds."""
    cause: str
    model: str = ""
    to: Forward | None = None
    """Where it was forwarded last."""
    forwarded_at: float | None = None
    """When, unix seconds."""
    waits: bool = True
    """For a seat, for the first time or again."""
    lost_seconds: float = 0.0
    """At engines that took it and were lost before they responded."""
    first_byte_at: float | None = None
    """Unix seconds."""
    reason: str = ""
    """Code of the error, if it failed."""
    traceparent: str | None = None
    """Of the router's span, else of the caller's, which may be invalid."""

    def forwarded(self, to: Forward) -> None:
        """It is sent to an engine now."""
        self.to, self.forwarded_at, self.waits = to, time.time(), False

    def waits_again(self, *, taken: bool) -> None:
        """Its engine was lost. ``taken``: that had taken it, and the time there was no wait."""
        if taken and self.forwarded_at is not None:
            self.lost_seconds += max(0.0, time.time() - self.forwarded_at)
        self.waits = True

    def held_seconds(self, now: float) -> float:
        """Wall seconds of all its waits: until it was forwarded last, or until ``now`` (unix seconds) if it waits."""
        if self.to is not None and not self.waits:
            return self.to.held_seconds
        return max(0.0, now - self.arrived_at - self.lost_seconds)


def activation_seconds(
    metrics: Metrics, call: CallRecord, event: SeatActivated, accepted_at: float | None, sent_at: float | None
) -> dict[bytes, float]:
    """Return the overhead and the release of a hold that an activation ended, as far as they are known.

    Release is the time from the last backend call to sent upstream, for every call that waited. Overhead is for the
    call that caused the switch: arrival to accepted, decision to journaled (the manager's part), and its release.
    """
    if event.last_call_at is None or sent_at is None or event.last_call_at < call.arrived_at:
        return {}
    release = max(0.0, sent_at - event.last_call_at)
    metrics.release_seconds.observe(release)
    if call.cause != event.cause:
        return {b"Release": release}
    parts = {
        "accept": max(0.0, accepted_at - call.arrived_at) if accepted_at is not None else 0.0,
        "journal": event.seconds.get("control", 0.0),
        "send": release,
    }
    for part, seconds in parts.items():
        metrics.control_part_seconds.labels(part).observe(seconds)
    overhead = sum(parts.values())
    metrics.control_seconds.observe(overhead)
    return {b"Overhead": overhead, b"Release": release}


class RequestLog:
    """``ended`` may be called from any task of the loop; ``run`` publishes."""

    def __init__(self, bus: Bus, router: str, metrics: Metrics, clock: Clock, *, access_log: bool = False) -> None:
        self._bus, self._router, self._metrics, self._clock = bus, router, metrics, clock
        self._access_log = access_log
        self._queue: asyncio.Queue[RequestEnded] = asyncio.Queue(MOST_WAITING)
        self.dropped = 0
        """Records that were not published: too many, or the bus was away."""

    def ended(self, call: CallRecord, status: int, *, known: bool, served: bool, seat: SeatRecord | None) -> None:
        """The call has ended. ``served``: with a complete answer of ``seat``, which may be gone; ``known``: its model
        exists. One that was served at once, or whose model is not known, leaves no record."""
        self._report(call, status, known=known)
        metrics = self._metrics
        metrics.answered(call.model if known else "unknown", str(status))
        if served and call.to is not None:
            tier, slo = (seat.tier, seat.slo_seconds) if seat is not None else ("", 0.0)
            if call.to.held_seconds > 0:
                metrics.hold_seconds.labels(call.model, tier).observe(call.to.held_seconds)
            of = metrics.served(call.model, tier)
            if call.first_byte_at is not None:
                of.first_byte_seconds.observe(call.first_byte_at - call.arrived_at)
            (of.missed if 0 < slo < self._clock.to_model(call.to.held_seconds) else of.met).inc()
        elif known and call.reason in WAITED_IN_VAIN:
            metrics.slo.labels(call.model, "", "missed").inc()

    def _report(self, call: CallRecord, status: int, *, known: bool) -> None:
        now = time.time()
        seconds = max(0.0, now - call.arrived_at)
        held = call.to is None or call.to.held_seconds > 0
        kept = known and (status >= 429 or held)
        if not kept and not self._access_log:
            return
        first, forwarded = call.first_byte_at, call.forwarded_at
        record = RequestEnded(
            cause=call.cause,
            request=call.cause,
            trace_id=trace_id_of(call.traceparent),
            router=self._router,
            model=call.model,
            node=call.to.key.partition(".")[0] if call.to is not None else "",
            seat=call.to.seat if call.to is not None else "",
            epoch=call.to.epoch if call.to is not None else 0,
            arrived_at=call.arrived_at,
            held_seconds=call.held_seconds(now),
            forwarded_seconds=None if forwarded is None else max(0.0, forwarded - call.arrived_at),
            first_byte_seconds=None if first is None else max(0.0, first - call.arrived_at),
            seconds=seconds,
            status=status,
            reason=call.reason,
        )
        if self._access_log:
            trace = {} if record.trace_id is None else {"trace_id": record.trace_id}
            get_logger().info("request.ended", **record.model_dump(include=ACCESS_FIELDS), **trace)
        if not kept:
            return
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> NoReturn:
        """Publish until cancelled."""
        after = 0.0
        while True:
            record = await self._queue.get()
            if (pause := after - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            try:
                await self._bus.publish(record)
            except BusError:
                self.dropped += 1
            after = time.monotonic() + PAUSE_SECONDS
