"""More calls than an engine can answer: its useful answers as a share of its capacity, and when all is as before.

Callers arrive at random at a multiple of the capacity, say how long they wait (``X-Kyb-Timeout``), and do not come back
after a 429. Once as ``declared``, with the engine's number of places in the roster, once as ``learned``, without.
Afterwards callers arrive at a tenth of it: all is as before when none of them is rejected or waits for another.
"""

import asyncio
import json
import random
import re
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from bench.bench_peers import bus, router
from bench.proxies import Engine, Peer
from kybernate.dev.demo.report import percentile

PLACES = 32
SERVICE_SECONDS = 0.4
"""Mean of an answer, from half to one and a half of it."""
CAPACITY = PLACES / SERVICE_SECONDS
PATIENCE_SECONDS = 10.0
OVERLOADS = ((3.0, 60.0), (10.0, 30.0))
"""(times the capacity, seconds)."""
LEARN_SECONDS = 5.0
"""Of calls at half the capacity before the overload."""
AFTER_SECONDS = 12.0
UNDISTURBED_SECONDS = 2 * SERVICE_SECONDS
"""Longest answer of a call that waited for no other one, with some room for a busy machine."""

_BODY = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "x" * 900}]}).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nX-Kyb-Timeout: %d\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (PATIENCE_SECONDS, len(_BODY), _BODY)
)


class LimitedEngine(Engine):
    """An engine that computes ``PLACES`` requests at a time; others wait in its queue."""

    waiting: ClassVar[deque["LimitedEngine"]] = deque()
    running: ClassVar[int] = 0

    def answer(self, _: bytes, /) -> None:
        """Compute, or queue."""
        self.waiting.append(self)
        self._begin()

    @classmethod
    def _begin(cls) -> None:
        while cls.waiting and cls.running < PLACES:
            one = cls.waiting.popleft()
            if not one._transport.is_closing():
                cls.running += 1
                seconds = SERVICE_SECONDS * random.uniform(0.5, 1.5)
                asyncio.get_running_loop().call_later(seconds, one._end)

    def _end(self) -> None:
        self.write_whole()
        LimitedEngine.running -= 1
        self._begin()


@dataclass
class Outcome:
    """Of one call. ``status`` 0: none came before its caller left."""

    began: float
    seconds: float
    status: int
    retry_after: int


@dataclass
class Crowd:
    """Callers that arrive at random. Connections are kept and used again."""

    port: int
    outcomes: list[Outcome] = field(default_factory=list)
    idle: "list[Connection]" = field(default_factory=list)
    calls: "set[asyncio.Task[None]]" = field(default_factory=set)

    async def arrive(self, per_second: float, seconds: float) -> None:
        """Let callers arrive for so long; later than planned ones come at once."""
        due, end = time.perf_counter(), time.perf_counter() + seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            call = asyncio.create_task(self._call())
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)
            due += random.expovariate(per_second)

    async def _call(self) -> None:
        began, found = time.perf_counter(), (0, 0)
        connection = self.idle.pop() if self.idle else None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS + 5):
                while connection is None or connection.closed:
                    _, connection = await asyncio.get_running_loop().create_connection(
                        Connection, "127.0.0.1", self.port
                    )
                found = await connection.call()
            self.idle.append(connection)
        except (OSError, TimeoutError):
            if connection is not None:
                connection.close()
        self.outcomes.append(Outcome(began, time.perf_counter() - began, *found))


class Connection(asyncio.Protocol):
    """A caller's connection, with one call at a time."""

    closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a call."""
        self._transport, self._data = cast(asyncio.Transport, transport), b""
        self._done: asyncio.Future[tuple[int, int]] | None = None

    def call(self) -> "asyncio.Future[tuple[int, int]]":
        """Send the request: status and Retry-After (0: none)."""
        self._done, self._data = asyncio.get_running_loop().create_future(), b""
        self._transport.write(_REQUEST)
        return self._done

    def data_received(self, data: bytes) -> None:
        """End the call when the answer is complete."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if separator and length and len(body) >= int(length[1]) and self._done and not self._done.done():
            after = re.search(rb"(?i)retry-after: (\d+)", head)
            self._done.set_result((int(head[9:12]), int(after[1]) if after else 0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call under way."""
        self.closed = True
        if self._done and not self._done.done():
            self._done.set_exception(ConnectionError(str(exc)))

    def close(self) -> None:
        """Leave."""
        self._transport.close()


async def run(overloads: Sequence[tuple[float, float]] = OVERLOADS) -> dict[str, float]:
    """Return the figures by name, for each overload with declared and with learned places."""
    server = await asyncio.get_running_loop().create_server(LimitedEngine, "127.0.0.1", 0, backlog=4096)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    figures: dict[str, float] = {}
    for name, places in (("declared", PLACES), ("learned", 0)):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
            nats = await stack.enter_async_context(bus(folder, endpoint, max_requests=places))
            peer = await stack.enter_async_context(router("router", Path.cwd(), folder, nats))
            for times, seconds in overloads:
                found = await _overload(peer, times, seconds)
                figures |= {f"{name}, {times:g} x: {figure}": value for figure, value in found.items()}
    server.close()
    return figures


async def _overload(peer: Peer, times: float, seconds: float) -> dict[str, float]:
    crowd = Crowd(peer.port)
    await crowd.arrive(CAPACITY / 2, LEARN_SECONDS)
    began, cpu = time.perf_counter(), peer.cpu_seconds()
    await crowd.arrive(times * CAPACITY, seconds)
    end, cpu = time.perf_counter(), peer.cpu_seconds() - cpu
    await crowd.arrive(CAPACITY / 10, AFTER_SECONDS)
    await asyncio.gather(*crowd.calls)
    for connection in crowd.idle:
        connection.close()
    during = [one for one in crowd.outcomes if began <= one.began < end]
    good = [one for one in crowd.outcomes if one.status == 200 and one.seconds <= PATIENCE_SECONDS]
    # Answers that came in the time of the overload, without its first seconds, in which the queue fills.
    steady = [one for one in good if began + PATIENCE_SECONDS <= one.began + one.seconds < end]
    rejected = [one for one in during if one.status == 429]
    accepted = [one for one in during if one.status != 429]
    after = [one for one in crowd.outcomes if one.began >= end]
    refused = [one.began - end for one in after if one.status != 200]
    waited = [one.began - end for one in after if one.seconds > UNDISTURBED_SECONDS]
    retry = [float(one.retry_after) for one in rejected]
    return {
        "offered per second": len(during) / (end - began),
        "goodput, % of capacity": len(steady) / (end - began - PATIENCE_SECONDS) / CAPACITY * 100,
        "429, % of calls": len(rejected) / len(during) * 100,
        "429 without Retry-After": float(retry.count(0.0)),
        "Retry-After p50 s": percentile(retry, 0.5) or 0.0,
        "Retry-After p99 s": percentile(retry, 0.99) or 0.0,
        "time to a 429, p99 ms": (percentile([one.seconds for one in rejected], 0.99) or 0.0) * 1e3,
        "accepted, answered in time, %": sum(one in good for one in accepted) / max(1, len(accepted)) * 100,
        "accepted, answer p99 s": percentile([one.seconds for one in accepted], 0.99) or 0.0,
        "other statuses": float(sum(one.status not in (200, 429) for one in crowd.outcomes)),
        "after its end, last 429 s": max(refused, default=0.0),
        "after its end, last wait s": max(waited, default=0.0),
        "router CPU, % of a core": cpu / (end - began) * 100,
    }
