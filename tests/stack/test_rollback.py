"""The node's services go up and down over two releases under load; nothing is quarantined and no request is lost."""

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.releases import BEFORE, unpack
from tests.stack.pods import pod, small_node
from tests.until import until

CONFIG = """
profiles: [{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}]
gpuTopology: {groups: [{name: G0, gpus: [0]}, {name: G1, gpus: [1]}]}
"""
MODELS = "abc"
NODE_POD = ("gpu_manager", "checkpointer")
RUN = """
cd "$(cat {release})" || exit 1
PYTHONPATH="$PWD" exec {python} -P -m services.{service}
"""


@pytest.mark.timeout(400)
async def test_two_releases_of_the_node_pod_follow_each_other_under_load(tmp_path: Path) -> None:
    today, release = Path(__file__).parents[2], tmp_path / "release"
    earlier = unpack(BEFORE, tmp_path)
    options = small_node(
        tmp_path,
        CONFIG,
        (pod(model) for model in MODELS),
        gpus=2,
        replace={
            one: ("sh", "-c", RUN.format(release=release, python=sys.executable, service=one)) for one in NODE_POD
        },
    )
    release.write_text(str(earlier))
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        answers = {model: list[int | str]() for model in MODELS}

        async def load(model: str) -> None:
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            while True:
                try:
                    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                        answers[model].append(answer.status if answer.status == 200 else await answer.text())
                except aiohttp.ClientError as error:
                    answers[model].append(repr(error))
                await asyncio.sleep(0.5)

        def count(event: str) -> int:
            return stack.logs("gpu_manager").count(f'"event": "{event}"')

        await stack.ready(90)
        containers = await running(stack, session)
        async with calling(load(model) for model in MODELS):
            for tree in (today, earlier, today):
                await asyncio.gather(*(stack.pause(service) for service in NODE_POD))
                release.write_text(str(tree))
                recovered = count("manager.recovered") + 1
                await asyncio.gather(*(stack.resume(service) for service in NODE_POD))
                await until(
                    lambda recovered=recovered: count("manager.recovered") == recovered,
                    what=f"the manager of {tree} has recovered",
                    saw=lambda: stack.logs("gpu_manager")[-3000:],
                    timeout=60,
                )
                parked, before = count("seat.parked"), {model: len(answers[model]) for model in MODELS}
                await until(
                    lambda parked=parked, before=before: (
                        count("seat.parked") > parked and all(len(answers[model]) > before[model] for model in MODELS)
                    ),
                    what=f"all models answer with the manager of {tree}, which parks some",
                    saw=lambda: (answers, stack.logs("gpu_manager")[-3000:]),
                    timeout=60,
                )

        assert [answer for of_model in answers.values() for answer in of_model if answer != 200] == []
        assert "seat.quarantined" not in stack.logs("gpu_manager")
        assert await running(stack, session) == containers, "no engine was started again"
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            assert (await driver.call("stats"))["violations"]["count"] == 0


@asynccontextmanager
async def calling(callers: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Callers that go on as long as the block does."""
    tasks = [asyncio.create_task(caller) for caller in callers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def running(stack: Stack, session: aiohttp.ClientSession) -> set[tuple[str, int]]:
    """ID of each container that runs, and how often it was started again."""
    async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
        items = (await answer.json())["items"]
    return {
        (status["containerID"], status["restartCount"])
        for pod in items
        for status in pod["status"]["containerStatuses"]
    }
