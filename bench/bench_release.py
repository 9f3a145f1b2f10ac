"""What it costs a router to release many held requests together: one model, all callers wait, its seat becomes active.

``healthz_cpu_ms`` is the most CPU time that the router spent between two answers of ``/healthz``, which is asked
without a pause: no other caller waits longer, whatever else runs on the machine. ``healthz_*_ms`` are wall times, and
include what the callers and the engine, in this process, do meanwhile.
"""

import asyncio
import re
import resource
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bench.bench_peers import bus, known_seat, router
from bench.proxies import Engine, Peer, load
from kybernate.seat import SeatState

HELD = 10_000
OTHER_FILES = 1000
"""Of the limit of open files, for anything but the callers' connections."""
SETTLE_SECONDS = 5.0
"""Until memory is read after the release."""


async def run(held: int = HELD) -> dict[str, float]:
    """Return the figures by name: ``*_ms`` and ``*_seconds`` (wall unless CPU is named), ``*_kib`` of memory."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    held = min(held, limits[1] - OTHER_FILES)
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = {"KYB_QUEUE_LIMIT": str(2 * held)}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
        nats = await stack.enter_async_context(bus(folder, endpoint, SeatState.PARKED))
        peer = await stack.enter_async_context(router("router", Path.cwd(), folder, nats, more=settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        before = peer.memory_mib()
        figures = await _release(http, peer, nats, endpoint, held)
        await known_seat(nats, endpoint, SeatState.PARKED, 3)
        await _release(http, peer, nats, endpoint, held, epoch=4)
        figures |= {"memory_before_mib": before, "memory_after_second_mib": peer.memory_mib()}
    server.close()
    return figures


async def _release(
    http: aiohttp.ClientSession, peer: Peer, nats: str, endpoint: str, held: int, epoch: int = 2
) -> dict[str, float]:
    before = peer.memory_mib()
    calls = asyncio.create_task(load(peer.port, callers=held, count=1))
    while await _metric(http, peer, "kybernate_router_held_requests") < held:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.2)
    full = peer.memory_mib()
    watch = asyncio.create_task(_health(http, peer, calls))
    cpu, began = peer.cpu_seconds(), time.perf_counter()
    await known_seat(nats, endpoint, SeatState.ACTIVE, epoch)
    await calls
    seconds, cpu = time.perf_counter() - began, peer.cpu_seconds() - cpu
    health = await watch
    await asyncio.sleep(SETTLE_SECONDS)
    return {
        "held": float(held),
        "memory_kib_each": (full - before) * 1024 / held,
        "released_seconds": seconds,
        "cpu_us_per_release": cpu / held * 1e6,
        **health,
        "memory_held_mib": full,
        "memory_after_mib": peer.memory_mib(),
    }


async def _health(http: aiohttp.ClientSession, peer: Peer, calls: "asyncio.Task[object]") -> dict[str, float]:
    turns, took = [0.0], [0.0]
    while not calls.done():
        before, began = peer.cpu_seconds(), time.perf_counter()
        async with http.get(f"http://127.0.0.1:{peer.port}/healthz") as answer:
            assert answer.status == 200
        turns.append(peer.cpu_seconds() - before)
        took.append(time.perf_counter() - began)
    return {
        "healthz_cpu_ms": max(turns) * 1e3,
        "healthz_p50_ms": statistics.median(took) * 1e3,
        "healthz_longest_ms": max(took) * 1e3,
        "healthz_answers": float(len(took) - 1),
    }


async def _metric(http: aiohttp.ClientSession, peer: Peer, name: str) -> float:
    async with http.get(f"http://127.0.0.1:{peer.port}/metrics") as answer:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await answer.text(), re.M))
