"""kyb-run from end to end: a park ends the engine and not its container, and a request starts the engine again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.stack.client import Client, running
from tests.stack.pods import ONE_GROUP, pod, small_node

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    pods = [pod(model).replace("command: [", "command: [/kyb/kyb-run, --, ") for model in "ab"]
    options = small_node(tmp_path_factory.mktemp("node"), ONE_GROUP, pods, backend="restart", speed=8)
    async with running(options) as client:
        yield client


async def test_models_take_turns_in_containers_that_go_on(here: Client) -> None:
    begun = await here.runs()
    assert {(one["restartCount"], one["ready"]) for one in (await here.containers()).values()} == {(0, True)}
    await here.answered(*"ababab")
    assert await here.runs() == begun, "no container ended, and none is started again"
    assert (await here.driver("stats"))["checkpoints"] == 0


async def test_kyb_run_that_is_stopped_at_the_gate_starts_nothing_by_an_old_permission(here: Client) -> None:
    """``docker pause``, a debugger: its turn goes to the other model once evidence shows that nothing comes of it, and
    what it wakes up with is over. Nobody has to help it."""
    await here.answered(*"aba")
    keeper = int((await here.containers())["b"]["containerID"].removeprefix("process://"))

    os.kill(keeper, signal.SIGSTOP)
    held = asyncio.create_task(here.answered("b"))
    await here.until_state("b", "starting")
    await here.until_state("b", "parked", timeout=90)
    assert (await here.seats())["b"]["reason"] == "kyb-run did not start its engine"
    await here.answered("a")
    os.kill(keeper, signal.SIGCONT)

    await held
    await here.answered(*"ab")
