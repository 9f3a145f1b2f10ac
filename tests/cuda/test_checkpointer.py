"""Which driver the checkpointer's helpers speak to, and what it says when they cannot."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.nats_server import NatsServer
from services.checkpointer.settings import CheckpointerSettings, helper_command
from tests.cuda.recorder import Recorder, needs_no_driver
from tests.cuda.stub_node import stub_node
from tests.until import until


def command(**environment: str) -> tuple[str, ...]:
    return helper_command(CheckpointerSettings.from_env(environment))[2:]


def test_settings_choose_the_driver_() -> None:
    helper = "services.checkpointer.helper"
    assert command(KYB_DRIVER="cuda") == (helper,)
    factory = "kybernate.dev.fakes.gpu.helper_driver:FakeHelperDriver"
    assert command(KYB_FAKE_DRIVER="/x") == (helper, "--fake", factory, "/x")
    with pytest.raises(ValueError, match="KYB_DRIVER=fake needs KYB_FAKE_DRIVER"):
        command(KYB_DRIVER="fake")


@asynccontextmanager
async def checkpointer(folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Callable[[], Any]]:
    """A checkpointer process with the CUDA driver; yields the way to ask why it is not ready."""
    folder.mkdir(exist_ok=True)
    async with NatsServer(folder / "nats") as server, aiohttp.ClientSession() as session:
        settings = {
            "KYB_NATS_URL": server.url,
            "KYB_RUN_DIR": str(folder / "run"),
            "KYB_STATE_DIR": str(folder / "state"),
            "KYB_LOG_FORMAT": "json",
            "KYB_DRIVER": "cuda",
        }
        log_file = folder / "log"
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.checkpointer"),
                env={**environment, **settings},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        async def unmet() -> dict[str, str]:
            async with session.get(f"{serving_at(log_file)}/readyz") as response:
                found: dict[str, str] = (await response.json())["unmet"]
                return found

        try:
            await until(lambda: process.returncode is not None or serving_at(log_file), what="it serves")
            yield unmet
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def serving_at(log: Path) -> str:
    """Where its log says that it serves; empty as long as it does not."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return next((str(line["health"]) for line in lines if line.get("event") == "checkpointer.serving"), "")


async def driver_condition(unmet: Callable[[], Any], word: str) -> str:
    """The driver's unmet condition of readiness, once it contains ``word`` (empty: once there is none)."""
    seen: list[str] = []

    async def read() -> bool:
        text = str((await unmet()).get("driver", ""))
        seen[:] = [text]
        return word in text if word else not text

    await until(read, what=f"the driver's condition contains {word!r}", saw=lambda: seen, interval=0.05)
    return seen[0]


async def test_readiness_names_a_driver_that_is_too_old(tmp_path: Path) -> None:
    old = Recorder.build(tmp_path / "lib", "-DOLD")
    old.answer(cuDriverGetVersion="0 12040")
    async with checkpointer(tmp_path / "node", old.environment) as unmet:
        text = await driver_condition(unmet, "CUDA 12.4")
        assert "has no checkpoint API; needs 570 or newer (580 recommended)" in text


async def test_a_driver_that_is_new_enough_is_ready() -> None:
    async with stub_node(gpus=1) as node, checkpointer(node.folder / "node", node.environment()) as unmet:
        assert await driver_condition(unmet, "") == ""


@needs_no_driver
async def test_readiness_says_what_to_install_where_there_is_no_driver(tmp_path: Path) -> None:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    async with checkpointer(tmp_path / "node", mine) as unmet:
        assert "install the NVIDIA driver" in await driver_condition(unmet, "NVIDIA")
