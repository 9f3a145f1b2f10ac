"""Backend restart from end to end: kubelet starts the ended container again, the gate holds it, a request opens it."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node


@pytest.mark.timeout(200)
async def test_models_take_turns_by_restarts_and_each_answers_what_it_should(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, (pod(model, vram="60GiB") for model in "ab"), backend="restart", speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)

        async def ask(model: str) -> None:
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"][0]["text"] == expected_text(model, "hi", 3)

        for model in ("a", "b", "a"):
            await ask(model)
        async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
            items = (await answer.json())["items"]
        assert all(item["status"]["containerStatuses"][0]["restartCount"] >= 1 for item in items)
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
            assert (stats["violations"]["count"], stats["checkpoints"]) == (0, 0), stats
