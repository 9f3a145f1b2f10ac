"""Which requests were served: those that waited by their records, the others by the counters of routers' levels. Pure.

A router records the requests that it held; its levels count all that were served. Seconds are wall seconds.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kybernate.messages import RequestEnded, TrafficSignal

MOST_REQUESTS = 20_000
"""Of one step of ``Served.settle``: what a plan remembers."""
MOST_WAITS = 2_000
"""Waits that are kept of each model."""


class ServedRequest(NamedTuple):
    """One request, as a plan plays it."""

    ended_at: float
    """Unix seconds."""
    model: str
    seconds: float
    held_seconds: float


class Served:
    """Requests that were served since the console started. ``settle`` is called every second."""

    def __init__(self, to_wall: Callable[[float], float]) -> None:
        self._to_wall = to_wall
        self._counts: dict[tuple[str, str, str], tuple[str, int, float]] = {}
        """By source, model and seat: incarnation, requests and their seconds in flight when last counted."""
        self._new: Counter[str] = Counter()
        """Requests counted since the last step: their records, if they have one, come within it."""
        self._due: Counter[str] = Counter()
        """Those of the step before, less the recorded ones. Below 0: a record came before its count."""
        self._seconds: dict[str, float] = {}
        """By model: mean seconds in flight of those counted last."""

    def count(self, signal: TrafficSignal) -> None:
        """Take the counters of a level. Counting begins with the first one of a seat, unless that is the first one that
        its source sends: then all its arrivals are new."""
        if signal.served is None or signal.seat is None:
            return
        key = signal.source, signal.model, signal.seat
        seconds = self._to_wall(signal.served_seconds or 0.0)
        first = (signal.incarnation, signal.served, seconds)
        if signal.arrivals == signal.arrived:
            first = (signal.incarnation, 0, 0.0)
        incarnation, served, before = self._counts.get(key, first)
        if incarnation != signal.incarnation:
            served, before = 0, 0.0
        if signal.served > served:
            self._new[signal.model] += signal.served - served
            self._seconds[signal.model] = max(0.0, seconds - before) / (signal.served - served)
        self._counts[key] = signal.incarnation, signal.served, seconds

    def record(self, ended: RequestEnded) -> ServedRequest | None:
        """Take the record of a request; None if it was not served."""
        if ended.status >= 400 or not ended.seat:
            return None
        self._due[ended.model] -= 1
        return ServedRequest(ended.arrived_at + ended.seconds, ended.model, ended.seconds, ended.held_seconds)

    def settle(self, now: float) -> Iterator[ServedRequest]:
        """Yield the requests that did not wait and ended during the second before the last one."""
        for model, count in self._due.items():
            for place in range(min(count, MOST_REQUESTS)):
                yield ServedRequest(now - 1.0 - place / count, model, self._seconds[model], 0.0)
        self._due = Counter({model: count for model, count in self._due.items() if count < 0})
        self._due.update(self._new)
        self._new = Counter()


class Waits:
    """How long the served requests of each model waited: the last ones, those that did not wait included."""

    def __init__(self) -> None:
        self.waits: dict[str, deque[float]] = {}
        """By model."""
        self.changed: set[str] = set()
        """Models with new waits since the caller cleared it."""

    def add(self, model: str, seconds: float) -> None:
        """Store one wait."""
        waits = self.waits.get(model)
        if waits is None:
            waits = self.waits[model] = deque(maxlen=MOST_WAITS)
        waits.append(seconds)
        self.changed.add(model)

    def of(self, model: str) -> dict[str, float]:
        """Return count, p50 and p99 of the kept waits; empty without any."""
        waits = sorted(self.waits.get(model, ()))
        if not waits:
            return {}
        return {"count": len(waits), "p50": _quantile(waits, 0.5), "p99": _quantile(waits, 0.99)}


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
