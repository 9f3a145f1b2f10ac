"""What a call through the router costs when its seat is active: a real router process, a real nats-server.

Client and engine run in this process and share the machine with the router, so requests per second are a lower bound;
CPU time of the router's own process is the figure to compare. The same calls made directly to
the engine are the floor.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from bench.processes import cpu_seconds
from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.counting import counting_routers
from kybernate.dev.nats_server import NatsServer
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState

REQUESTS = 4000
CONCURRENCY = 32
SEQUENTIAL = 500
STREAMS = 64
CHUNKS = 64
CHUNK_SECONDS = 0.002

_WHOLE = json.dumps({"choices": [{"message": {"content": "x" * 150}}], "model": "bench"}).encode()
_CHUNK = b"data: " + json.dumps({"choices": [{"delta": {"content": "x" * 120}}], "model": "bench"}).encode() + b"\n\n"


class _Engine(asyncio.Protocol):
    """As little engine as possible: answers each POST whole, or as a stream of timed chunks."""

    def __init__(self) -> None:
        self._data = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            if b'"stream": true' in body:
                task = asyncio.create_task(self._stream())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_WHOLE)
                self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind + _WHOLE)

    async def _stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(CHUNKS):
            self._transport.write(b"%x\r\n%s\r\n" % (len(_CHUNK), _CHUNK))
            await asyncio.sleep(CHUNK_SECONDS)
        self._transport.write(b"0\r\n\r\n")


async def run(requests: int = REQUESTS, streams: int = STREAMS) -> dict[str, float]:
    """Figures by name: ``*_per_second``, ``*_cpu_us_*`` (of the router's process), ``*_ms`` (wall)."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Engine, "127.0.0.1", 0, backlog=1024)
    engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with (
            running_router(lambda bus: _tell(bus, engine)) as (url, pid),
            aiohttp.ClientSession(connector=connector) as http,
        ):
            await _many(http, url, 200)  # warm
            figures = {"direct_requests_per_second": await _many(http, engine, requests)}
            cpu = cpu_seconds(pid)
            figures["router_requests_per_second"] = await _many(http, url, requests)
            figures["router_cpu_us_per_request"] = (cpu_seconds(pid) - cpu) / requests * 1e6
            direct, through = await _one_by_one(http, engine), await _one_by_one(http, url)
            figures["direct_p50_ms"], figures["router_p50_ms"] = direct, through
            figures["router_added_p50_ms"] = through - direct
            cpu = cpu_seconds(pid)
            await asyncio.gather(*(_call(http, url, stream=True) for _ in range(streams)))
            figures["router_cpu_us_per_sse_chunk"] = (cpu_seconds(pid) - cpu) / (streams * CHUNKS) * 1e6
    finally:
        server.close()
    return figures


@asynccontextmanager
async def running_router(
    fill: Callable[[NatsBus], Awaitable[None]], patience: float = 30.0, more: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[str, int]]:
    """A router process, ready within ``patience`` seconds, with a bus that ``fill`` has filled: its address and pid."""
    with tempfile.TemporaryDirectory(prefix="kyb-bench-") as folder:
        async with NatsServer(Path(folder)) as nats:
            await init(nats.url)
            async with (
                NatsBus(nats.url, source="kyb/bench", name="bench").opened() as bus,
                counting_routers(bus, "bench"),
            ):
                async with asyncio.timeout(10):
                    await bus.until_connected()
                await fill(bus)
                log = Path(folder) / "router.log"
                env = environment(nats.url) | dict(more or {})
                with log.open("wb") as out:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "services.router", env=env, stderr=out
                    )
                try:
                    yield await ready(log, patience), process.pid
                finally:
                    process.terminate()
                    await process.wait()


def environment(nats_url: str) -> dict[str, str]:
    own = {"KYB_NATS_URL": nats_url, "KYB_PORT": "0", "KYB_INSTANCE": "router-bench", "KYB_LOG_FORMAT": "json"}
    return {name: value for name, value in os.environ.items() if not name.startswith("KYB_")} | own


async def _tell(bus: NatsBus, engine: str) -> None:
    record = SeatRecord(
        node="bench",
        seat="s0",
        state=SeatState.ACTIVE,
        epoch=1,
        model="bench",
        endpoint=engine,
        reported_at=time.time(),
    )
    bucket = await bus.bucket(BUCKET)
    await bucket.put(record.key, record.model_dump_json().encode())


async def ready(log: Path, patience: float = 30.0) -> str:
    """The router's address, once it knows the seats."""
    async with asyncio.timeout(patience), aiohttp.ClientSession() as http:
        url = ""
        while True:
            for line in (await asyncio.to_thread(log.read_text)).splitlines():
                url = json.loads(line).get("url", url)
            if url:
                async with http.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return url
            await asyncio.sleep(0.05)


async def _call(http: aiohttp.ClientSession, url: str, *, stream: bool = False) -> None:
    body = {"model": "bench", "stream": stream, "messages": [{"role": "user", "content": "x" * 900}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        data = await answer.read()
        expected = _CHUNK * CHUNKS if stream else _WHOLE
        assert answer.status == 200, data
        assert data == expected, "the answer did not come through byte for byte"


async def _many(http: aiohttp.ClientSession, url: str, count: int) -> float:
    """Requests per second with ``CONCURRENCY`` callers."""

    async def caller() -> None:
        for _ in range(count // CONCURRENCY):
            await _call(http, url)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
    return count // CONCURRENCY * CONCURRENCY / (time.perf_counter() - begin)


async def _one_by_one(http: aiohttp.ClientSession, url: str) -> float:
    """Median milliseconds of calls made one after the other."""
    took = []
    for _ in range(SEQUENTIAL):
        begin = time.perf_counter()
        await _call(http, url)
        took.append((time.perf_counter() - begin) * 1000)
    return statistics.median(took)


if __name__ == "__main__":
    for name, value in asyncio.run(run()).items():
        print(f"{name:32} {value:12.2f}")
