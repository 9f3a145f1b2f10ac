"""The state folder of a node is lost while seats are parked: every model answers, and no operator is needed."""

import shutil
from pathlib import Path

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import pod, small_node
from tests.until import until

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
gpuTopology: {groups: [{name: G0, gpus: [0]}, {name: G1, gpus: [1]}]}
"""
MODELS = "abcd"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", ["everything", "parked"])
async def test_all_models_answer_after_the_state_folder_was_lost(tmp_path: Path, lost: str) -> None:
    """``parked``: the checkpointer's records of parked seats alone."""
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
        await until(lambda: all(stack.starts[name] > before[name] for name in names), what="the services are back")
        seats = await stack.ready(60)
        assert "quarantined" not in {str(seat["state"]) for seat in seats}, seats

        for model in MODELS:
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        assert "seat.learned" in stack.logs("checkpointer")
        assert "seat.quarantined" not in stack.logs("gpu_manager")
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            stats = await driver.call("stats")
        assert stats["violations"]["count"] == 0, stats["violations"]
