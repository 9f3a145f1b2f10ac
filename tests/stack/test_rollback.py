"""The node's services go up and down over two releases under load; nothing is quarantined and no request is lost."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.releases import BEFORE, unpack
from tests.stack.client import running
from tests.stack.pods import TWO_GROUPS, pod, small_node
from tests.until import until

MODELS = "abc"
NODE_POD = ("gpu_manager", "checkpointer")
RUN = """
cd "$(cat {release})" || exit 1
PYTHONPATH="$PWD" exec {python} -P -m services.{service}
"""


@pytest.mark.timeout(400)
async def test_two_releases_of_the_node_pod_follow_each_other_under_load(tmp_path: Path) -> None:
    """Plugin and router go first, which interrupts calls."""
    today, release = Path(__file__).parents[2], tmp_path / "release"
    earlier = unpack(BEFORE, tmp_path)
    scripts = {name: RUN.format(release=release, python=sys.executable, service=name) for name in NODE_POD}
    replace = {name: ("sh", "-c", script) for name, script in scripts.items()}
    options = small_node(tmp_path, TWO_GROUPS, map(pod, MODELS), gpus=2, replace=replace)
    release.write_text(str(earlier))
    async with running(options) as here:
        stack, answers = here.stack, {model: list[object]() for model in MODELS}

        async def load(model: str) -> None:
            while True:
                try:
                    status, body = await here.ask(model)
                    answers[model].append(status if status == 200 else body)
                except aiohttp.ClientError as error:
                    answers[model].append(repr(error))
                await asyncio.sleep(0.5)

        def count(event: str) -> int:
            return stack.logs("gpu_manager").count(f'"event": "{event}"')

        async def replaced(*services: str) -> None:
            await asyncio.gather(*map(stack.pause, services))
            await asyncio.gather(*map(stack.resume, services))

        containers = await here.runs()
        await replaced("plugin", "router")
        await stack.ready(60)
        await here.answered(*MODELS)
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(load(model)) for model in MODELS]
            for tree in (today, earlier, today):
                release.write_text(str(tree))
                recovered = count("manager.recovered") + 1
                await replaced(*NODE_POD)
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
            for caller in callers:
                caller.cancel()

        assert [answer for of_model in answers.values() for answer in of_model if answer != 200] == []
        assert "seat.quarantined" not in stack.logs("gpu_manager")
        assert await here.runs() == containers, "no engine was started again"
