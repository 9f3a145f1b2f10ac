"""What a switch costs beyond its drain and its transfers: a real stack with fake GPUs.

Requests go to two models of one group in turn, so each causes a switch. Overhead is the time from the decision until
the seat is active, without drain, park and activation, plus the time until the held request is sent to the engine. CPU
is that of all services, less what they use when nothing happens. Accept is the time from the arrival of a request until
its ActivateSeat was accepted, release that from the end of the last driver call until the request was sent.
"""

import asyncio
import time
from statistics import fmean, median

import aiohttp

from bench.bench_router import cpu_seconds
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.watch import ObservedSwitch, Watch
from kybernate.dev.stack import Stack, StackOptions

SWITCHES = 60
SPEED = 10.0
IDLE_SECONDS = 5.0
PAUSE_SECONDS = 0.3
"""Between two switches: the seat that has just come is left alone for a moment, and counts as idle."""
PARTS = ("drain", "control", "verify")
SERVICES = ("router", "gpu_manager", "checkpointer", "plugin", "nats")


async def run(switches: int = SWITCHES) -> dict[str, float]:
    """Wall milliseconds, and CPU milliseconds per switch."""
    async with Stack(StackOptions(port=0, speed=SPEED, announce=False)) as stack, client_session() as http:
        seats = await stack.ready(300.0)
        group = seats[0]["group"]
        models = [str(seat["model"]) for seat in seats if seat["group"] == group][:2]
        watch, open_ = Watch(), asyncio.Event()
        following = asyncio.create_task(watch.follow(http, stack.url, open_))
        await open_.wait()
        pids = [pid for name, pid in stack.pids.items() if any(part in name for part in SERVICES)]
        await asyncio.sleep(1.0)
        idle = await _cpu_per_second(pids)
        overheads: list[float] = []
        accepts: list[float] = []
        releases: list[float] = []
        cpu, began = sum(map(cpu_seconds, pids)), time.monotonic()
        for number in range(switches):
            await asyncio.sleep(PAUSE_SECONDS)
            before, (own, sent) = len(watch.switches), await _ask(http, stack.url, models[number % 2])
            seconds = (await _switch(watch, before, models[number % 2])).seconds
            apart = seconds["drain"] + seconds["park"] + seconds["activate"]
            overheads.append((seconds["total"] - apart + sent) * 1e3)
            accepts.append((own - sent - seconds["control"]) * 1e3)
            releases.append(sent * 1e3)
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
    for name, values in (("accept", accepts), ("release", releases)):
        figures[f"{name} p50 ms"], figures[f"{name} p99 ms"] = median(values), percentile(values, 0.99) or 0.0
    for part in PARTS:
        seen = [switch.seconds[part] * 1e3 for switch in watch.switches[-switches:]]
        figures[f"{part} p50 ms"], figures[f"{part} p95 ms"] = median(seen), percentile(seen, 0.95) or 0.0
    return figures


async def _cpu_per_second(pids: list[int]) -> float:
    before = sum(map(cpu_seconds, pids))
    await asyncio.sleep(IDLE_SECONDS)
    return (sum(map(cpu_seconds, pids)) - before) / IDLE_SECONDS


async def _ask(http: aiohttp.ClientSession, url: str, model: str) -> tuple[float, float]:
    """Send a request; wall seconds of its wait that are Kybernate's own, and those after the last driver call."""
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()
        own, sent = answer.headers["X-Kyb-Overhead-Seconds"], answer.headers["X-Kyb-Release-Seconds"]
        return float(own), float(sent)


async def _switch(watch: Watch, before: int, model: str) -> ObservedSwitch:
    async with asyncio.timeout(10):
        while True:
            found = [switch for switch in watch.switches[before:] if switch.model == model]
            if found:
                return found[0]
            await asyncio.sleep(0.005)
