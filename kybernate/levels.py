"""The sum of the traffic levels of all sources. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from kybernate.messages import TrafficSignal


@dataclass(frozen=True, slots=True)
class Load:
    """Requests waiting and in flight."""

    waiting: int = 0
    in_flight: int = 0
    oldest: float = 0.0
    """Model seconds that the oldest waiting request had waited when its source reported it."""


MOST_LEVELS = 50_000
"""Levels that are kept at a time; those of further sources do not count until some have expired."""


class Loads:
    """All levels that have not expired. Times are wall seconds of CLOCK_MONOTONIC, taken at receipt."""

    def __init__(self) -> None:
        self._levels: dict[str, dict[tuple[str, str | None, str], tuple[int, float, Load]]] = {}
        """By model, then by (source, seat, tier): its sequence, when it expires, the level."""
        self.count = 0

    def add(self, signal: TrafficSignal, now: float) -> None:
        """Store a level; one whose ``seq`` is lower than that of its source's valid level is out of date."""
        levels, key = self._levels.get(signal.model, {}), (signal.source, signal.seat, signal.tier)
        known = levels.get(key)
        if known is not None and signal.seq < known[0] and now < known[1]:
            return
        if known is None:
            if self.count >= MOST_LEVELS:
                return
            self.count += 1
            levels = self._levels.setdefault(signal.model, {})
        load = Load(signal.waiting, signal.in_flight, signal.oldest_wait_seconds or 0.0)
        levels[key] = (signal.seq, now + signal.ttl_seconds, load)

    def forget(self, now: float) -> None:
        """Drop the expired levels."""
        for model, levels in list(self._levels.items()):
            for key in [key for key, (_, until, _) in levels.items() if until <= now]:
                del levels[key]
                self.count -= 1
            if not levels:
                del self._levels[model]

    def busy(self, now: float) -> Iterator[tuple[str, str, Load]]:
        """Yield (model, seat or "", level) of each valid level that is not zero."""
        for model, levels in self._levels.items():
            for (_, seat, _), (_, until, load) in levels.items():
                if now < until and (load.waiting or load.in_flight):
                    yield model, seat or "", load

    def of(self, model: str, seat: str | None, now: float, *, unassigned: bool = False) -> Load:
        """Return the load of a seat of this model; seat None: of the model.

        ``unassigned`` adds the levels that name no seat, as the manager does for the seat that would serve them.
        """
        loads = [
            load
            for (_, at, _), (_, until, load) in self._levels.get(model, {}).items()
            if now < until and (seat in (None, at) or (unassigned and at is None))
        ]
        return Load(sum(load.waiting for load in loads), sum(load.in_flight for load in loads))
