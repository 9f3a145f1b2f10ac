"""A second checkpointer or manager with separate folders, beside the one that serves the node."""

import asyncio
from pathlib import Path

import pytest

from kybernate.dev.stack import Stack
from kybernate.dev.stack.layout import commands
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until


@pytest.mark.timeout(180)
async def test_a_second_service_of_a_node_ends_and_names_the_first_which_serves_on(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, (pod(model) for model in "ab"))
    async with Stack(options) as stack:
        await stack.ready(90)
        for name in ("checkpointer", "gpu_manager"):
            command = commands(stack.layout, stack.options)[name]
            folders = {"KYB_RUN_DIR": str(tmp_path / name / "run"), "KYB_STATE_DIR": str(tmp_path / name / "state")}
            env = {**command.env, **folders, "KYB_INSTANCE": "second", "KYB_HEALTH_PORT": "0"}
            second = await asyncio.create_subprocess_exec(
                *command.argv, env=env, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
            )
            _, written = await second.communicate()
            assert second.returncode == 1, written.decode()
            assert f"instance {name.replace('_', '-')}-0" in written.decode()
            assert not list((tmp_path / name / "state").glob("journal/*.jsonl"))
            assert not (tmp_path / name / "state" / "ledger").exists()
        assert {stack.starts[name] for name in ("checkpointer", "gpu_manager")} == {1}

        for name in ("checkpointer", "gpu_manager"):  # and a restart under the same lock is not mistaken for a second
            stack.kill(name)
            await until(lambda name=name: stack.starts[name] == 2, what=f"{name} is started again")
        await stack.ready(60)
        assert {stack.starts[name] for name in ("checkpointer", "gpu_manager")} == {2}
