"""Engines that sleep or unload, from end to end: one group, a different backend for each seat."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack, StackOptions
from tests.stack.pods import pod

CONFIG = """
profiles: [{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 4}]
gpuTopology: {groups: [{name: G0, gpus: [0]}]}
"""


@pytest.mark.timeout(200)
async def test_seats_of_four_backends_take_turns_on_one_gpu(tmp_path: Path) -> None:
    config, pods = tmp_path / "config.yaml", tmp_path / "pods.yaml"
    config.write_text(CONFIG)
    pods.write_text("".join(pod(model, vram="60GiB") for model in "abcd"))
    backend = "vllm,sglang,unload,fake"
    options = StackOptions(config=config, pods=pods, backend=backend, gpus=1, announce=False, speed=20)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)
        for model in "abcda":
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"][0]["text"] == expected_text(model, "hi", 3)
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
            assert stats["violations"]["count"] == 0, stats
