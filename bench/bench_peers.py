"""The router beside other proxies: those of ``bench/proxies.py`` that are installed.

``KYB_BENCH_OTHER``: another checkout with its own ``.venv``, whose router is measured too, as ``before``.
"""

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.bench_router import environment, ready
from bench.proxies import OPEN, Engine, Peer, figures, measure, process, proxies
from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.counting import counting_routers
from kybernate.dev.nats_server import NatsServer, free_port
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState


async def run(rounds: int = 3, requests: int = 2048, streams: int = 64) -> dict[str, float]:
    """Return the figures by name: ``*_cpu_us_*`` of the proxy's processes (minimum and median over rounds)."""
    other = os.environ.get("KYB_BENCH_OTHER")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    cores = os.sched_getaffinity(0)
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
            ports = (free_port() for _ in itertools.count())
            peers = [Peer("direct", port)]
            peers += await stack.enter_async_context(proxies(folder, port, ports))
            nats = await stack.enter_async_context(bus(folder, f"http://127.0.0.1:{port}", max_requests=2 * OPEN))
            if other is not None:
                peers.append(await stack.enter_async_context(router("before", Path(other), folder, nats)))
            here = Path.cwd()
            peers.append(await stack.enter_async_context(router("router", here, folder, nats)))
            if len(cores) > 1:
                os.sched_setaffinity(0, {min(cores)})
            await measure(peers, rounds=rounds, requests=requests, streams=streams)
            return figures(peers)
    finally:
        os.sched_setaffinity(0, cores)
        server.close()


@asynccontextmanager
async def bus(
    folder: Path, engine: str, state: SeatState = SeatState.ACTIVE, max_requests: int = 0
) -> AsyncIterator[str]:
    """A nats-server whose roster has one seat of the model ``bench``: its URL."""
    async with NatsServer(folder) as nats:
        await init(nats.url)
        await known_seat(nats.url, engine, state, 1, max_requests)
        manager = NatsBus(nats.url, source="kyb/bench", name="manager")
        async with manager.opened(), counting_routers(manager, "bench"):
            yield nats.url


async def known_seat(nats_url: str, engine: str, state: SeatState, epoch: int, max_requests: int = 0) -> None:
    """Write the seat's row."""
    record = SeatRecord(
        node="bench",
        seat="s0",
        state=state,
        epoch=epoch,
        model="bench",
        endpoint=engine,
        max_requests=max_requests,
        reported_at=time.time(),
    )
    async with NatsBus(nats_url, source="kyb/bench", name="bench").opened() as connection:
        async with asyncio.timeout(10):
            await connection.until_connected()
        bucket = await connection.bucket(BUCKET)
        await bucket.put(record.key, record.model_dump_json().encode())


@asynccontextmanager
async def router(
    name: str,
    checkout: Path,
    folder: Path,
    nats_url: str,
    more: Mapping[str, str] = {},
) -> AsyncIterator[Peer]:
    """The router of a checkout, once it knows the seat."""
    env = {**environment(nats_url), "KYB_INSTANCE": f"router-{name}", **more}
    python = checkout / ".venv/bin/python"
    command = str(python) if python.exists() else sys.executable
    log = folder / f"{name}.out"
    async with process(command, "-m", "services.router", log=log, env=env, folder=checkout) as pid:
        url = await ready(log)
        yield Peer(name, int(url.rpartition(":")[2]), pid)
