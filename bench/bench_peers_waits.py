"""How long requests wait with Kybernate and with llama-swap's rule: the same arrivals at the same time, alone and
beside work on every core.

Kybernate is the stack of ``kyb demo``, with its default policy and pool. The other is ``bench.swap_rule`` with the same
models on the groups that they have at the beginning. llama-swap itself restarts processes: here both park and activate
in the same seconds, so what is compared is the rule and the cost of control. Wait: until the whole answer, less what
the engine computes; model seconds.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any

import aiohttp

from bench.bench_switch import every_core_busy
from bench.swap_rule import service_seconds
from kybernate.dev.demo import workload
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.stack import Stack, StackOptions
from kybernate.lab.traces import Arrival

SPEED = 5.0
SEEDS = (1, 2, 3)
SECONDS = 300.0
"""Model seconds of the workload that each seed plays."""
READY_SECONDS = 300.0
BUSY = (False, True)

Waits = list[float | None]
"""None: not answered."""


async def run() -> dict[str, float]:
    """By seed, quiet and busy."""
    figures: dict[str, float] = {}
    settings = {"router": {"KYB_HOLD_SECONDS": "1800"}}
    async with Stack(StackOptions(port=0, speed=SPEED, announce=False, settings=settings)) as stack:
        seats = await stack.ready(READY_SECONDS)
        models = [pod.model for pod in stack.plan.pods]
        groups: dict[str, dict[str, int]] = {}
        for seat in seats:
            groups.setdefault(seat["group"], {})[seat["model"]] = int(seat["vram_bytes"])
        async with _swap_rule(list(groups.values())) as other, client_session() as http:
            for busy in BUSY:
                for seed in SEEDS:
                    rows = [one for one in workload.generate(models, seed=seed) if one.at_seconds < SECONDS]
                    async with every_core_busy(busy):
                        ours, theirs = await asyncio.gather(_play(http, stack.url, rows), _play(http, other, rows))
                    figures |= _figures(f"{'busy' if busy else 'quiet'}, seed {seed}", ours, theirs)
    return figures


def _figures(name: str, ours: Waits, theirs: Waits) -> dict[str, float]:
    figures = {f"{name}: requests": float(len(ours))}
    for who, waits in (("Kybernate", ours), ("llama-swap's rule", theirs)):
        known = [wait for wait in waits if wait is not None]
        figures |= {
            f"{name}: {who}, failed": float(len(waits) - len(known)),
            f"{name}: {who}, mean s": fmean(known),
            f"{name}: {who}, p99 s": percentile(known, 0.99) or 0.0,
        }
    share = figures[f"{name}: Kybernate, mean s"] / figures[f"{name}: llama-swap's rule, mean s"]
    return figures | {f"{name}: mean, share": share}


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


@asynccontextmanager
async def _swap_rule(groups: list[dict[str, int]]) -> AsyncIterator[str]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.swap_rule", str(SPEED))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(groups).encode())
        process.stdin.close()
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()
