"""What the size of the roster costs a router that has nothing to do: a real router process, a real nats-server.

Rows are those of ``SEATS_PER_NODE`` parked seats on each node. A stall is how late ``/healthz`` answers: as long all
streams of this router stand still.
"""

import asyncio
import time

import aiohttp

from bench.bench_router import cpu_seconds, running_router
from kybernate.bus.nats import NatsBus
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState

SIZES = (64, 1024, 16_384, 65_536)
SEATS_PER_NODE = 64
MODELS = 2_000
SETTLE_SECONDS = 5.0
SECONDS = 65.0
"""Longer than the minute after which a watch compares itself."""


async def run() -> dict[str, float]:
    """Figures by number of seats."""
    return {name: value for seats in SIZES for name, value in (await _idle(seats)).items()}


async def _idle(seats: int) -> dict[str, float]:
    async with (
        running_router(lambda bus: _fill(bus, seats), patience=120.0) as (url, pid),
        aiohttp.ClientSession() as http,
    ):
        figures = {"CPU s until ready": cpu_seconds(pid)}
        await _stalls(http, url, SETTLE_SECONDS)  # the watch has read, too
        before, began = cpu_seconds(pid), time.monotonic()
        figures["longest stall ms"] = await _stalls(http, url, SECONDS)
        figures["idle, % of a core"] = (cpu_seconds(pid) - before) / (time.monotonic() - began) * 100
        began = time.monotonic()
        async with http.get(f"{url}/v1/seats") as answer:
            figures["/v1/seats kB"] = len(await answer.read()) / 1e3
        figures["/v1/seats ms"] = (time.monotonic() - began) * 1e3
    return {f"{seats} seats: {name}": value for name, value in figures.items()}


async def _fill(bus: NatsBus, seats: int) -> None:
    """Write the rows without waiting for each acknowledgement."""
    for number in range(seats):
        record = _row(number)
        await bus.link.client.publish(f"$KV.{BUCKET}.{record.key}", record.model_dump_json().encode())
    await bus.flush(60.0)


def _row(number: int) -> SeatRecord:
    node, seat = divmod(number, SEATS_PER_NODE)
    model = f"org/model-{number % MODELS}"
    return SeatRecord(
        node=f"node-{node:04}",
        seat=f"1x-{number:06x}.s{seat:02}",
        state=SeatState.PARKED,
        epoch=number + 1,
        model=model,
        endpoint="http://10.0.0.1:8000",
        group=f"G{seat // 8}",
        home_group=f"G{seat // 8}",
        gpus=(seat // 8,),
        resource="kyb.ai/gpu-1x-seat",
        pod=f"models/{number}",
        pod_uid=f"uid-{number}",
        vram_bytes=60 << 30,
        since=1.0,
        manager_url=f"http://node-{node:04}:9471",
        reported_at=time.time(),
    )


async def _stalls(http: aiohttp.ClientSession, url: str, seconds: float) -> float:
    """Milliseconds of the slowest answer of ``/healthz``."""
    slowest, until = 0.0, time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        async with http.get(f"{url}/healthz") as answer:
            await answer.read()
        slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(0.025)
    return slowest * 1e3
