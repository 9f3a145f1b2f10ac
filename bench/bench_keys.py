"""What API keys cost a call: CPU of a router without keys, with 10 and with 1,000, in turns; each head is new."""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.bench_router import _Engine, _tell, running_router
from bench.processes import cpu_seconds
from kybernate.api_keys import dump, make

REQUESTS = 2000
CALLERS = 16
BODY = b'{"model":"bench","messages":[{"role":"user","content":"' + b"x" * 900 + b'"}]}'


async def run(rounds: int = 5, requests: int = REQUESTS) -> dict[str, float]:
    """Median CPU microseconds of a request by number of keys, and their ratios."""
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0, backlog=1024)
    engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-"))
        routers: dict[int, tuple[str, int, str]] = {}
        for count in (0, 10, 1000):
            keys = [make(f"key-{at}", ["infer"]) for at in range(count)]
            file = Path(folder) / f"{count}.yaml"
            file.write_text(dump(row for row, _ in keys))
            more = {"KYB_API_KEYS_FILE": str(file)} if count else {}
            url, pid = await stack.enter_async_context(running_router(lambda bus: _tell(bus, engine), more=more))
            routers[count] = url, pid, keys[-1][1] if count else "none"
        took: dict[int, list[float]] = {count: [] for count in routers}
        for _ in range(rounds):
            for count, (url, pid, key) in routers.items():
                await _many(url, key, min(requests, 100))  # warm
                before = cpu_seconds(pid)
                await _many(url, key, requests)
                took[count].append((cpu_seconds(pid) - before) / requests * 1e6)
    server.close()
    figures = {f"cpu_us_{count}_keys": statistics.median(found) for count, found in took.items()}
    pairs = {"ratio_10_none": (10, 0), "ratio_1000_10": (1000, 10)}
    ratios = {
        name: [a / b if b else 0.0 for a, b in zip(took[a], took[b], strict=True)] for name, (a, b) in pairs.items()
    }
    return figures | {name: statistics.median(found) for name, found in ratios.items()}


async def _many(url: str, key: str, requests: int) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def caller(count: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(count):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            head += f"traceparent: 00-{time.time_ns():032x}-00f067aa0ba902b7-01\r\nContent-Length: {len(BODY)}\r\n\r\n"
            writer.write(head.encode() + BODY)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            await reader.readexactly(int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(caller(max(1, requests // CALLERS)) for _ in range(min(CALLERS, requests))))
