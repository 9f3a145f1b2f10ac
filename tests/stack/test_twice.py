"""A second manager or checkpointer with separate folders, beside the one that serves the node."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kybernate.dev.stack import Stack
from kybernate.dev.stack.layout import commands
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    options = small_node(tmp_path_factory.mktemp("node"), ONE_GROUP, (pod(model) for model in "ab"))
    async with Stack(options) as running:
        yield running


async def test_a_second_manager_of_a_node_ends_and_names_the_first_which_serves_on(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.ready(90)
    starts = stack.starts["gpu_manager"]
    second = await beside(stack, "gpu_manager", tmp_path)
    _, written = await second.communicate()
    assert second.returncode == 1, written.decode()
    assert "instance gpu-manager-0" in written.decode()
    assert not (tmp_path / "state" / "ledger").exists()
    assert stack.starts["gpu_manager"] == starts

    stack.kill("gpu_manager")  # and a restart under the same lock is not mistaken for a second
    await until(lambda: stack.starts["gpu_manager"] == starts + 1, what="the manager is started again")
    await stack.ready(60)
    assert stack.starts["gpu_manager"] == starts + 1


async def test_a_second_checkpointer_of_a_node_gets_no_job(stack: Stack, tmp_path: Path) -> None:
    """No manager connects to the socket in its folder; it says so and is ready."""
    async with aiohttp.ClientSession() as session:
        seats = await stack.ready(90)
        second = await beside(stack, "checkpointer", tmp_path)
        assert second.stderr is not None
        async for line in second.stderr:
            if b"checkpointer.serving" in line:
                health = json.loads(line)["health"]
                break
        parked = next(seat["model"] for seat in seats if seat["state"] == "parked")
        body = {"model": parked, "prompt": "hi", "max_tokens": 3}
        async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        async with session.get(f"{health}/readyz") as answer:
            assert (await answer.json())["notes"]["bus"].startswith("no manager is connected at")
        second.terminate()
        await second.communicate()
        assert second.returncode == 0
        assert not list((tmp_path / "state").glob("journal/*.jsonl"))


async def beside(stack: Stack, name: str, folder: Path) -> asyncio.subprocess.Process:
    """A second process of this kind on the node, with separate folders."""
    command = commands(stack.layout, stack.options)[name]
    folders = {"KYB_RUN_DIR": str(folder / "run"), "KYB_STATE_DIR": str(folder / "state")}
    env = {**command.env, **folders, "KYB_INSTANCE": "second", "KYB_HEALTH_PORT": "0"}
    return await asyncio.create_subprocess_exec(
        *command.argv, env=env, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
