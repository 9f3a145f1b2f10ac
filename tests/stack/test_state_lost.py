"""The state folder of a node is lost while seats are parked: every model answers, and no operator is needed. At a first
start nothing was lost."""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
gpuTopology: {groups: [{name: G0, gpus: [0]}, {name: G1, gpus: [1]}]}
"""
MODELS = "abcd"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", ["everything", "state", "parked"])
async def test_all_models_answer_after_the_state_folder_was_lost(tmp_path: Path, lost: str) -> None:
    """``parked``: the checkpointer's records of parked seats alone. ``everything``: the seat folders, too; then all
    engines are ended."""
    options = small_node(tmp_path, CONFIG, (pod(model) for model in MODELS), gpus=2)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        seats = await stack.ready(90)
        assert sorted(str(seat["state"]) for seat in seats) == ["active", "active", "parked", "parked"]
        state, names = stack.folder / "state", ("checkpointer", "gpu_manager", "plugin")
        before = dict(stack.starts)
        folder = state / "parked" if lost == "parked" else state
        assert len(list((state / "parked").iterdir())) == 2
        for name in names:
            stack.kill(name)
        shutil.rmtree(folder)
        if lost == "everything":
            shutil.rmtree(stack.folder / "run" / "seats")
        await until(lambda: all(stack.starts[name] > before[name] for name in names), what="the services are back")
        seats = await stack.ready(60)
        assert "quarantined" not in {str(seat["state"]) for seat in seats}, seats

        for model in MODELS:
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        ended = [
            line for line in stack.logs("gpu_manager").splitlines() if '"seat.lost"' in line and " no ticket" in line
        ]
        assert {json.loads(line)["model"] for line in ended} == ({*MODELS} if lost == "everything" else set())
        assert lost == "everything" or "seat.learned" in stack.logs("checkpointer")
        assert "seat.quarantined" not in stack.logs("gpu_manager")
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
        assert stats["violations"]["count"] == 0, stats["violations"]


@pytest.mark.timeout(180)
async def test_a_first_start_has_lost_no_ledger_however_late_the_manager_is(tmp_path: Path) -> None:
    """An engine whose container came late would keep the others from their group."""
    options = small_node(tmp_path, ONE_GROUP, (pod(model) for model in "ab"))
    async with Stack(options) as stack:
        stack.kill("gpu_manager", signal.SIGSTOP)
        health = await until(lambda: _serving(stack.logs("plugin")), what="the plugin serves", timeout=60)
        async with aiohttp.ClientSession() as session:
            while "plugin.registered" not in stack.logs("plugin"):
                async with session.get(f"{health}/readyz") as answer:
                    if (await answer.json())["unmet"].keys() == {"manager"}:
                        break
                await asyncio.sleep(0.05)
        stack.kill("gpu_manager", signal.SIGCONT)
        await stack.ready(90)
        assert (stack.folder / "state" / "ledger").read_text()
        assert "seat.lost" not in stack.logs("gpu_manager")


def _serving(log: str) -> str:
    """Where the plugin tells its readiness."""
    lines = [json.loads(line) for line in log.splitlines() if '"plugin.serving"' in line]
    return str(lines[0]["url"]) if lines else ""
