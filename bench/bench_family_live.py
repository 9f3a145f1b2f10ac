"""Groups inside each other, 4 ⊃ 2 ⊃ 1, on a real stack with fake GPUs: the live counterpart of ``bench family``.

Each seat is asked by one client that sends its next request a random time after the answer to the last one.
"""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import aiohttp

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import pod, small_node

CONFIG = """
profiles:
  - {name: four, resource: kyb.ai/gpu-4x-seat, groupSize: 4, seatsPerGroup: 1}
  - {name: two, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 1}
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 1}
gpuTopology: {overlap: timeshare}
"""
SEATS = {1: 4, 2: 2, 4: 1}
"""How many, by the GPUs of their groups."""
TIERS = ("gold", "silver", "bronze")
PAUSE_SECONDS = {1: 20.0, 2: 40.0, 4: 80.0}
"""Model: mean time from an answer to the next request of a seat."""
SPEED = 20.0
SECONDS = 1000.0
"""Model."""


async def run() -> dict[str, float]:
    """Answer times by size and tier in model seconds, errors, violations and switches."""
    models = {f"m{size}-{number}": size for size, count in SEATS.items() for number in range(count)}
    tiers = {model: TIERS[number % len(TIERS)] for number, model in enumerate(models)}
    took, errors = dict[str, list[float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        pods = (
            pod(model, size=size, vram=f"{40 * size}GiB").replace(
                "kyb.ai/backend", f"kyb.ai/tier: {tiers[model]}, kyb.ai/backend"
            )
            for model, size in models.items()
        )
        options = small_node(
            Path(folder), CONFIG, pods, gpus=4, speed=SPEED, settings={"router": {"KYB_HOLD_SECONDS": "1800"}}
        )
        async with Stack(options) as stack, aiohttp.ClientSession() as session:
            await stack.ready(120)
            end = time.monotonic() + SECONDS / SPEED

            async def client(model: str, chance: random.Random) -> int:
                failed = 0
                while True:
                    await asyncio.sleep(chance.expovariate(1 / PAUSE_SECONDS[models[model]]) / SPEED)
                    if (began := time.monotonic()) > end:
                        return failed
                    body = {"model": model, "prompt": "hi", "max_tokens": 40}
                    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                        await answer.read()
                    failed += answer.status != 200
                    took.setdefault(model, []).append((time.monotonic() - began) * SPEED)

            errors = sum(await asyncio.gather(*(client(m, random.Random(n)) for n, m in enumerate(models))))
            async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
                stats = await driver.call("stats")
    figures = {
        "errors": float(errors),
        "violations": float(stats["violations"]["count"]),
        "restores": float(stats["restores"]),
    }
    by = defaultdict[str, list[float]](list)
    for model, times in took.items():
        by[f"{models[model]}x"] += times
        by[tiers[model]] += times
    for name, times in sorted(by.items()):
        ranked = sorted(times)
        figures |= {f"{name} requests": float(len(ranked)), f"{name} mean s": sum(ranked) / len(ranked)}
        figures |= {f"{name} p95 s": ranked[int(0.95 * len(ranked))], f"{name} longest s": ranked[-1]}
    return figures
