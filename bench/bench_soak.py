"""A router that serves a million requests: whether its memory stays as it is.

In rounds on new connections: requests, a few streams, and calls of a model that does not exist. ``--requests`` sets how
many there are in all. The slope is that of a line through the memory after each round, without the first fifth of them.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bench.bench_peers import bus, router
from bench.proxies import CALLERS, Engine, load

REQUESTS = 1_000_000
ROUND = 20_000
UNKNOWN = 100
"""Calls of a model that does not exist, in each round; each names another one."""


async def run(requests: int = REQUESTS) -> dict[str, float]:
    """Return the figures by name. Raises AssertionError if a request is not answered as it should be."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    memory: list[float] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
        nats = await stack.enter_async_context(bus(folder, endpoint))
        peer = await stack.enter_async_context(router("router", Path.cwd(), folder, nats))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{peer.port}"))
        began, cpu, done = time.perf_counter(), peer.cpu_seconds(), 0
        while done < requests:
            each = max(1, (min(ROUND, requests - done) - CALLERS - UNKNOWN) // CALLERS)
            await load(peer.port, callers=CALLERS, count=each)
            await load(peer.port, callers=CALLERS, count=1, stream=True)
            await asyncio.gather(*(_unknown(http, f"model-{done + number}") for number in range(UNKNOWN)))
            done += CALLERS * (each + 1) + UNKNOWN
            memory.append(peer.memory_mib())
        cpu, seconds = peer.cpu_seconds() - cpu, time.perf_counter() - began
    server.close()
    settled = memory[len(memory) // 5 :]
    slope = statistics.linear_regression(range(len(settled)), settled).slope if len(settled) > 1 else 0.0
    return {
        "requests": float(done),
        "seconds": seconds,
        "cpu_us_per_request": cpu / done * 1e6,
        "memory_after_first_round_mib": memory[0],
        "memory_after_a_fifth_mib": settled[0],
        "memory_at_the_end_mib": memory[-1],
        "memory_most_mib": max(memory),
        "slope_mib_per_million_requests": slope * len(memory) / done * 1e6,
    }


async def _unknown(http: aiohttp.ClientSession, model: str) -> None:
    async with http.post("/v1/chat/completions", json={"model": model, "messages": []}) as answer:
        assert answer.status == 404, await answer.text()
