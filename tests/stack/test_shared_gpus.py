"""Seats of one GPU and of two, sold on the same GPUs, on a real stack."""

import asyncio
from pathlib import Path

import pytest

from tests.stack.client import running
from tests.stack.pods import pod, small_node

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
  - {name: two, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 2}
gpuTopology: {overlap: timeshare}
policy: {name: quantum, settings: {quantumSeconds: 5, idleSeconds: 1}}
"""
MODELS = {"a": (1, "20GiB"), "b": (1, "20GiB"), "c": (1, "20GiB"), "p": (2, "60GiB"), "q": (2, "60GiB")}


@pytest.mark.timeout(150)
async def test_singles_and_pairs_of_the_same_gpus_all_answer_and_never_meet(tmp_path: Path) -> None:
    options = small_node(tmp_path, CONFIG, (pod(m, size=size, vram=vram) for m, (size, vram) in MODELS.items()), gpus=2)
    async with running(options) as here:
        for _ in range(2):
            await asyncio.gather(*map(here.answered, (*MODELS, *MODELS)))
        assert (await here.driver("stats"))["restores"] >= len(MODELS) - 2
