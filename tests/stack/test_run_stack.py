"""kyb-run from end to end: a park ends the engine and not its container, and a request starts the engine again."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

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


@pytest.mark.timeout(300)
async def test_kyb_run_that_is_stopped_at_the_gate_starts_nothing_by_an_old_permission(tmp_path: Path) -> None:
    """``docker pause``, a debugger: its turn goes to the other model once evidence shows that nothing comes of it, and
    what it wakes up with is over. Nobody has to help it."""
    pods = [pod(model, vram="30GiB").replace(ENGINE, "command: [/kyb/kyb-run, --, python,") for model in "ab"]
    options = small_node(tmp_path, ONE_GROUP, pods, backend="restart", speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)

        async def ask(model: str) -> int:
            body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status

        async def seat(model: str) -> dict[str, Any]:
            async with session.get(f"{stack.console}/v1/seats") as answer:
                return next(one for one in (await answer.json())["seats"] if one["model"] == model)

        for model in "aba":
            assert await ask(model) == 200
        async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
            (item,) = [one for one in (await answer.json())["items"] if one["metadata"]["name"] == "b"]
        keeper = int(item["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))

        os.kill(keeper, signal.SIGSTOP)
        held = asyncio.create_task(ask("b"))
        await until(lambda: on(seat("b"), "starting"), what="b has a ticket", timeout=60)
        await until(lambda: on(seat("b"), "parked"), what="nothing comes of the ticket", timeout=90)
        assert (await seat("b"))["reason"] == "kyb-run did not start its engine"
        assert await ask("a") == 200
        os.kill(keeper, signal.SIGCONT)

        assert await held == 200
        assert (await ask("a"), await ask("b")) == (200, 200)
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            assert (await driver.call("stats"))["violations"]["count"] == 0


async def on(seat: Awaitable[dict[str, Any]], state: str) -> bool:
    return bool((await seat)["state"] == state)
