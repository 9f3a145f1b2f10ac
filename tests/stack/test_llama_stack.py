"""Real tokens: llama.cpp on the CPU in the seats of a whole stack, one parked by restart, one by unload."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.llama import missing
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node

if absent := missing():
    pytest.skip(absent, allow_module_level=True)


@pytest.mark.timeout(200)
async def test_models_of_llama_cpp_take_turns_and_answer_as_before(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, map(pod, "ab"), engine="llama", backend="restart,unload", speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)

        async def ask(model: str) -> str:
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 8, "temperature": 0, "seed": 1}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                found = await answer.json()
                assert found["usage"]["completion_tokens"] == 8
                return str(found["choices"][0]["text"])

        first = {model: await ask(model) for model in "ab"}
        assert first["a"] != first["b"]
        assert {model: await ask(model) for model in "ab"} == first
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
            assert stats["violations"]["count"] == 0, stats
