"""How long the served requests of each model waited: those that waited by their records, the others by the counters of
routers' levels. Pure.

A router records the requests that it held; its levels count all that were served. Seconds are wall seconds.
"""

import math
from collections import Counter, deque

from kybernate.messages import RequestEnded, TrafficSignal

MOST_WAITS = 2_000
"""Waits that are kept of each model."""


class Waits:
    """Waits of the requests that were served since the console started. ``settle`` is called every second."""

    def __init__(self) -> None:
        self.waits: dict[str, deque[float]] = {}
        """By model: the last ones, those of 0 included."""
        self.changed: set[str] = set()
        """Models with new waits since the caller cleared it."""
        self._counts: dict[tuple[str, str, str], tuple[str, int]] = {}
        """By source, model and seat: incarnation, and requests when last counted."""
        self._new: Counter[str] = Counter()
        """Requests counted since the last step: their records, if they have one, come within it."""
        self._due: Counter[str] = Counter()
        """Those of the step before, less the recorded ones. Below 0: a record came before its count."""

    def count(self, signal: TrafficSignal) -> None:
        """Take the counter of a level. Counting begins with the first one of a seat, unless that is the first one that
        its source sends: then all its arrivals are new."""
        if signal.served is None or signal.seat is None:
            return
        key = signal.source, signal.model, signal.seat
        first = 0 if signal.arrivals == signal.arrived else signal.served
        incarnation, served = self._counts.get(key, (signal.incarnation, first))
        if incarnation != signal.incarnation:
            served = 0
        if signal.served > served:
            self._new[signal.model] += signal.served - served
        self._counts[key] = signal.incarnation, signal.served

    def record(self, ended: RequestEnded) -> None:
        """Take the record of a request."""
        if ended.status < 400 and ended.seat:
            self._due[ended.model] -= 1
            self._add(ended.model, ended.held_seconds)

    def settle(self) -> None:
        """Take the requests that did not wait and ended during the second before the last one."""
        for model, count in self._due.items():
            for _ in range(min(count, MOST_WAITS)):
                self._add(model, 0.0)
        self._due = Counter({model: count for model, count in self._due.items() if count < 0})
        self._due.update(self._new)
        self._new = Counter()

    def of(self, model: str) -> dict[str, float]:
        """Return count, p50 and p99 of the kept waits; empty without any."""
        waits = sorted(self.waits.get(model, ()))
        if not waits:
            return {}
        return {"count": len(waits), "p50": _quantile(waits, 0.5), "p99": _quantile(waits, 0.99)}

    def _add(self, model: str, seconds: float) -> None:
        self.waits.setdefault(model, deque(maxlen=MOST_WAITS)).append(seconds)
        self.changed.add(model)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
