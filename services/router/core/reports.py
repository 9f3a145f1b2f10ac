"""What a router reports: its own traffic levels, and those of gateways. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kybernate.clock import Clock
from kybernate.messages import NodeTrafficSignal, TrafficSignal
from services.router.core.tenants import Allowance
from services.router.core.upstreams import CallCounts, RoutedCall, UpstreamTable

HISTOGRAM_STEPS = 16
CLOCK = Clock()


# --- levels of this router --------------------------------------------------------------------------------------------


def level_of(
    table: UpstreamTable, model: str, key: str | None, now: float, clock: Clock = CLOCK, source: str = "router"
) -> TrafficSignal:
    """Return this router's calls for (model, seat) now, and since the seat serves it; key None: the calls that wait at
    no seat, because none is usable. What depends on the last publication is missing."""
    waiting: Mapping[int, RoutedCall] = {}
    about: dict[str, Any] = {"cause": "router"}
    if key is None:
        waiting, about = table.model(model).orphans, {"cause": model}
    elif (upstream := table.upstreams.get(key)) is not None:
        in_flight, counts = 0, CallCounts()
        if upstream.model == model:
            waiting, in_flight, counts = upstream.waiting, len(upstream.in_flight), upstream.counts
            if upstream.full:  # they wait for a place in the engine, not for the seat
                waiting, in_flight = {}, in_flight + len(waiting)
        about = {
            "cause": counts.last_cause,
            "seat": upstream.record.seat,
            "tier": upstream.record.tier,
            "in_flight": in_flight,
            "arrived": counts.arrivals,
            "served": counts.served,
            "served_seconds": clock.to_model(counts.served_seconds),
        }
    oldest = min(waiting.values(), key=lambda call: call.request, default=None)
    if oldest is not None:
        about |= {"cause": oldest.cause, "oldest_wait_seconds": clock.to_model(now - oldest.arrived)}
    ages = age_histogram(clock.to_model(now - call.arrived) for call in waiting.values())
    return TrafficSignal(source=source, model=model, waiting=len(waiting), age_histogram=ages, **about)


def addressed(signal: TrafficSignal, table: UpstreamTable, key: str | None = None) -> list[TrafficSignal]:
    """Return a level as it is published: once for each node with a seat that it concerns, to all if none is known.

    ``key``: of its seat, which may serve another model by now; a seat that is gone has no level, and its last one
    expires. Without a key all seats of the model with the signal's name are meant.
    """
    one = table.upstreams.get(key or "")
    if one is None and key is not None:
        return []
    records = [one.record] if one is not None else table.records_of(signal.model, signal.seat)
    nodes = dict.fromkeys(record.node for record in records)
    if not nodes:
        return [signal]
    return [NodeTrafficSignal.model_construct(**dict(signal), node=node) for node in nodes]


def age_histogram(ages: Iterable[float]) -> tuple[tuple[float, int], ...]:
    """Return ages, oldest first, in at most HISTOGRAM_STEPS: (mean age of the step, number of calls in it).

    Exact while there are no more calls than steps. Otherwise the oldest call has its own step and the others form steps
    of equal size, plus or minus one, so that the sum stays exact and no age is far from its step.
    """
    ordered, most = sorted(ages, reverse=True), HISTOGRAM_STEPS
    if len(ordered) <= most:
        return tuple((age, 1) for age in ordered)
    found = [(ordered[0], 1)]
    rest = ordered[1:]
    for step in range(most - 1):
        part = rest[step * len(rest) // (most - 1) : (step + 1) * len(rest) // (most - 1)]
        found.append((sum(part) / len(part), len(part)))
    return tuple(found)


# --- signals of gateways ----------------------------------------------------------------------------------------------

MOST_CALLERS = 10_000
"""Known callers beyond which those that were silent for a while are forgotten."""


class SignalQuota:
    """How many signals each caller may send, and for how many sources at a time. Times as in Loads."""

    def __init__(self, per_second: float, burst: int, most_sources: int) -> None:
        self._most, self._most_sources = max(burst, math.ceil(per_second)), most_sources
        self._seconds = self._most / per_second
        self._left: dict[str, Allowance] = {}
        """By caller: signals that it may send."""
        self._sources: dict[str, dict[str, float]] = {}
        """By caller, then by source: when its last signal expires."""
        self._forget_at = 0.0

    def take(self, caller: str, count: int, now: float) -> int:
        """Count signals; 0 if they may be sent, else the seconds until they may."""
        if len(self._left) >= MOST_CALLERS and now >= self._forget_at:
            self._forget(now)
        if caller not in self._left:
            self._left[caller] = Allowance(self._most, self._seconds, self._most, now)
        return self._left[caller].take(count, now)

    def admits(self, caller: str, source: str, now: float, ttl_seconds: float) -> bool:
        """Remember a source of the caller; False if it has too many."""
        return admits(self._sources.setdefault(caller, {}), source, self._most_sources, now, now + ttl_seconds)

    def _forget(self, now: float) -> None:
        """Drop the callers that may send all again, and have no source any more; at most once a second."""
        self._forget_at = now + 1.0
        for caller, allowance in list(self._left.items()):
            expired = all(until <= now for until in self._sources.get(caller, {}).values())
            allowance.take(0, now)
            if expired and allowance.left >= self._most:
                del self._left[caller]
                self._sources.pop(caller, None)


def admits(known: dict[str, float], name: str, most: int, now: float, until: float) -> bool:
    """Remember a name until a time; False if ``most`` others are remembered now."""
    if known.get(name, now) <= now and len(known) >= most:
        for other in [other for other, end in known.items() if end <= now]:
            del known[other]
        if len(known) >= most:
            return False
    known[name] = until
    return True
