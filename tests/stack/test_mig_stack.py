"""MIG instances as one pool on a real stack: a model whose instance is busy starts on another one."""

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from kybernate.dev.fakes.gpu.spec import hardware
from tests.stack.client import running
from tests.stack.pods import pod, small_node
from tests.thorough import part

CONFIG = """
profiles: [{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2, rebalance: true}]
migStrategy: single
policy: {name: kyb-balanced}
"""
PRESET = "2xA100-mig-3g"
INSTANCES = [gpu.uuid for gpu in hardware(PRESET).instances]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", part(["stub", "fake"], 2))
async def test_a_model_whose_instance_is_busy_starts_on_another_one(
    tmp_path: Path, driver: Literal["fake", "stub"]
) -> None:
    pods = [pod(model, vram="30GiB").replace("command: [", "command: [/kyb/kyb-run, --, ") for model in "ab"]
    if driver == "stub":
        pods = [
            one.replace("kyb.ai/backend: fake", "kyb.ai/backend: cuda").replace("30GiB]", "30GiB, --cuda]")
            for one in pods
        ]
    options = small_node(tmp_path, CONFIG, pods, preset=PRESET, gpus=2, backend="restart", driver=driver)
    async with running(options, 120) as here:
        begun = await here.seats()
        assert {row["home_group"] for row in begun.values()} == {"G0-3g.40gb-1"}
        (busy,) = [model for model, row in begun.items() if row["state"] == "active"]
        wanted = "b" if busy == "a" else "a"
        long = asyncio.create_task(here.answered(busy, tokens=6000))
        await here.until_seats(lambda rows: rows[busy]["in_flight"] > 0, f"{busy} is busy")
        await here.answered(wanted)
        assert not long.done()
        row = (await here.seats())[wanted]
        assert (row["state"], row["home_group"], row["way"]) == ("active", "G0-3g.40gb-1", "restart"), row
        held = {one["seat"]: one for one in (await here.driver("processes"))["processes"] if one["bytes"]}
        assert set(held) == {one["seat"] for one in begun.values()}
        assert held[begun[busy]["seat"]]["gpu"] == INSTANCES[0]
        there = held[row["seat"]]
        assert there["gpu"] in INSTANCES[1:]
        environment = Path(f"/proc/{there['pid']}/environ").read_bytes().decode().split("\0")
        assert {f"CUDA_VISIBLE_DEVICES={there['gpu']}", f"KYB_GPU_GROUP={row['group']}"} <= set(environment)
        await long
