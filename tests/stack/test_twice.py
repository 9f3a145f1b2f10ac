"""A second manager with separate folders, beside the one that serves the node."""

import asyncio
from pathlib import Path

import pytest

from kybernate.dev.stack.layout import commands
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node


@pytest.mark.timeout(180)
async def test_a_second_manager_of_a_node_ends_and_names_the_first_which_serves_on(tmp_path: Path) -> None:
    async with running(small_node(tmp_path, ONE_GROUP, map(pod, "ab"))) as here:
        starts, command = dict(here.stack.starts), commands(here.stack.layout, here.stack.options)["gpu_manager"]
        other = here.stack.folder / "b"  # a socket's path may have 89 bytes
        own = {"KYB_STATE_DIR": str(other / "s"), "KYB_RUN_DIR": str(other / "r")}
        own |= {"KYB_INSTANCE": "second", "KYB_HEALTH_PORT": "0"}
        second = await asyncio.create_subprocess_exec(
            *command.argv, env=dict(command.env) | own, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, written = await second.communicate()
        assert (second.returncode, "instance gpu-manager-0" in written.decode()) == (1, True), written.decode()
        assert not (other / "s" / "ledger").exists()
        await here.answered(*"ab")
        assert here.stack.starts == starts
