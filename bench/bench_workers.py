"""A router with workers beside one without: requests per second of 64 callers at one engine.

Callers and engine are one further process on the same cores, so the ratio is a lower bound.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.bench_peers import bus, router
from bench.proxies import CALLERS, OPEN, Engine, Peer, load
from kybernate.dev.nats_server import free_port


async def run(rounds: int = 6, requests: int = 6400) -> dict[str, float]:
    """Return requests per second and CPU µs per request, each a median over rounds, by name."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
        nats = await stack.enter_async_context(bus(folder, f"http://127.0.0.1:{port}", max_requests=2 * OPEN))
        peers: list[Peer] = []
        for workers in (0, 1, 2):
            ports = {"KYB_PORT": str(free_port()), "KYB_HEALTH_PORT": str(free_port())}
            more = {"KYB_WORKERS": str(workers), **ports}
            peers.append(await stack.enter_async_context(router(f"workers_{workers}", Path.cwd(), folder, nats, more)))
        for number, peer in itertools.product(range(rounds + 1), peers):
            cpu, began = peer.cpu_seconds(), time.perf_counter()
            await load(peer.port, callers=CALLERS, count=requests // CALLERS)
            if number:  # the first round warms up
                peer.rates.append(requests / (time.perf_counter() - began))
                peer.request_us.append((peer.cpu_seconds() - cpu) / requests * 1e6)
    server.close()
    return {
        name: statistics.median(values)
        for peer in peers
        for name, values in (
            (f"{peer.name}_requests_per_second", peer.rates),
            (f"{peer.name}_cpu_us_per_request", peer.request_us),
        )
    }
