"""Publishes this router's traffic for each (model, seat) as levels: absolute numbers, not changes.

Within 5 ms of the first request of a (model, seat) and of the end of its last one, within 50 ms of another change (also
when those that waited are sent), every second while a level is not zero, and a last zero. A lost level is replaced by
the next one, and a receiver drops it ``ttl_seconds`` after its receipt.
"""

import asyncio
import time

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from services.router.core.reports import addressed, level_of
from services.router.core.traffic import Traffic

Key = tuple[str, str | None]

EDGE_SECONDS = 0.005
"""Edges closer together than this are published as one level."""
CHANGE_SECONDS = 0.05
REPEAT_SECONDS = 1.0
TTL_SECONDS = 3.0


class LevelPublisher:
    """One per router. ``touch`` may be called from any task of the loop."""

    def __init__(self, bus: Bus, traffic: Traffic, clock: Clock, source: str, incarnation: str = "") -> None:
        self._bus, self._traffic, self._clock, self._source = bus, traffic, clock, source
        self._incarnation = incarnation
        self._due: dict[Key, float] = {}
        self._published: dict[Key, tuple[int, float]] = {}
        """Arrivals at the last publication, and its time."""
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        # After a restart the sequence must continue above that of the last incarnation.
        self._seq = time.time_ns() // 1_000_000

    def touch(self, model: str, key: str | None, edge: bool) -> None:
        """The level of (model, seat) changed; ``edge``: requests begin or end there."""
        at = time.monotonic() + (EDGE_SECONDS if edge else CHANGE_SECONDS)
        if at < self._due.get((model, key), float("inf")):
            self._due[model, key] = at
            if self._timer is None or at < self._timer.when():
                self._wake_at(at)

    async def run(self) -> None:
        """Publish each level when it is due."""
        while True:
            now = time.monotonic()
            for key in [key for key, at in self._due.items() if at <= now]:
                del self._due[key]
                await self._publish(key)
            self._wake.clear()
            self._wake_at(min(self._due.values(), default=float("inf")))
            await self._wake.wait()

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._wake.set) if at < float("inf") else None

    async def _publish(self, key: Key) -> None:
        now = time.monotonic()
        model, seat_key = key
        table = self._traffic.table
        level = level_of(table, model, seat_key, now, self._clock, self._source)
        arrived = level.arrived or 0
        before, at = self._published.get(key, (0, now - REPEAT_SECONDS))
        self._seq += 1
        signal = level.model_copy(
            update={
                "incarnation": "" if level.arrived is None else self._incarnation,
                "arrivals": max(0, arrived - before),
                "window_seconds": max(1e-3, self._clock.to_model(now - at)),
                "seq": self._seq,
                "ttl_seconds": TTL_SECONDS,
            }
        )
        quiet = not level.waiting and not level.in_flight
        try:
            for one in addressed(signal, table, seat_key):
                await self._bus.publish(one)
        except BusError:
            quiet = False  # published again; receivers drop the old level after its TTL
        else:
            self._published[key] = (arrived, now)
        if not quiet:
            self._due.setdefault(key, now + REPEAT_SECONDS)
