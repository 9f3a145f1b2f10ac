"""Playing arrivals against a router at their times, and keeping what came of each."""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import aiohttp

from kybernate.dev.demo.client import Attempt, Expect, Outages, Question, Ruling, Verdict, ask, question
from kybernate.lab.traces import Arrival

LEAST_TIMEOUT_SECONDS = 60.0
"""Wall seconds in which no service is down; also how long an answer is repeated under chaos."""
MODEL_TIMEOUT_SECONDS = 1800.0
"""Model seconds after which an answer is given up."""
MOST_OPEN = 500
"""Requests that wait for answers under chaos, about those of 25 s: with more of them the demo itself is late on a busy
machine, and what comes of that would count as errors of the stack."""
CONNECT_SECONDS = 30.0
_REPEAT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of one request."""

    model: str
    verdict: Verdict
    reason: str
    wait_seconds: float | None
    """Held by the router, model seconds."""
    first_byte_seconds: float | None
    """Arrival to first streamed token, model seconds; None for answers that do not stream."""
    overhead_seconds: float | None
    """Control overhead, wall seconds; only for requests that caused a switch."""
    late_seconds: float
    """How late the client itself was, wall seconds."""
    repeats: int = 0
    release_seconds: float | None = None
    """Last backend call to sent upstream, wall seconds; None for requests that met an active seat."""
    at_seconds: float = 0.0
    """Of the workload, model seconds."""


@dataclass
class Tally:
    """What has come in so far."""

    samples: list[Sample] = field(default_factory=list)
    sent: int = 0
    retryable: int = 0
    """Retryable answers, each repeat counted."""
    repeats: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why answers were not ok."""

    def count(self, verdict: Verdict) -> int:
        """Requests that ended so."""
        return sum(sample.verdict is verdict for sample in self.samples)


@dataclass
class Player:
    """Sends questions to routers in turn. ``repeat``: a retryable answer is asked again, at the next one, until it
    succeeds, and while ``MOST_OPEN`` wait for answers the time of the workload stands still."""

    urls: Sequence[str]
    speed: float
    expect: Expect
    session: aiohttp.ClientSession
    repeat: bool = False
    outages: Outages = field(default_factory=Outages)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_OPEN if self.repeat else sys.maxsize)

    @property
    def timeout(self) -> float:
        """Wall seconds for one question."""
        return max(LEAST_TIMEOUT_SECONDS, MODEL_TIMEOUT_SECONDS / self.speed)

    async def play(self, arrivals: Iterable[Arrival], stop: asyncio.Event | None = None) -> None:
        """Send each arrival at its time and wait for all answers. ``stop`` ends the sending early.

        The time counts from when the first arrival is known: a part of a trace is found by reading what precedes it.
        """
        begin: float | None = None
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                begin = time.monotonic() if begin is None else begin
                due = begin + arrival.at_seconds / self.speed
                if await _until(due, stop):
                    break
                full = time.monotonic()
                await self._places.acquire()
                stood = time.monotonic() - full
                begin, due = begin + stood, due + stood
                group.create_task(self._one(question(number, arrival), due, arrival.at_seconds))
                self.tally.sent += 1

    async def once(self, q: Question) -> tuple[Attempt, int]:
        """Ask until the answer is final; returns the last attempt and how often it was repeated. What is down is waited
        for beyond the time-out."""
        began, repeats = time.monotonic(), 0

        def left(since: float) -> float:
            now = time.monotonic()
            return max(since + 1.0, began + self.timeout + self.outages.seconds(began, now)) - now

        while True:
            url = self.urls[(q.number + repeats) % len(self.urls)]
            asked = partial(left, time.monotonic())
            attempt = await ask(self.session, url, q, self.expect, self.outages, asked)
            if attempt.ruling.verdict is not Verdict.OK:
                self.tally.reasons[attempt.ruling.reason] += 1
            if attempt.ruling.verdict is not Verdict.RETRYABLE:
                return attempt, repeats
            self.tally.retryable += 1
            if not self.repeat:
                return attempt, repeats
            if left(began) <= 0:
                reason = f"still retryable after {repeats} repeats: {attempt.ruling.reason}"
                return Attempt(Ruling(Verdict.ERROR, reason)), repeats
            repeats += 1
            self.tally.repeats += 1
            await asyncio.sleep(min(1.0, attempt.ruling.retry_after_seconds or _REPEAT_SECONDS))

    async def _one(self, q: Question, due: float, at_seconds: float) -> None:
        late = time.monotonic() - due
        attempt, repeats = await self.once(q)
        self._places.release()
        first = attempt.first_byte_at
        self.tally.samples.append(
            Sample(
                q.model,
                attempt.ruling.verdict,
                attempt.ruling.reason,
                attempt.held_seconds,
                None if first is None else (first - due) * self.speed,
                attempt.overhead_seconds,
                late,
                repeats,
                attempt.release_seconds,
                at_seconds,
            )
        )


@asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """The client's connections: as many as there are requests, no time-outs but our own. A connection may take long:
    where hundreds come again to a server that was killed, the kernel answers some SYNs only at the second or third."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


def begun(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The same arrivals with the first one read: what precedes it in a trace takes no time of the replay then."""
    rest = iter(arrivals)
    return itertools.chain(tuple(itertools.islice(rest, 1)), rest)


def again_and_again(arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[Arrival]:
    """The same arrivals over and over, each round after the one before. Ends at once if there are none."""
    offset = 0.0
    while True:
        last: float | None = None
        for arrival in arrivals():
            last = offset + arrival.at_seconds
            yield arrival._replace(at_seconds=last)
        if last is None:
            return
        offset = last + 1.0


async def _until(due: float, stop: asyncio.Event | None) -> bool:
    """Wait until ``due``; True when asked to stop before."""
    pause = due - time.monotonic()
    if stop is None:
        await asyncio.sleep(max(0.0, pause))
        return False
    if stop.is_set() or pause <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    try:
        async with asyncio.timeout(pause):
            await stop.wait()
    except TimeoutError:
        return False
    return True
