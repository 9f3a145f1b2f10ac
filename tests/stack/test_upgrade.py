"""What an upgrade does to seats: plugin and router are replaced, then manager and checkpointer, as in a cluster."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node


@pytest.mark.timeout(150)
async def test_engines_live_through_an_upgrade_and_parked_models_answer_before_and_after_each_step(
    tmp_path: Path,
) -> None:
    options = small_node(tmp_path, ONE_GROUP, (pod(model, vram="40GiB") for model in "ab"), speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(60)

        async def read(url: str) -> dict[str, Any]:
            async with session.get(url) as answer:
                found: dict[str, Any] = await answer.json()
                return found

        async def engines() -> set[tuple[str, str, int]]:
            items = (await read(f"{stack.layout.kubelet_url}/pods"))["items"]
            return {
                (pod["metadata"]["uid"], status["containerID"], status["restartCount"])
                for pod in items
                for status in pod["status"]["containerStatuses"]
            }

        async def wake_a_parked_one() -> None:
            seats = (await read(f"{stack.console}/v1/seats"))["seats"]
            model = next(seat["model"] for seat in seats if seat["state"] == "parked")
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            try:
                async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
            except aiohttp.ClientConnectorError as error:
                raise AssertionError(f"{error}; log of the router:\n{stack.logs('router')[-4000:]}") from error

        before = await engines()
        assert len(before) == 2
        for replaced in (("plugin", "router"), ("gpu_manager", "checkpointer")):
            await wake_a_parked_one()
            old = {service: stack.kill(service, signal.SIGTERM) for service in replaced}
            async with asyncio.timeout(60):
                while any(stack.pids.get(service, pid) == pid for service, pid in old.items()):
                    await asyncio.sleep(0.02)
            await stack.ready(60)
            await wake_a_parked_one()
            assert await engines() == before, f"{replaced} were replaced"
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            assert (await driver.call("stats"))["violations"]["count"] == 0
