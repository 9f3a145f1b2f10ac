"""How many requests an engine serves at once, and how fast: learned from what it answers. Pure.

With more requests in flight an engine answers more per second, until its slots (vLLM's ``max_num_seqs``) are taken.
From then on further requests only wait in the engine. The learned limit is the smallest number in flight with nearly
the best rate. It errs upwards: a limit that is too high costs waiting time, one that is too low costs throughput.
"""

import math
from dataclasses import dataclass

MOST_LIMIT = 256
"""Also the first one: vLLM's usual ``max_num_seqs``. An engine that serves more has to declare it."""
LEAST_LIMIT = 4
"""An engine with one slot gets its next request without a pause."""
STEP = 1.6
"""Numbers in flight are distinguished in steps of this factor."""
ENOUGH = 8
"""Requests that make the rate of a step known."""
NEARLY = 0.9
"""Share of the best rate that counts as the best rate."""
MOSTLY = 0.75
"""Share of the requests of a step that are answered where its rate can be trusted."""
VALID_SECONDS = 120.0
"""Time without answers at a step after which its rate is measured anew."""


@dataclass(slots=True)
class _Step:
    """Requests that found about the same number in flight when they were sent."""

    in_flight: float = 0.0
    seconds: float = 0.0
    answers: float = 0.0
    gone: float = 0.0
    """Requests that got no answer: their callers gave up."""
    until: float = 0.0

    @property
    def rate(self) -> float:
        """Useful answers per second, by Little's law: number in flight = rate x time that each of them takes."""
        return self.in_flight / self.seconds * self.answers / (self.answers + self.gone) if self.seconds else 0.0

    def halve(self) -> None:
        """Let later requests count more."""
        self.in_flight, self.seconds = self.in_flight / 2, self.seconds / 2
        self.answers, self.gone = self.answers / 2, self.gone / 2


_WORST = _Step()


class Capacity:
    """The learned capacity of one seat. Times are wall seconds of CLOCK_MONOTONIC."""

    __slots__ = ("_steps", "limit")

    def __init__(self) -> None:
        self.limit = MOST_LIMIT
        """Most requests in flight."""
        self._steps: dict[int, _Step] = {}

    def ended(self, found: int, seconds: float, now: float, *, answered: bool, taken: bool) -> None:
        """Learn from a request that ended after ``seconds``.

        ``found``: requests in flight when it was sent, with itself; ``taken``: all places are taken now.
        """
        at = int(math.log(max(1, found), STEP) + 1e-9)
        step = self._steps.get(at)
        if step is None or step.until <= now:
            step = self._steps[at] = _Step()
        step.until = now + VALID_SECONDS
        if answered:
            step.in_flight += found
            step.seconds += max(seconds, 1e-6)
            step.answers += 1
        else:
            step.gone += 1
        if step.answers + step.gone >= 8 * ENOUGH:
            step.halve()
        self.limit = min(MOST_LIMIT, max(LEAST_LIMIT, self._learned(now, taken=taken)))

    def rate(self, now: float) -> float | None:
        """Return useful answers per second with all places taken; None: not known."""
        return max((step.rate for step in self._known(now).values()), default=0.0) or None

    def _known(self, now: float) -> dict[int, _Step]:
        """Return the steps whose rate is known.

        Where many callers give up, those behind them are answered early, and the rate seems to be higher than it is.
        Such a step counts as the worst, unless callers give up at every step.
        """
        known = {
            at: step for at, step in self._steps.items() if step.answers + step.gone >= ENOUGH and step.until > now
        }
        kept = any(step.answers >= MOSTLY * (step.answers + step.gone) for step in known.values())
        return {
            at: step if not kept or step.answers >= MOSTLY * (step.answers + step.gone) else _WORST
            for at, step in known.items()
        }

    def _learned(self, now: float, *, taken: bool) -> int:
        """Return the limit; ``taken``: all places are.

        (1) Nothing is known, or the rate still rises and there are free places: the limit stays. (2) A lower number in
        flight has the best rate, too, or may have: try lower ones. (3) All places are taken and the rate rises with
        their number: try more.
        """
        known = self._known(now)
        best = max((step.rate for step in known.values()), default=0.0)
        if not best:
            return self.limit  # (1)
        step = min(at for at, step in known.items() if step.rate >= NEARLY * best)
        lower_is_worse = step - 1 in known or _most(step) <= LEAST_LIMIT
        if step < max(known) or (taken and not lower_is_worse):
            return _most(step) if lower_is_worse else min(self.limit, _most(step - 1))  # (2)
        return max(self.limit, _most(step + 1)) if taken else self.limit  # (3), (1)


def _most(step: int) -> int:
    """Return the highest number in flight of a step."""
    return math.ceil(STEP ** (step + 1)) - 1
