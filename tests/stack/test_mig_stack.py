"""MIG instances as one pool on a real stack: a model whose instance is busy starts on another one."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.dev.stack import Stack
from tests.stack.pods import pod, small_node
from tests.thorough import part
from tests.until import until

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
    pods = [
        pod(model, vram="30GiB").replace("command: [python,", "command: [/kyb/kyb-run, --, python,") for model in "ab"
    ]
    if driver == "stub":
        pods = [
            one.replace("kyb.ai/backend: fake", "kyb.ai/backend: cuda").replace("30GiB]", "30GiB, --cuda]")
            for one in pods
        ]
    options = small_node(tmp_path, CONFIG, pods, preset=PRESET, gpus=2, backend="restart", driver=driver)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(120)

        async def ask(model: str, tokens: int = 3) -> None:
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": tokens}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"][0]["text"] == expected_text(model, "hi", tokens)

        async def rows() -> dict[str, dict[str, Any]]:
            async with session.get(f"{stack.console}/v1/seats") as answer:
                return {row["model"]: row for row in (await answer.json())["seats"] if row["model"]}

        begun = await rows()
        assert {row["home_group"] for row in begun.values()} == {"G0-3g.40gb-1"}
        (busy,) = [model for model, row in begun.items() if row["state"] == "active"]
        wanted = "b" if busy == "a" else "a"
        long = asyncio.create_task(ask(busy, 6000))

        async def in_flight() -> bool:
            return bool((await rows())[busy]["in_flight"])

        await until(in_flight, what=f"{busy} is busy", timeout=60)
        await ask(wanted)
        assert not long.done()
        row = (await rows())[wanted]
        assert (row["state"], row["home_group"], row["way"]) == ("active", "G0-3g.40gb-1", "restart"), row
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as client:
            held = (await client.call("processes"))["processes"]
            places = {one["seat"]: one["gpu"] for one in held if one["bytes"]}
            assert set(places) == {one["seat"] for one in begun.values()}
            assert places[begun[busy]["seat"]] == INSTANCES[0]
            (there,) = [one for one in held if one["seat"] == row["seat"]]
            assert there["gpu"] in INSTANCES[1:]
            environment = Path(f"/proc/{there['pid']}/environ").read_bytes().decode().split("\0")
            assert {f"CUDA_VISIBLE_DEVICES={there['gpu']}", f"KYB_GPU_GROUP={row['group']}"} <= set(environment)
            await long
            assert (await client.call("stats"))["violations"]["count"] == 0
