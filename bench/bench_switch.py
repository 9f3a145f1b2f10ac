"""What a switch costs beyond its drain and its transfers: a real stack with fake GPUs, alone and beside work on every
core.

Requests go to two models of one group in turn, and seats stay on their groups, so each causes a switch. Overhead is the
time from the decision until the held request is sent to the engine, without drain, park and activation. "less the
engine" is without the time that the engine computes the test answer (``verify``), which is made up and grows with
nothing here. Accept is the time from the arrival of a request until its ActivateSeat was accepted, release that from
the end of the last driver call until the request was sent. CPU is that of all services and their helpers, less what
they use when nothing happens. A 99th percentile of few switches is the slowest one: ``--requests 400`` gives more.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import aiohttp

from bench.processes import every_core_busy, tree_cpu_seconds
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.session import with_profiles
from kybernate.dev.demo.watch import ObservedSwitch, Watch
from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.dev.stack import Stack, StackOptions

SWITCHES = 100
SPEED = 10.0
SETTLE_SECONDS, IDLE_SECONDS = 5.0, 10.0
PAUSE_SECONDS = 0.3
"""Between two switches: the seat that has just come is left alone for a moment, and counts as idle."""
PARTS = ("drain", "control", "verify")
SERVICES = ("router", "gpu_manager", "checkpointer", "plugin", "nats")
ANSWER_TOKENS = 8
"""Of the request that the checkpointer compares (``services.checkpointer.core.answers``)."""


async def run(requests: int = SWITCHES) -> dict[str, float]:
    """Wall milliseconds, and CPU milliseconds per switch: ``requests`` switches alone, as many beside other work."""
    with tempfile.TemporaryDirectory() as folder:
        bound = with_profiles(StackOptions(port=0, speed=SPEED, announce=False), Path(folder), rebalance=False)
        return await _measured(Stack(bound), requests)


async def _measured(stack: Stack, switches: int) -> dict[str, float]:
    async with stack, client_session() as http:
        seats = await stack.ready(300.0)
        group = seats[0]["group"]
        models = [str(seat["model"]) for seat in seats if seat["group"] == group][:2]
        watch, open_ = Watch(), asyncio.Event()
        following = asyncio.create_task(watch.follow(http, stack.console, open_))
        await open_.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        idle = await _cpu_per_second(stack)
        figures = await _switches(stack, http, watch, models, switches, idle)
        async with every_core_busy():
            busy = await _switches(stack, http, watch, models, switches, idle)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    figures |= {f"busy: {name}": value for name, value in busy.items()}
    return figures | {"idle, % of a core": sum(idle.values()) * 100}


async def _switches(
    stack: Stack, http: aiohttp.ClientSession, watch: Watch, models: list[str], switches: int, idle: dict[str, float]
) -> dict[str, float]:
    engine = ANSWER_TOKENS / EngineOptions("").tokens_per_second / SPEED * 1e3
    overheads: list[float] = []
    counted: list[float] = []
    accepts: list[float] = []
    releases: list[float] = []
    seen: list[dict[str, float]] = []
    cpu, began = _cpu(stack), time.monotonic()
    for number in range(switches):
        await asyncio.sleep(PAUSE_SECONDS)
        before, (sent, overhead) = len(watch.switches), await _ask(http, stack.url, models[number % 2])
        seconds = (await _switch(watch, before, models[number % 2])).seconds
        seen.append(seconds)
        apart = sum(seconds[part] for part in ("drain", "park", "activate", "release"))
        overheads.append((seconds["total"] - apart + sent) * 1e3)
        counted.append(overhead * 1e3)
        accepts.append((overhead - sent - seconds["control"]) * 1e3)
        releases.append(sent * 1e3)
    took, now = time.monotonic() - began, _cpu(stack)
    cpu_ms = {name: (now[name] - cpu[name] - idle[name] * took) / switches * 1e3 for name in SERVICES}
    figures = {
        "overhead mean ms": fmean(overheads),
        "overhead p50 ms": median(overheads),
        "overhead p99 ms": percentile(overheads, 0.99) or 0.0,
        "less the engine, p50 ms": median(overheads) - engine,
        "less the engine, p99 ms": (percentile(overheads, 0.99) or 0.0) - engine,
        "as the demo counts, p50 ms": median(counted),
        "as the demo counts, p99 ms": percentile(counted, 0.99) or 0.0,
        "parked before the request, % of switches": 100.0 * sum(not each["park"] for each in seen) / switches,
        "CPU ms per switch": sum(cpu_ms.values()),
    }
    figures |= {f"CPU ms per switch, {name}": value for name, value in cpu_ms.items()}
    for name, values in (("accept", accepts), ("release", releases)):
        figures[f"{name} p50 ms"], figures[f"{name} p99 ms"] = median(values), percentile(values, 0.99) or 0.0
    for part in PARTS:
        values = [seconds[part] * 1e3 for seconds in seen]
        figures[f"{part} p50 ms"], figures[f"{part} p95 ms"] = median(values), percentile(values, 0.95) or 0.0
    return figures


def _cpu(stack: Stack) -> dict[str, float]:
    """CPU seconds of each kind of service with its children, so far."""
    trees = {name: [pid for process, pid in stack.pids.items() if name in process] for name in SERVICES}
    return {name: sum(map(tree_cpu_seconds, roots)) for name, roots in trees.items()}


async def _cpu_per_second(stack: Stack) -> dict[str, float]:
    before = _cpu(stack)
    await asyncio.sleep(IDLE_SECONDS)
    after = _cpu(stack)
    return {name: (after[name] - before[name]) / IDLE_SECONDS for name in SERVICES}


async def _ask(http: aiohttp.ClientSession, url: str, model: str) -> tuple[float, float]:
    """Send a request; wall seconds from the end of the last driver call until the router had sent it to the engine, and
    the router's own count of the overhead: accepted, journaled, sent."""
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()
        seconds = [float(answer.headers.get(f"X-Kyb-{name}-Seconds", 0.0)) for name in ("Release", "Overhead")]
        return seconds[0], seconds[1]


async def _switch(watch: Watch, before: int, model: str) -> ObservedSwitch:
    async with asyncio.timeout(10):
        while True:
            found = [switch for switch in watch.switches[before:] if switch.model == model]
            if found:
                return found[0]
            await asyncio.sleep(0.005)
