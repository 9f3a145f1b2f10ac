"""Each safety rule is broken once, in a real process, and the fake machine must notice: no check here is blind."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack, StackOptions

HERE = Path(__file__).parent


def program(script: str, *args: str) -> list[str]:
    return [sys.executable, "-P", str(HERE / script), *args]


async def busy(url: str, models: list[str], stop: asyncio.Event) -> None:
    """Keep asking for every model, long answers, so that seats are wanted and requests are in flight."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:

        async def ask(model: str) -> None:
            body = {"model": model, "max_tokens": 400, "messages": [{"role": "user", "content": "long"}]}
            while not stop.is_set():
                try:
                    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                        await answer.read()
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(model)) for model in models]
            await stop.wait()
            for task in tasks:
                task.cancel()


async def violations(stack: Stack, kinds: set[str], seconds: float) -> dict[str, int]:
    """The violations that the fake driver has counted when one of ``kinds`` is among them, or after ``seconds``.

    A broken rule may cause violations of other kinds before: old epochs, for example, let routers miss a drain.
    """
    stop = asyncio.Event()
    models = [pod.model for pod in stack.plan.pods]
    async with asyncio.timeout(seconds + 10), asyncio.TaskGroup() as group:
        load = group.create_task(busy(stack.url, models, stop))
        client = await FakeDriverClient.connect(stack.layout.driver_socket, wait_seconds=20)
        try:
            deadline = asyncio.get_running_loop().time() + seconds
            counted: dict[str, int] = {}
            while asyncio.get_running_loop().time() < deadline:
                counted = dict((await client.call("stats"))["violations"]["by_kind"])
                if counted.keys() & kinds:
                    break
                await asyncio.sleep(0.2)
            return counted
        finally:
            stop.set()
            await client.close()
            load.cancel()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("replace", "kinds"),
    [
        ({"gpu_manager": program("skip_drain.py")}, {"checkpoint-with-request"}),
        ({"checkpointer": program("skip_evidence.py")}, {"slots"}),
        ({"gpu_manager": program("skip_reservation.py")}, {"slots"}),
        (
            {"gpu_manager": program("old_epochs.py", "manager"), "checkpointer": program("old_epochs.py", "worker")},
            {"stale-epoch"},
        ),
    ],
    ids=["drain skipped", "evidence skipped", "reservation skipped", "old epoch accepted"],
)
async def test_a_broken_safety_rule_is_counted_as_a_violation(replace: dict[str, list[str]], kinds: set[str]) -> None:
    options = StackOptions(speed=24, memory="240GiB", replace=replace, announce=False)
    async with Stack(options) as stack:
        counted = await violations(stack, kinds, 45)

    assert counted.keys() & kinds, f"counted only {counted}"
