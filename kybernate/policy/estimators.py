"""Estimators of a seat's arrival rates, service times and costs. Pure.

The GPU manager and the simulator feed the same classes with (time, count) or with measured values. Times are model
seconds on any monotonic clock; a time before the last one counts as the last one.
"""

from dataclasses import dataclass, field
from math import exp, expm1, log

FAST_HALF_LIFE = 60.0
"""Seconds, of ``SeatView.rate_fast``: follows a burst."""
SLOW_HALF_LIFE = 900.0
"""Seconds, of ``SeatView.rate_slow``: a seat's usual rate."""
SERVICE_WEIGHT = 0.02
"""Weight of a new value in the mean of service times. They spread widely: with 0.1 the noise of this mean alone made
waits 0.7 % longer (docs/dev/policy.md)."""
COST_WEIGHT = 0.3
"""Weight of a new value in the mean of park and activate seconds: few values, which change with the machine."""

LEAST_SEEN = 0.25
"""Least observed time, in half-lives: the first arrival says little about the rate."""
_LOG2 = log(2.0)
_LONG = 37.0
"""1 - exp(-37) is 1 as a float."""


@dataclass(slots=True)
class Rate:
    """Events per second: each counts half as much after ``half_life`` seconds.

    Divided by the weight of the observed time, so that the rate is not too low at the beginning.
    """

    half_life: float
    since: float = 0.0
    """Start of the observation."""
    _sum: float = field(default=0.0, init=False)
    _last: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._last = self.since

    def add(self, time: float, count: float = 1.0) -> None:
        """Count ``count`` events at ``time``."""
        if time > self._last:
            self._sum *= exp(-_LOG2 / self.half_life * (time - self._last))
            self._last = time
        self._sum += count

    def at(self, time: float) -> float:
        """Return events per second as estimated at ``time``."""
        decay = _LOG2 / self.half_life
        now = time if time > self._last else self._last
        seen = decay * (now - self.since)
        faded = self._sum * exp(-decay * (now - self._last)) * decay
        return faded if seen > _LONG else faded / -expm1(-max(seen, LEAST_SEEN * _LOG2))


@dataclass(slots=True)
class Arrivals:
    """Both arrival rates of one seat."""

    since: float = 0.0
    fast: Rate = field(init=False)
    slow: Rate = field(init=False)

    def __post_init__(self) -> None:
        self.fast = Rate(FAST_HALF_LIFE, self.since)
        self.slow = Rate(SLOW_HALF_LIFE, self.since)

    def add(self, time: float, count: float = 1.0) -> None:
        """Count ``count`` requests at ``time``."""
        self.fast.add(time, count)
        self.slow.add(time, count)

    def at(self, time: float) -> float:
        """Expected requests per second: between the rates of the last minute and of the last quarter of an hour."""
        return (self.fast.at(time) + self.slow.at(time)) / 2


@dataclass(slots=True)
class Ewma:
    """Exponentially weighted mean; the first values weigh as in a plain mean, so the start value only fills a gap."""

    weight: float
    value: float = 0.0
    """The mean so far; before the first value, the assumed one."""
    count: int = field(default=0, init=False)

    def add(self, value: float) -> None:
        """Add a measured value."""
        self.count += 1
        self.value += max(self.weight, 1.0 / self.count) * (value - self.value)
