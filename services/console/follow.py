"""The one reader of the cluster: roster, inventory, levels, routers, events and records of requests."""

import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from kybernate.bus.follow import follow, row_of
from kybernate.bus.port import Bus, Entry
from kybernate.logs import OnceLogger
from kybernate.messages import (
    GpuHealthChanged,
    GroupDecided,
    NodeTrafficSignal,
    Presence,
    SeatEvent,
    TrafficSignal,
)
from kybernate.roster import BUCKET, INVENTORY_BUCKET, GpuRecord, SeatRecord
from services.console.core.cluster import Cluster

RETRY_SECONDS = 0.5
Event = SeatEvent | GpuHealthChanged | GroupDecided
EVENTS = (SeatEvent, GpuHealthChanged, GroupDecided)


class Reader:
    """Fills ``cluster``; ``jobs`` run until the console ends."""

    def __init__(self, bus: Bus, cluster: Cluster) -> None:
        self._bus, self.cluster = bus, cluster
        self.on_event: Callable[[Event], None] = lambda _: None

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs by name."""
        return {
            "roster": self._follow(BUCKET, self._seat, self._complete),
            "inventory": self._follow(INVENTORY_BUCKET, self._gpu, lambda: None),
            "events": self._events(),
            "levels": self._levels(),
        }

    async def _follow(self, bucket: str, take: Callable[[Entry], None], complete: Callable[[], None]) -> NoReturn:
        failed = OnceLogger("bucket.watch_failed", level="info")
        await follow(self._bus, bucket, take, failed, retry_seconds=RETRY_SECONDS, complete=complete)

    def _complete(self) -> None:
        self.cluster.complete = True

    def _seat(self, entry: Entry) -> None:
        if entry.value is None:
            self.cluster.seats.drop(entry.key)
        elif (row := row_of(SeatRecord, entry)) is not None:
            self.cluster.seats.read(entry.key, row)

    def _gpu(self, entry: Entry) -> None:
        if entry.value is None:
            self.cluster.gpus.drop(entry.key)
        elif (row := row_of(GpuRecord, entry)) is not None:
            self.cluster.gpus.put(entry.key, row)

    async def _events(self) -> None:
        async with self._bus.subscribe(*(kind.pattern() for kind in EVENTS)) as messages:
            async for message in messages:
                if isinstance(message, SeatEvent):
                    self.cluster.seats.take_event(message)
                if isinstance(message, EVENTS):
                    self.on_event(message)

    async def _levels(self) -> None:
        """Levels, and presences of routers."""
        kinds = TrafficSignal, NodeTrafficSignal
        routers = Presence.pattern(component="router")
        async with self._bus.subscribe(*(kind.pattern() for kind in kinds), routers) as messages:
            async for message in messages:
                if isinstance(message, TrafficSignal):
                    self.cluster.loads.add(message, time.monotonic())
                elif isinstance(message, Presence):
                    self.cluster.present(message, time.monotonic())
