"""Wall time and model time of one stack.

Model time runs ``speed`` times as fast as the wall: ``model_now = speed * CLOCK_MONOTONIC``. All processes of a
machine read the same kernel clock, so model times of one machine compare.

* Model time: arrivals, engine load and tokens, driver transfers, policy constants, SLOs, hold and drain deadlines.
* Wall time: heartbeats, job time-outs, NATS, backoff, the start gate, signal TTLs, Retry-After, control overhead.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

LAST_LOOK_SECONDS = 0.1
"""Beyond a deadline: after a standstill of the process (SIGSTOP, a frozen machine) its loop sees the end of the time
before what has come meanwhile."""


def to_beat(seconds: float) -> float:
    """Wall seconds until the event loop's clock, which is the machine's, is a multiple of ``seconds``: the jobs of a
    process, and of a node, that look at such moments wake together. A tenth of it at least: a timer may be early."""
    left = seconds - asyncio.get_running_loop().time() % seconds
    return left if left > seconds / 10 else left + seconds


async def wait_for(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, at most so many wall seconds (None: as long as it takes); return whether it has come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
            return True  # also if another one that waited has cleared it meanwhile
    return event.is_set()


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """``asyncio.timeout`` in wall seconds, but what came in time while this process stood still has come in time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        end = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + LAST_LOOK_SECONDS))
        try:
            yield
        finally:
            end.cancel()


@dataclass(frozen=True, slots=True)
class Clock:
    """The two times of a stack. ``speed`` is model seconds per wall second and must be above zero."""

    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be above 0, not {self.speed}")

    def wall(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def to_wall(self, model_seconds: float) -> float:
        """How many wall seconds a duration in model seconds takes."""
        return model_seconds / self.speed

    def to_model(self, wall_seconds: float) -> float:
        """How many model seconds pass during a duration in wall seconds."""
        return wall_seconds * self.speed
