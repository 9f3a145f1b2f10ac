"""Load of callers that do not come through a router: what engines count beyond it.

It is published as levels, like that of other gateways. All routers name the same sources, so that their levels replace
each other instead of adding up.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, NoReturn

import aiohttp
from prometheus_client import Counter

from kybernate.bus.port import Bus, BusError
from kybernate.engines import METRICS_PATHS, EngineLoad, load_in
from kybernate.fetch import AT_ONCE, fetch
from kybernate.levels import Loads
from kybernate.messages import NodeTrafficSignal, TrafficSignal
from kybernate.messages.signals import MOST_REQUESTS
from kybernate.seat import SeatState
from services.router.core.reports import addressed
from services.router.core.step import EngineReported
from services.router.core.upstreams import Upstream
from services.router.dispatch import Dispatcher
from services.router.settings import RouterSettings

ENGINES = "engines/"
"""Begin of the sources that these levels name; the node follows."""
VALID_INTERVALS = 3
"""A level expires if so many readings after it fail."""


class Place(NamedTuple):
    """Of a level."""

    source: str
    model: str
    seat: str
    tier: str


Levels = Mapping[Place, int | None]
"""None: not known; the last level stays until it expires."""


class OutsideLoad:
    """``jobs`` read it, as the settings say."""

    def __init__(
        self,
        settings: RouterSettings,
        bus: Bus,
        http: aiohttp.ClientSession,
        dispatcher: Dispatcher,
        readings: Counter,
    ) -> None:
        self._settings, self._bus, self._http, self._dispatcher = settings, bus, http, dispatcher
        self._readings = readings
        self.loads = Loads()
        """Levels of all other sources: an engine computes the requests of them all."""
        self._before: dict[str, int] = {}
        """By seat: requests of other callers in the last reading."""
        self._seq = 0

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the router ends, by name."""
        seconds = self._settings.engine_metrics_seconds
        if not seconds:
            return {}
        return {"engine-metrics": self._publish_each(seconds), "other levels": self._listen()}

    async def _listen(self) -> None:
        """Receive the levels of all sources but this router and the readings of engines."""
        async with self._bus.subscribe(TrafficSignal.pattern(), NodeTrafficSignal.pattern()) as messages:
            async for message in messages:
                ours = isinstance(message, TrafficSignal) and message.source == self._settings.instance
                if isinstance(message, TrafficSignal) and not ours and not message.source.startswith(ENGINES):
                    self.loads.add(message, time.monotonic())

    async def _publish_each(self, seconds: float) -> NoReturn:
        """Publish each reading, and a last 0 of places that it has no more."""
        published: Levels = {}
        while True:
            await asyncio.sleep(seconds)
            self.loads.forget(time.monotonic())
            found = await self._engines()
            for place in {**published, **found}:
                if (count := found.get(place, 0)) is not None:
                    await self._publish(place, count, seconds)
            published = found

    async def _publish(self, place: Place, count: int, seconds: float) -> None:
        self._seq = max(self._seq + 1, time.time_ns() // 1_000_000)
        signal = TrafficSignal(
            cause=place.source,
            source=place.source,
            model=place.model,
            seat=place.seat,
            tier=place.tier,
            in_flight=count,
            seq=self._seq,
            ttl_seconds=VALID_INTERVALS * seconds,
        )
        with contextlib.suppress(BusError):  # the next reading is published again, and receivers drop this level
            for one in addressed(signal, self._dispatcher.traffic.table):
                await self._bus.publish(one)

    async def _engines(self) -> Levels:
        """Ask the active engines; return the requests of other callers that they had in this reading and the last."""
        seats = self._dispatcher.traffic.table.upstreams.values()
        active = [seat for seat in seats if seat.record.state is SeatState.ACTIVE and seat.record.endpoint]
        at_once = asyncio.Semaphore(AT_ONCE)
        others = await asyncio.gather(*(self._others(seat, at_once) for seat in active))
        before, self._before, found = self._before, dict[str, int](), dict[Place, int | None]()
        for seat, now in zip(active, others, strict=True):
            last = before.get(seat.key, 0)
            self._before[seat.key] = last if now is None else now
            if last:
                place = Place(f"{ENGINES}{seat.record.node}", seat.model, seat.record.seat, seat.record.tier)
                found[place] = None if now is None else min(last, now)
        return found

    async def _others(self, seat: Upstream, at_once: asyncio.Semaphore) -> int | None:
        """Return how many requests the engine has that no source reports; None: it does not tell."""
        async with at_once:
            if seat.record.state is not SeatState.ACTIVE:  # since the list was made
                return None
            known = self._known(seat)
            load = await self._load(seat)
            known = max(known, self._known(seat))
        self._readings.labels("engine", "failed" if load is None else "ok").inc()
        running, waiting = (min(MOST_REQUESTS, count) for count in load or (0, 0))
        others = self.loads.sources(seat.model, seat.record.seat, time.monotonic())
        self._dispatcher.feed(EngineReported(seat.key, running, waiting, 1 + len(others)))
        return None if load is None else min(MOST_REQUESTS, max(0, running + waiting - known))

    async def _load(self, seat: Upstream) -> EngineLoad | None:
        """Return the requests of all callers; None: its metrics do not tell, or not in time."""
        for path in METRICS_PATHS:
            # llama.cpp with several models needs the name, and must not load it for that; others ignore both
            metrics = await fetch(self._http, f"{seat.record.endpoint}{path}", model=seat.model, autoload="false")
            if metrics is None:
                break
            if (load := load_in(metrics)) is not None:
                return load
        return None

    def _known(self, seat: Upstream) -> int:
        """Return the requests at a seat that this router or another source reports."""
        load = self.loads.of(seat.model, seat.record.seat, time.monotonic())
        return len(seat.in_flight) + load.waiting + load.in_flight
