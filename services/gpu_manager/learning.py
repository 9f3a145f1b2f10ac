"""What the manager learns from signals: how often requests arrive for each seat and how long they take. Pure.

Sources count since they started, so a lost signal loses no request: what counts is the difference to the last one
heard. A source that counts only a window (another gateway, an older router) is taken at its word, and no more than once
per window. Costs of parking and activating are learned where switches end (``outcomes``).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from kybernate.messages import TrafficSignal
from kybernate.policy.estimators import SERVICE_WEIGHT, Arrivals, Ewma, Hits, Rate
from services.gpu_manager.inputs import Now

ASSUMED_SERVICE_SECONDS = 5.0
"""Until a seat has served anything."""
MOST_AT_ONCE = 64
"""Requests of one signal that count one by one in the mean of service times; more would not change it."""
MOST_SOURCES = 4096
"""Of which counters are remembered; the longest silent ones are forgotten first."""

Key = tuple[str, str, str, str]
"""(source, model, seat or empty, tier), as the source names them."""


@dataclass(slots=True)
class Counters:
    """What one source said last."""

    seq: int
    heard: float
    """Model time."""
    incarnation: str = ""
    arrived: int = 0
    served: int = 0
    served_seconds: float = 0.0


@dataclass(slots=True)
class Learned:
    """One seat, while it serves one model."""

    model: str
    arrivals: Arrivals
    service: Ewma


@dataclass
class Learning:
    """All seats of a node. Times are model seconds."""

    seats: dict[str, Learned] = field(default_factory=dict)
    counters: dict[Key, Counters] = field(default_factory=dict)
    hits: dict[str, Hits] = field(default_factory=dict)
    """By group: how often the next request was for the seat with the highest rate."""

    def rates(self, seats: Iterable[str], now: Now) -> dict[str, float]:
        """What these seats are expected to get, requests per second, of those about which anything is known."""
        known = {seat: self.seats[seat].arrivals for seat in seats if seat in self.seats}
        return {seat: (of.fast.at(now.model) + of.slow.at(now.model)) / 2 for seat, of in known.items()}

    def of(self, seat: str, model: str) -> Learned | None:
        """What is known about this seat; None: nothing about this model there."""
        known = self.seats.get(seat)
        return known if known is not None and known.model == model else None

    def hear(self, signal: TrafficSignal, seat: str, now: Now) -> int:
        """Take a signal in that concerns ``seat``; returns how many requests it tells of that had not been told."""
        key = (signal.source, signal.model, signal.seat or "", signal.tier)  # its counter, wherever the requests go
        last = self.counters.get(key)
        arrived, served, seconds = _news(signal, last, now)
        if last is None or signal.seq >= last.seq or signal.incarnation != last.incarnation:
            self.counters[key] = Counters(
                signal.seq,
                now.model,
                signal.incarnation,
                signal.arrived if signal.arrived is not None else last.arrived if last else 0,
                signal.served or 0,
                signal.served_seconds or 0.0,
            )
        learned = self.of(seat, signal.model)
        if learned is None:
            learned = self.seats[seat] = Learned(
                signal.model, Arrivals(now.model), Ewma(SERVICE_WEIGHT, ASSUMED_SERVICE_SECONDS)
            )
        if arrived:
            learned.arrivals.add(now.model, arrived)
        for _ in range(min(served, MOST_AT_ONCE)):
            learned.service.add(seconds / served)
        if len(self.counters) > MOST_SOURCES:
            for old in sorted(self.counters, key=lambda each: self.counters[each].heard)[: MOST_SOURCES // 4]:
                del self.counters[old]
        return arrived

    def guessed(self, group: str, seat: str, count: int, rates: Mapping[str, float]) -> None:
        """So many requests arrived for a seat of this group; ``rates`` are those of its seats before."""
        hits = self.hits.setdefault(group, Hits())
        for _ in range(min(count, MOST_AT_ONCE)):
            hits.add(seat, rates)

    # --- over a restart -----------------------------------------------------------------------------------------

    def kept(self, now: Now) -> dict[str, Any]:
        """All of it, as JSON data for ``restore``."""
        return {
            "unix": now.unix,
            "seats": {name: _kept_seat(seat, now) for name, seat in self.seats.items()},
            "counters": [
                [*key, last.incarnation, last.seq, last.arrived, last.served, last.served_seconds]
                for key, last in self.counters.items()
            ],
        }

    def restore(self, data: dict[str, Any], now: Now, seats: Collection[str]) -> None:
        """Go on from what ``kept`` gave about these seats; nothing is taken over from anything else.

        Raises KeyError, TypeError, AttributeError, OverflowError or ValueError then.

        Counters go on too: what arrived while no manager ran is counted with the first signal.
        """
        then = now.model - max(0.0, now.unix - _number(data["unix"])) * now.pace
        found = {str(name): _restored_seat(seat, then) for name, seat in data["seats"].items()}
        counters = {}
        for source, model, seat, tier, incarnation, seq, arrived, served, seconds in data["counters"]:
            last = Counters(int(seq), then, str(incarnation), int(arrived), int(served), _number(seconds))
            counters[str(source), str(model), str(seat), str(tier)] = last
        self.seats, self.counters = {name: seat for name, seat in found.items() if name in seats}, counters


def _news(signal: TrafficSignal, last: Counters | None, now: Now) -> tuple[int, int, float]:
    """(arrived, served, seconds in flight of those) since the last signal of this source."""
    if signal.arrived is None:
        return _windowed(signal, last, now), 0, 0.0
    if last is None:
        return signal.arrivals, 0, 0.0  # when its counting began is not known
    if last.incarnation != signal.incarnation:
        return signal.arrived, signal.served or 0, signal.served_seconds or 0.0
    served = max(0, (signal.served or 0) - last.served)
    seconds = max(0.0, (signal.served_seconds or 0.0) - last.served_seconds)
    return max(0, signal.arrived - last.arrived), served, seconds


def _windowed(signal: TrafficSignal, last: Counters | None, now: Now) -> int:
    """Arrivals of a source that counts only a window; windows that overlap count for the new part only."""
    if last is None:
        return signal.arrivals
    if signal.seq < last.seq:
        return 0
    return round(signal.arrivals * min(1.0, (now.model - last.heard) / signal.window_seconds))


def _kept_seat(seat: Learned, now: Now) -> dict[str, Any]:
    return {
        "model": seat.model,
        "fast": seat.arrivals.fast.at(now.model),
        "slow": seat.arrivals.slow.at(now.model),
        "seen": now.model - seat.arrivals.since,
        "service": seat.service.value,
        "served": seat.service.count,
    }


def _restored_seat(data: dict[str, Any], then: float) -> Learned:
    seen = _number(data["seen"])
    arrivals = Arrivals(then - seen)
    for rate, value in ((arrivals.fast, _number(data["fast"])), (arrivals.slow, _number(data["slow"]))):
        _set(rate, then, value)
    service = Ewma(SERVICE_WEIGHT, _number(data["service"]))
    service.count = int(_number(data["served"]))
    return Learned(str(data["model"]), arrivals, service)


def _number(value: Any) -> float:
    """JSON also reads NaN and Infinity, which would never leave a mean again."""
    number = float(value)
    if not (isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is no amount")
    return number


def _set(rate: Rate, time: float, value: float) -> None:
    """Make ``rate`` what it was: so many events at once as give this value."""
    rate.add(time, 1.0)
    one = rate.at(time)
    rate.add(time, value / one - 1.0)
