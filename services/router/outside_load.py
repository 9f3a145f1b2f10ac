"""Load of callers that do not come through a router: what engines count beyond it, and what Prometheus knows.

It is published as levels, like that of other gateways. All routers name the same sources, so that their levels replace
each other instead of adding up.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, NoReturn

import aiohttp
import yaml
from prometheus_client import Counter

from kybernate.bus.port import Bus, BusError
from kybernate.config_errors import ConfigError
from kybernate.engines import METRICS_PATHS, EngineLoad, load_in
from kybernate.fetch import AT_ONCE, fetch
from kybernate.levels import Loads
from kybernate.logs import OnceLogger
from kybernate.messages import NodeTrafficSignal, TrafficSignal
from kybernate.messages.signals import MOST_REQUESTS
from kybernate.seat import SeatState
from services.router.core.reports import addressed
from services.router.core.step import EngineReported
from services.router.core.upstreams import Upstream
from services.router.dispatch import Dispatcher
from services.router.settings import RouterSettings

FORGET_SECONDS = 10.0
"""Interval at which expired levels are forgotten."""
VALID_INTERVALS = 3
"""A level expires if so many readings after it fail."""
MODEL_LABELS = ("model", "model_name")


class Place(NamedTuple):
    """Of a level."""

    source: str
    model: str
    seat: str | None = None
    tier: str = "standard"


Levels = Mapping[Place, int | None]
"""None: not known; the last level stays until it expires."""


class OutsideLoad:
    """``jobs`` read it, as the settings say. Raises ConfigError."""

    def __init__(
        self,
        settings: RouterSettings,
        bus: Bus,
        http: aiohttp.ClientSession,
        dispatcher: Dispatcher,
        aliases: Mapping[str, str],
        readings: Counter,
    ) -> None:
        self._settings, self._bus, self._http, self._dispatcher = settings, bus, http, dispatcher
        self._aliases, self._readings = aliases, readings
        self.loads = Loads()
        """Levels of all sources: an engine computes the requests of them all."""
        self._queries = queries_of(settings)
        self._before: dict[str, int] = {}
        """By seat: requests of other callers in the last reading."""
        self._seq = 0

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the router ends, by name."""
        engines, prometheus = self._settings.engine_metrics_seconds, self._settings.prometheus_seconds
        found: dict[str, Coroutine[Any, Any, None]] = {}
        if engines:
            found["engine-metrics"] = self._every(engines, self._engines)
            found["other levels"] = self._listen()
            found["forget levels"] = self._forget()
        for pattern, query in self._queries.items():
            read = partial(self._prometheus, pattern, query, OnceLogger("prometheus.unanswered"))
            found[f"prometheus {pattern}"] = self._every(prometheus, read)
        return found

    async def _listen(self) -> NoReturn:
        """Receive the levels of all sources."""
        async with self._bus.subscribe(TrafficSignal.pattern(), NodeTrafficSignal.pattern()) as messages:
            async for message in messages:
                if isinstance(message, TrafficSignal):
                    self.loads.add(message, time.monotonic())
        raise BusError("the bus was closed")

    async def _forget(self) -> NoReturn:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            self.loads.forget(time.monotonic())

    async def _every(self, seconds: float, read: Callable[[], Awaitable[Levels | None]]) -> NoReturn:
        """Publish what ``read`` returns, and a last 0 of what it returns no more; None: nothing is known."""
        published: Levels = {}
        while True:
            await asyncio.sleep(seconds)
            found = await read()
            if found is None:
                continue
            for place in {**published, **found}:
                if (count := found.get(place, 0)) is not None:
                    await self._publish(place, count, seconds)
            published = found

    async def _publish(self, place: Place, count: int, seconds: float) -> None:
        """Requests at a seat are in flight; without one they wait for their model."""
        self._seq = max(self._seq + 1, time.time_ns() // 1_000_000)
        signal = TrafficSignal(
            cause=place.source,
            source=place.source,
            model=place.model,
            seat=place.seat,
            tier=place.tier,
            waiting=count if place.seat is None else 0,
            in_flight=0 if place.seat is None else count,
            seq=self._seq,
            ttl_seconds=VALID_INTERVALS * seconds,
        )
        try:
            for one in addressed(signal, self._dispatcher.traffic.table.records_of(place.model, place.seat)):
                await self._bus.publish(one)
        except BusError:
            pass  # the next reading is published again, and receivers drop this level

    # --- engines ------------------------------------------------------------------------------------------------------

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
                place = Place(_source(seat), seat.model, seat.record.seat, seat.record.tier)
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
        besides = self._settings.instance, _source(seat)
        others = self.loads.sources(seat.model, seat.record.seat, time.monotonic(), besides=besides)
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
        besides = self._settings.instance, _source(seat)
        load = self.loads.of(seat.model, seat.record.seat, time.monotonic(), besides=besides)
        return len(seat.in_flight) + load.waiting + load.in_flight

    # --- Prometheus ---------------------------------------------------------------------------------------------------

    async def _prometheus(self, pattern: str, query: str, failed: OnceLogger) -> Levels | None:
        """Return the requests that wait for each model."""
        body = await fetch(self._http, self._settings.prometheus_url.rstrip("/") + "/api/v1/query", query=query)
        samples = None if body is None else samples_of(body, pattern)
        self._readings.labels("prometheus", "failed" if samples is None else "ok").inc()
        if samples is None:
            failed.log(pattern=pattern, url=self._settings.prometheus_url)
            return None
        failed.clear()
        found: dict[Place, int] = {}
        for name, count in samples:
            model = self._aliases.get(name, name)
            if self._dispatcher.traffic.serves(model):
                place = Place(f"prometheus/{pattern}", model)
                found[place] = min(MOST_REQUESTS, found.get(place, 0) + count)
        return found


def _source(seat: Upstream) -> str:
    return f"engines/{seat.record.node}"


def queries_of(settings: RouterSettings) -> dict[str, str]:
    """Return the queries by pattern of models. Raises ConfigError."""
    text = settings.prometheus_queries
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise ConfigError(f'KYB_PROMETHEUS_QUERIES={text!r}: write lines "PATTERN OF MODELS": QUERY')
    if found and not settings.prometheus_url.startswith(("http://", "https://")):
        raise ConfigError(f"KYB_PROMETHEUS_URL={settings.prometheus_url!r}: write http://HOST:PORT for the queries")
    return found


def samples_of(body: bytes, pattern: str) -> list[tuple[str, int]] | None:
    """Return (model, count) of an answer to an instant query, for models that fit; None: it is no such answer.

    A sample that is negative or no number counts 0. One without a label of a model is of the model ``pattern``.
    """
    try:
        data = json.loads(body)["data"]
        samples = [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else data["result"]
        found = []
        for sample in samples:
            labels, value = sample["metric"], float(sample["value"][1])
            name = next((labels[label] for label in MODEL_LABELS if label in labels), pattern)
            if fnmatchcase(name, pattern):
                found.append((name, math.ceil(max(0.0, value)) if math.isfinite(value) else 0))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return found
