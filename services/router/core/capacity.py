"""How many requests an engine serves at once, and how fast: learned from what it answers. Pure.

With more requests in flight an engine answers more per second, until its slots (vLLM's ``max_num_seqs``) are taken.
From then on further requests only wait in the engine. The learned limit is the smallest number in flight that no higher
number outdoes. It errs upwards: a limit that is too high costs waiting time, one that is too low costs throughput.
Answers differ in length by orders of magnitude, so rates are compared by means of logarithms, with their standard
errors: a few long answers prove nothing.
"""

import math
from dataclasses import dataclass

MOST_LIMIT = 256
"""Also the first one: vLLM's usual ``max_num_seqs``. An engine that serves more has to declare it."""
LEAST_LIMIT = 16
"""So that no mistake starves a model. An engine with fewer slots queues the others itself, unless it declares them."""
STEP = 1.6
"""Numbers in flight are distinguished in steps of this factor."""
ENOUGH = 8
"""Requests that make the rate of a step known."""
MANY = 256
"""Requests after which those of a step count half."""
NEARLY = math.log(1 / 0.9)
"""Logarithm of the ratio by which the rate of a step must be better to be notably better."""
ERRORS = 1.5
"""A rate may be better than it seems by so many standard errors of the difference."""
MOSTLY = 0.75
"""Share of the requests of a step that are answered where its rate can be trusted."""
PAUSE_SECONDS = 0.05
"""The limit is learned at most so often: it takes 15 µs, and a router may get thousands of answers per second."""
VALID_SECONDS = 120.0
"""Time without answers at a step after which its rate is measured anew."""
_LEAST_VARIANCE = 0.02
"""Of the logarithm of one rate: few equal answers prove little."""


@dataclass(slots=True)
class _Step:
    """Requests that found about the same number in flight when they were sent. Rates are answers per second, by
    Little's law: number in flight = rate x time that each of them takes."""

    in_flight: float = 0.0
    seconds: float = 0.0
    answers: float = 0.0
    gone: float = 0.0
    """Requests that got no answer: their callers gave up."""
    logs: float = 0.0
    squares: float = 0.0
    """Sums over the answers of the logarithm of the rate that each shows, and of its square."""
    until: float = 0.0

    def answered(self, found: int, seconds: float) -> None:
        """Count an answer."""
        log = math.log(found / seconds)
        self.in_flight += found
        self.seconds += seconds
        self.answers += 1
        self.logs += log
        self.squares += log * log

    @property
    def requests(self) -> float:
        return self.answers + self.gone

    @property
    def rate(self) -> float:
        """Mean rate of useful answers; requests that got none count."""
        return self.in_flight / self.seconds * self.answers / self.requests if self.seconds else 0.0

    @property
    def log_rate(self) -> float:
        """Logarithm of the typical rate: long answers do not count more."""
        return self.logs / self.answers + math.log(self.answers / self.requests)

    @property
    def variance(self) -> float:
        """Of ``log_rate``."""
        mean = self.logs / self.answers
        return (max(0.0, self.squares / self.answers - mean * mean) + _LEAST_VARIANCE) / self.answers

    def outdoes(self, other: "_Step") -> bool:
        """True if its rate may be notably better."""
        error = math.sqrt(self.variance + other.variance)
        return self.log_rate - other.log_rate + ERRORS * error > NEARLY


class Capacity:
    """The learned capacity of one seat. Times are wall seconds of CLOCK_MONOTONIC."""

    __slots__ = ("_learned_at", "_steps", "limit")

    def __init__(self) -> None:
        self.limit = MOST_LIMIT
        """Most requests in flight."""
        self._steps: dict[int, _Step] = {}
        self._learned_at = -math.inf

    def ended(self, found: int, seconds: float, now: float, *, answered: bool, taken: bool) -> None:
        """Learn from a request that ended after ``seconds``.

        ``found``: requests in flight when it was sent, with itself; ``taken``: all places are taken now.
        """
        at = _step_of(found)
        step = self._steps.get(at)
        if step is None or step.until <= now:
            step = self._steps[at] = _Step()
        step.until = now + VALID_SECONDS
        if answered:
            step.answered(max(1, found), max(seconds, 1e-6))
        else:
            step.gone += 1
        if step.requests >= MANY:
            for name in ("in_flight", "seconds", "answers", "gone", "logs", "squares"):
                setattr(step, name, getattr(step, name) / 2)
        if now >= self._learned_at + PAUSE_SECONDS:
            self._learned_at = now
            self.limit = min(MOST_LIMIT, max(LEAST_LIMIT, self._learned(now, taken=taken)))

    def rate(self, now: float) -> float | None:
        """Return useful answers per second with all places taken; None: not known."""
        return max((step.rate for step in _trusted(self._known(now)).values()), default=0.0) or None

    def _known(self, now: float) -> dict[int, _Step]:
        """Return the steps whose rate is known."""
        return {at: step for at, step in self._steps.items() if step.requests >= ENOUGH and step.until > now}

    def _learned(self, now: float, *, taken: bool) -> int:
        """Return the limit; ``taken``: all places are.

        (1) Nothing is known, or the rate still rises and there are free places: the limit stays. (2) A lower number in
        flight is not outdone, or may not be: try lower ones. (3) All places are taken and the rate rises with their
        number: try more.
        """
        known = self._known(now)
        trusted = _trusted(known)
        if not trusted:
            return self.limit  # (1)
        step = min(at for at, low in trusted.items() if not any(trusted[b].outdoes(low) for b in trusted if b > at))
        lower_is_worse = any(at < step for at in trusted) or _most(step) <= LEAST_LIMIT
        if step < max(known) or (taken and not lower_is_worse):
            return _most(step) if lower_is_worse else min(self.limit, _most(step - 1))  # (2)
        return max(self.limit, _most(step + 1)) if taken and step >= _step_of(self.limit) else self.limit  # (3), (1)


def _trusted(known: dict[int, _Step]) -> dict[int, _Step]:
    """Return the steps whose rate can be compared.

    Where many callers give up, those behind them are answered early, and the rate seems to be higher than it is. Such a
    step does not count, unless callers give up at every step.
    """
    kept = {at: step for at, step in known.items() if step.answers >= MOSTLY * step.requests}
    return kept or {at: step for at, step in known.items() if step.answers >= 1}


def _step_of(in_flight: int) -> int:
    return int(math.log(max(1, in_flight), STEP) + 1e-9)


def _most(step: int) -> int:
    """Return the highest number in flight of a step."""
    return math.ceil(STEP ** (step + 1)) - 1
