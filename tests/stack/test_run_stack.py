"""kyb-run from end to end: a park ends the engine and not its container, and a request starts the engine again."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node

ENGINE = "command: [python,"


@pytest.mark.timeout(200)
async def test_models_take_turns_in_containers_that_go_on(tmp_path: Path) -> None:
    pods = [pod(model, vram="60GiB").replace(ENGINE, "command: [/kyb/kyb-run, --, python,") for model in "ab"]
    options = small_node(tmp_path, ONE_GROUP, pods, backend="restart", speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)

        async def ask(model: str) -> None:
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"][0]["text"] == expected_text(model, "hi", 3)

        async def containers() -> list[tuple[str, int, bool]]:
            async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
                items = (await answer.json())["items"]
            found = [item["status"]["containerStatuses"][0] for item in items]
            return [(one["containerID"], one["restartCount"], one["ready"]) for one in found]

        begun = await containers()
        assert [(restarts, ready) for _, restarts, ready in begun] == [(0, True)] * 2
        for model in "ababab":
            await ask(model)
        assert await containers() == begun, "no container ended, and none is started again"
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
            assert (stats["violations"]["count"], stats["checkpoints"]) == (0, 0), stats
            assert stats["allocations"] >= 6 if "allocations" in stats else True
