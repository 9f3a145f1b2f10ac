"""How long requests wait with Kybernate, with llama-swap's rule and with llama-swap: the same arrivals at the same
time, alone and beside work on every core.

Kybernate is the stack of ``kyb demo``, with its default policy and pool. ``llama-swap's rule`` is ``bench.swap_rule``
with the same models on the groups that they have at the beginning: nothing but the rule, no process, proof or health
check. ``llama-swap`` is the program (``KYB_LLAMA_SWAP``, its path; without it that part is left out). It restarts
processes: here all park and activate in the same seconds, so what is compared is the rule and the cost of control.
Before the arrivals each model is asked once, and then the first one of each group. Wait: until the whole answer, less
what the engine computes; model seconds. A wall millisecond counts ``SPEED`` times.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

import aiohttp

from bench.processes import every_core_busy
from bench.swap_rule import LLAMA_SWAP, llama_swap, service_seconds, swap_rule
from kybernate.dev.demo import workload
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.stack import Stack, StackOptions
from kybernate.lab.traces import Arrival

SPEED = 2.0
SEEDS = (1, 2, 3)
SECONDS = 300.0
"""Model seconds of the workload that each seed plays."""
READY_SECONDS = 300.0
BUSY = (False, True)

Waits = list[float | None]
"""None: not answered."""


async def run(
    seeds: tuple[int, ...] = SEEDS, seconds: float = SECONDS, loads: tuple[bool, ...] = BUSY
) -> dict[str, float]:
    """By seed, quiet and busy."""
    figures: dict[str, float] = {}
    settings = {"router": {"KYB_HOLD_SECONDS": "1800"}}
    stack = Stack(StackOptions(port=0, speed=SPEED, announce=False, settings=settings))
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(stack)
        groups: dict[str, dict[str, int]] = {}
        for seat in await stack.ready(READY_SECONDS):
            groups.setdefault(seat["group"], {})[seat["model"]] = int(seat["vram_bytes"])
        sizes = list(groups.values())
        peers = {"Kybernate": stack.url, "llama-swap's rule": await opened.enter_async_context(swap_rule(sizes, SPEED))}
        if LLAMA_SWAP:
            peers["llama-swap"] = await opened.enter_async_context(llama_swap(sizes, SPEED))
        http = await opened.enter_async_context(client_session())
        models = [pod.model for pod in stack.plan.pods]
        for busy in loads:
            for seed in seeds:
                rows = [one for one in workload.generate(models, seed=seed) if one.at_seconds < seconds]
                async with every_core_busy(busy):
                    await asyncio.gather(*(_warm(http, url, sizes) for url in peers.values()))
                    waits = await asyncio.gather(*(_play(http, url, rows) for url in peers.values()))
                name = f"{'busy' if busy else 'quiet'}, seed {seed}"
                figures |= _figures(name, dict(zip(peers, waits, strict=True)))
    return figures


async def _warm(http: aiohttp.ClientSession, url: str, groups: list[dict[str, int]]) -> None:
    """Each model has been activated and parked, and the first one of each group runs."""

    async def warm(group: dict[str, int]) -> None:
        for model in (*group, next(iter(group))):
            assert await _wait(http, url, Arrival(0.0, model, 1, 1), time.monotonic()) is not None, (url, model)

    await asyncio.gather(*map(warm, groups))


def _figures(name: str, waits: dict[str, Waits]) -> dict[str, float]:
    figures = {f"{name}: requests": float(len(waits["Kybernate"]))}
    means: dict[str, float] = {}
    for who, found in waits.items():
        known = [wait for wait in found if wait is not None]
        means[who] = fmean(known)
        figures |= {
            f"{name}: {who}, failed": float(len(found) - len(known)),
            f"{name}: {who}, mean s": means[who],
            f"{name}: {who}, p99 s": percentile(known, 0.99) or 0.0,
        }
    own = means.pop("Kybernate")
    return figures | {f"{name}: mean, share of {who}": own / mean for who, mean in means.items()}


async def _play(http: aiohttp.ClientSession, url: str, rows: list[Arrival]) -> Waits:
    begin = time.monotonic()
    return await asyncio.gather(*(_wait(http, url, row, begin + row.at_seconds / SPEED) for row in rows))


async def _wait(http: aiohttp.ClientSession, url: str, row: Arrival, due: float) -> float | None:
    body: dict[str, Any] = {"model": row.model, "prompt": "x " * row.prompt_tokens, "max_tokens": row.output_tokens}
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()
    except aiohttp.ClientError:
        return None
    return (time.monotonic() - due) * SPEED - service_seconds(body)
