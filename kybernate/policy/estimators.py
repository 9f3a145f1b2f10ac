"""What is learned about seats: arrival rates, service times, costs, and how well the next seat is guessed. Pure.

The GPU manager and the simulator feed the same classes with (time, count) or with measured values. Times are model
seconds on any clock that does not run backwards; a time before the last one counts as the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, expm1, log
from typing import ClassVar

FAST_HALF_LIFE = 60.0
"""Of ``SeatView.rate_fast``: follows a burst."""
SLOW_HALF_LIFE = 900.0
"""Of ``SeatView.rate_slow``: what a seat is like."""
SERVICE_WEIGHT = 0.02
"""Of a new value in the mean of service times. They spread widely: with 0.1 the noise of this mean alone made waits
0.7 % longer (docs/policy.md)."""
COST_WEIGHT = 0.3
"""Of a new value in the mean of park and activate seconds: few values, and they change with the machine."""

_LEAST_SEEN = 0.25
"""Half-lives that count as seen at once: the first arrival says little about the rate."""


@dataclass(slots=True)
class Rate:
    """Events per second: each counts half as much after ``half_life`` seconds.

    Divided by the weight of the time seen so far, so that it is not too low while little time was seen.
    """

    half_life: float
    since: float = 0.0
    """Since when events would have been counted."""
    _sum: float = field(default=0.0, init=False)
    _last: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise ValueError(f"half_life is {self.half_life}; it must be positive")
        self._last = self.since

    def add(self, time: float, count: float = 1.0) -> None:
        """``count`` events happened by ``time``."""
        self._decay(time)
        self._sum += count

    def at(self, time: float) -> float:
        """Events per second, as known at ``time``."""
        decay = log(2.0) / self.half_life
        now = max(time, self._last)
        seen = max(now - self.since, _LEAST_SEEN * self.half_life)
        return self._sum * exp(-decay * (now - self._last)) * decay / -expm1(-decay * seen)

    def _decay(self, time: float) -> None:
        if time > self._last:
            self._sum *= exp(-log(2.0) / self.half_life * (time - self._last))
            self._last = time


@dataclass(slots=True)
class Arrivals:
    """Both rates of one seat."""

    since: float = 0.0
    fast: Rate = field(init=False)
    slow: Rate = field(init=False)

    def __post_init__(self) -> None:
        self.fast = Rate(FAST_HALF_LIFE, self.since)
        self.slow = Rate(SLOW_HALF_LIFE, self.since)

    def add(self, time: float, count: float = 1.0) -> None:
        """``count`` requests arrived by ``time``."""
        self.fast.add(time, count)
        self.slow.add(time, count)

    def at(self, time: float) -> float:
        """Requests per second that are expected: between what the last minute and the last quarter of an hour say."""
        return (self.fast.at(time) + self.slow.at(time)) / 2


@dataclass(slots=True)
class Ewma:
    """Exponentially weighted mean; the first values weigh as in a plain mean, so the start value only fills a gap."""

    weight: float
    value: float = 0.0
    """The mean so far; before the first value: what was assumed."""
    count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight is {self.weight}; it must be above 0 and at most 1")

    def add(self, value: float) -> None:
        """A new measured value."""
        self.count += 1
        self.value += max(self.weight, 1.0 / self.count) * (value - self.value)


@dataclass(slots=True)
class Occupancy:
    """Service time from counts alone, by Little's law: request-seconds in flight divided by requests that ended."""

    assumed: float
    """Seconds, until enough ended."""
    half_life: float = SLOW_HALF_LIFE
    _seconds: float = field(default=0.0, init=False)
    _ended: float = field(default=0.0, init=False)
    _in_flight: int = field(default=0, init=False)
    _last: float | None = field(default=None, init=False)

    def add(self, time: float, in_flight: int, ended: int) -> None:
        """At ``time`` this many are in flight, and ``ended`` have ended since the last call."""
        if self._last is not None and time > self._last:
            decay, step = log(2.0) / self.half_life, time - self._last
            kept = exp(-decay * step)
            self._seconds = self._seconds * kept + self._in_flight * (1.0 - kept) / decay  # the step fades, too
            self._ended *= kept
        self._last = time if self._last is None else max(time, self._last)
        self._ended += ended
        self._in_flight = in_flight

    @property
    def service_seconds(self) -> float:
        """Mean seconds in flight; the assumed value weighs as much as one request."""
        return (self._seconds + self.assumed) / (self._ended + 1.0)


@dataclass(slots=True)
class Hits:
    """How often the seat with the highest rate was the one that the next request was for."""

    weight: float = 0.02
    rate: Ewma = field(init=False)

    least: ClassVar[int] = 20
    """Guesses before their share means anything: after one, it would be 0 or 1."""

    def __post_init__(self) -> None:
        self.rate = Ewma(self.weight)

    def add(self, arrived: str, rates: Mapping[str, float]) -> None:
        """A request arrived for one seat; ``rates`` are those of all seats just before it. Without any there is no
        guess.
        """
        guess = max(rates, key=lambda seat: (rates[seat], seat), default=None)
        if guess is not None and rates[guess] > 0:
            self.rate.add(float(guess == arrived))

    @property
    def share(self) -> float | None:
        """For ``GroupView.hit_share``; None while too few guesses were made."""
        return self.rate.value if self.rate.count >= self.least else None
