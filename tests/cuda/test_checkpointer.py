"""Which driver the checkpointer's helpers speak to, and what it says when they cannot."""

from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from services.checkpointer.settings import CheckpointerSettings, helper_command
from tests.cuda.recorder import Recorder, needs_no_driver
from tests.cuda.stub_node import stub_node
from tests.plugin.processes import process, until_logged
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


async def driver_condition(folder: Path, environment: Mapping[str, str], word: str) -> str:
    """Why a checkpointer with the CUDA driver is not ready, once that contains ``word`` (empty: once it is)."""
    folder.mkdir(exist_ok=True)
    places = {"KYB_RUN_DIR": str(folder / "run"), "KYB_STATE_DIR": str(folder / "state")}
    settings = {**environment, **places, "KYB_LOG_FORMAT": "json", "KYB_DRIVER": "cuda"}
    seen: list[str] = []
    async with (
        process("-m", "services.checkpointer", log=folder / "log", **settings),
        aiohttp.ClientSession() as session,
    ):
        url = (await until_logged(folder / "log", "checkpointer.serving"))["health"]

        async def read() -> bool:
            async with session.get(f"{url}/readyz") as response:
                text = str((await response.json())["unmet"].get("driver", ""))
            seen[:] = [text]
            return word in text if word else not text

        await until(read, what=f"the driver's condition contains {word!r}", saw=lambda: seen, interval=0.05)
    return seen[0]


async def test_readiness_names_a_driver_that_is_too_old(tmp_path: Path) -> None:
    old = Recorder.build(tmp_path / "lib", "-DOLD")
    old.answer(cuDriverGetVersion="0 12040")
    text = await driver_condition(tmp_path / "node", old.environment, "CUDA 12.4")
    assert "has no checkpoint API; needs 570 or newer (580 recommended)" in text


async def test_a_driver_that_is_new_enough_is_ready() -> None:
    async with stub_node(gpus=1) as node:
        assert await driver_condition(node.folder / "node", node.environment(), "") == ""


@needs_no_driver
async def test_readiness_says_what_to_install_where_there_is_no_driver(tmp_path: Path) -> None:
    assert "install the NVIDIA driver" in await driver_condition(tmp_path / "node", {}, "NVIDIA")
