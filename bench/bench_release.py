"""What it costs a router to release many held requests together: one model, all callers wait, its seat becomes active.

``longest_turn_cpu_ms`` is the most CPU time that the router spent between two answers of ``/healthz``, which is asked
without a pause: no other caller waits longer, whatever else runs on the machine.
"""

import asyncio
import contextlib
import re
import resource
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bench.bench_peers import bus, known_seat, router
from bench.proxies import Engine, Peer, load
from kybernate.seat import SeatState

HELD = 10_000


async def run(held: int = HELD) -> dict[str, float]:
    """Return the figures by name: ``*_ms`` and ``*_seconds`` (wall unless CPU is named), ``*_kib`` of memory."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    held = min(held, limits[1] // 3)
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = {"KYB_QUEUE_LIMIT": str(2 * held), "KYB_ADDRESS_CONNECTIONS": str(2 * held)}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
        nats = await stack.enter_async_context(bus(folder, endpoint, SeatState.PARKED))
        peer = await stack.enter_async_context(router("router", Path.cwd(), folder, nats, more=settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        before = peer.memory_mib()
        calls = asyncio.create_task(load(peer.port, callers=held, count=1))
        while await _metric(http, peer, "kybernate_router_held_requests") < held:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.2)
        figures = {"held": float(held), "memory_kib_each": (peer.memory_mib() - before) * 1024 / held}
        watch = asyncio.create_task(_longest_turn(http, peer, calls))
        cpu, began = peer.cpu_seconds(), time.perf_counter()
        await known_seat(nats, endpoint, SeatState.ACTIVE, 2)
        await calls
        figures["released_seconds"] = time.perf_counter() - began
        figures["cpu_us_per_release"] = (peer.cpu_seconds() - cpu) / held * 1e6
        figures["longest_turn_cpu_ms"] = await watch
    server.close()
    return figures


async def _longest_turn(http: aiohttp.ClientSession, peer: Peer, calls: "asyncio.Task[object]") -> float:
    longest = 0.0
    while not calls.done():
        before = peer.cpu_seconds()
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"http://127.0.0.1:{peer.port}/healthz") as answer:
                assert answer.status == 200
        longest = max(longest, peer.cpu_seconds() - before)
    return longest * 1e3


async def _metric(http: aiohttp.ClientSession, peer: Peer, name: str) -> float:
    async with http.get(f"http://127.0.0.1:{peer.port}/metrics") as answer:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await answer.text(), re.M))
