"""Publishes this router's traffic for each (model, seat) as levels: absolute numbers, not changes.

To managers one by one: within 5 ms of the first request of a (model, seat) and of the end of its last one, within 50 ms
of another change (also when those that waited are sent), every second while a level is not zero, and a last zero. To
the other routers all together, every 2 s. A lost level is replaced by the next one, and a receiver drops it
``ttl_seconds`` after its receipt.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.logs import OnceLogger
from kybernate.messages import RouterLoad, TrafficSignal
from kybernate.messages.signals import MOST_LOAD_PARTS
from services.router.core.reports import RouterLevel, addressed, level_of
from services.router.core.traffic import Traffic

Key = tuple[str, str | None]
T = TypeVar("T")

EDGE_SECONDS = 0.005
"""Edges closer together than this are published as one level."""
CHANGE_SECONDS = 0.05
REPEAT_SECONDS = 1.0
TTL_SECONDS = 3.0
REPORT_SECONDS = 2.0
"""All levels together; they expire after three times as long."""
PART_BYTES = 384 * 1024
"""Of the levels, and of the relayed signals, that one message to the other routers has at most: NATS takes 1 MiB."""


class LevelPublisher:
    """One per router. ``touch`` may be called from any task of the loop."""

    def __init__(self, bus: Bus, traffic: Traffic, clock: Clock, source: str, incarnation: str = "") -> None:
        self._bus, self._traffic, self._clock, self._source = bus, traffic, clock, source
        self._incarnation = incarnation
        self.on_signal: Callable[[TrafficSignal], None] = lambda _: None
        """Called with each level, whether it can be published or not."""
        self._due: dict[Key, float] = {}
        self._published: dict[Key, tuple[int, float]] = {}
        """Arrivals at the last publication, and its time."""
        self._busy: dict[Key, RouterLevel] = {}
        """The levels that are not zero, as they were published last."""
        self._relayed: list[TrafficSignal] = []
        self._unsent = OnceLogger("load.not_sent")
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._next = float("inf")
        # After a restart the sequence must continue above that of the last incarnation.
        self._seq = time.time_ns() // 1_000_000

    def touch(self, model: str, key: str | None, edge: bool) -> None:
        """The level of (model, seat) changed; ``edge``: requests begin or end there."""
        at = time.monotonic() + (EDGE_SECONDS if edge else CHANGE_SECONDS)
        if at < self._due.get((model, key), float("inf")):
            self._due[model, key] = at
            if at < self._next:
                self._wake_at(at)

    def relay(self, signal: TrafficSignal) -> None:
        """Tell the other routers what a gateway has sent to this one."""
        self._relayed.append(signal)

    async def report(self) -> NoReturn:
        """Publish all levels together every two seconds, for the other routers, until cancelled."""
        parts = 0
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            loads = list(zip_longest(cut(self._busy.items(), _row_bytes), cut(self._relayed, _bytes), fillvalue=()))
            self._relayed = []
            last, parts = parts, len(loads)
            loads += [((), ())] * (last - parts)  # what was reported there is over
            troubles = {f"it has more than {MOST_LOAD_PARTS} parts"} if parts > MOST_LOAD_PARTS else set()
            for part, (levels, relayed) in enumerate(loads[:MOST_LOAD_PARTS]):
                try:
                    await self._bus.publish(self._load(part, levels, relayed))
                except BusError as error:
                    troubles.add(str(error))
            if troubles:
                self._unsent.log(error="; ".join(sorted(troubles)))
            else:
                self._unsent.clear()

    def _load(
        self, part: int, levels: Iterable[tuple[Key, RouterLevel]], relayed: Sequence[TrafficSignal]
    ) -> RouterLoad:
        waiting: dict[str, dict[str, tuple[int, float]]] = {}
        in_flight: dict[str, dict[str, int]] = {}
        for (model, _), level in levels:
            if level.waiting:
                age = self._clock.to_model(level.oldest_wait or 0.0)
                waiting.setdefault(model, {})[level.seat or ""] = level.waiting, age
            if level.in_flight:
                in_flight.setdefault(model, {})[level.seat or ""] = level.in_flight
        fields: dict[str, Any] = {"waiting": waiting, "in_flight": in_flight, "relayed": tuple(relayed)}
        return RouterLoad(cause=self._source, source=self._source, part=part, ttl_seconds=3 * REPORT_SECONDS, **fields)

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
        self._next = at
        self._timer = asyncio.get_running_loop().call_at(at, self._wake.set) if at < float("inf") else None

    async def _publish(self, key: Key) -> None:
        now = time.monotonic()
        model, seat_key = key
        level = level_of(self._traffic.table, model, seat_key, now)
        before, at = self._published.get(key, (0, now - REPEAT_SECONDS))
        counters: dict[str, Any] = {}
        if level.seat is not None:
            counters = {"incarnation": self._incarnation, "arrived": level.arrivals, "served": level.served}
            counters["served_seconds"] = self._clock.to_model(level.served_seconds)
        self._seq += 1
        signal = TrafficSignal(
            cause=level.cause,
            source=self._source,
            model=model,
            seat=level.seat,
            tier=level.tier,
            waiting=level.waiting,
            in_flight=level.in_flight,
            arrivals=max(0, level.arrivals - before),
            window_seconds=max(1e-3, self._clock.to_model(now - at)),
            oldest_wait_seconds=None if level.oldest_wait is None else self._clock.to_model(level.oldest_wait),
            age_histogram=tuple((self._clock.to_model(age), count) for age, count in level.ages),
            **counters,
            seq=self._seq,
            ttl_seconds=TTL_SECONDS,
        )
        self.on_signal(signal)
        quiet = not level.waiting and not level.in_flight
        if quiet:
            self._busy.pop(key, None)
        else:
            self._busy[key] = level
        table = self._traffic.table
        upstream = table.upstreams.get(seat_key or "")
        records = table.records_of(model) if seat_key is None else [upstream.record] if upstream is not None else []
        try:
            for one in addressed(signal, records):
                await self._bus.publish(one)
        except BusError:
            quiet = False  # published again; receivers drop the old level after its TTL
        else:
            self._published[key] = (level.arrivals, now)
        if not quiet:
            self._due.setdefault(key, now + REPEAT_SECONDS)


def cut(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in parts of at most PART_BYTES, by the size of each in bytes."""
    part, room = list[T](), PART_BYTES
    for item in items:
        room -= size(item)
        if room < 0 and part:
            yield part
            part, room = [], PART_BYTES - size(item)
        part.append(item)
    if part:
        yield part


def _row_bytes(row: tuple[Key, RouterLevel]) -> int:
    """At most: a character takes up to 6 bytes in JSON."""
    (model, _), level = row
    return (bool(level.waiting) + bool(level.in_flight)) * (64 + 6 * (len(model) + len(level.seat or "")))


def _bytes(signal: TrafficSignal) -> int:
    return len(signal.body())
