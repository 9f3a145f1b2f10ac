"""What a switch costs beyond its drain and its transfers: a real stack with fake GPUs, one idle victim each time.

Requests go to two models of one group in turn, so each one causes a switch. Overhead is the time from sending a request
to its first byte, without the drain, without what the fake driver takes for the two copies, and without what the same
request takes at an active seat. CPU is that of all services but the engines, less what they use when nothing happens.
"""

import asyncio
import time
from statistics import fmean, median

import aiohttp

from bench.bench_router import cpu_seconds
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.watch import ObservedSwitch, Watch
from kybernate.dev.fakes.gpu.spec import MachineSpec
from kybernate.dev.stack import Stack, StackOptions

SWITCHES = 60
SPEED = 10.0
IDLE_SECONDS = 5.0
PAUSE_SECONDS = 0.3
"""Between two switches: the seat that has just come is left alone for a moment, and counts as idle."""
PARTS = ("drain", "control", "verify", "release")
SERVICES = ("router", "gpu_manager", "checkpointer", "plugin", "nats")


async def run(switches: int = SWITCHES) -> dict[str, float]:
    """Wall milliseconds, and CPU milliseconds per switch."""
    async with Stack(StackOptions(port=0, speed=SPEED, announce=False)) as stack, client_session() as http:
        seats = await stack.ready(300.0)
        group = seats[0]["group"]
        models = [str(seat["model"]) for seat in seats if seat["group"] == group][:2]
        bytes_of = {str(seat["model"]): int(seat["vram_bytes"]) for seat in seats}
        watch, open_ = Watch(), asyncio.Event()
        following = asyncio.create_task(watch.follow(http, stack.url, open_))
        await open_.wait()
        pids = [pid for name, pid in stack.pids.items() if any(part in name for part in SERVICES)]
        await asyncio.sleep(1.0)
        idle = await _cpu_per_second(pids)
        await _first_byte(http, stack.url, models[1])
        served = min([await _first_byte(http, stack.url, models[1]) for _ in range(5)])
        overheads: list[float] = []
        cpu, began = sum(map(cpu_seconds, pids)), time.monotonic()
        for number in range(switches):
            await asyncio.sleep(PAUSE_SECONDS)
            wanted, other = models[number % 2], models[(number + 1) % 2]
            before, took = len(watch.switches), await _first_byte(http, stack.url, wanted)
            switch = await _switch(watch, before)
            spent = took - served - switch.seconds["drain"] - _transfer(bytes_of[wanted]) - _transfer(bytes_of[other])
            overheads.append(spent * 1e3)
        cpu = sum(map(cpu_seconds, pids)) - cpu - idle * (time.monotonic() - began)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    figures = {
        "overhead mean ms": fmean(overheads),
        "overhead p50 ms": median(overheads),
        "overhead p99 ms": percentile(overheads, 0.99) or 0.0,
        "CPU ms per switch": cpu / switches * 1e3,
        "idle, % of a core": idle * 100,
    }
    for part in PARTS:
        seen = [switch.seconds[part] * 1e3 for switch in watch.switches[-switches:]]
        figures[f"{part} p50 ms"], figures[f"{part} p95 ms"] = median(seen), percentile(seen, 0.95) or 0.0
    return figures


def _transfer(vram_bytes: int) -> float:
    spec = MachineSpec(())
    return (spec.overhead_seconds + vram_bytes / spec.bandwidth) / SPEED


async def _cpu_per_second(pids: list[int]) -> float:
    before = sum(map(cpu_seconds, pids))
    await asyncio.sleep(IDLE_SECONDS)
    return (sum(map(cpu_seconds, pids)) - before) / IDLE_SECONDS


async def _first_byte(http: aiohttp.ClientSession, url: str, model: str) -> float:
    """Wall seconds until a streamed answer begins."""
    began = time.monotonic()
    body = {"model": model, "stream": True, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        took = time.monotonic() - began
        await answer.read()
    return took


async def _switch(watch: Watch, before: int) -> ObservedSwitch:
    async with asyncio.timeout(10):
        while len(watch.switches) == before:  # noqa: ASYNC110 (it has no event for it)
            await asyncio.sleep(0.005)
    return watch.switches[-1]
