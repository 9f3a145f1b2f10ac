"""Ways to park, from end to end: one group, a different backend for each seat."""

from pathlib import Path

import pytest

from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node

CONFIG = ONE_GROUP.replace("seatsPerGroup: 2", "seatsPerGroup: 5")


@pytest.mark.timeout(200)
async def test_seats_of_five_backends_take_turns_on_one_gpu(tmp_path: Path) -> None:
    """With ``restart`` kubelet starts the ended container again, the gate holds it, and a request opens it."""
    backend = "vllm,sglang,unload,fake,restart"
    options = small_node(tmp_path, CONFIG, map(pod, "abcde"), backend=backend, speed=20)
    async with running(options) as here:
        await here.answered(*"abcdea")
        assert {name: bool(one["restartCount"]) for name, one in (await here.containers()).items()} == {
            name: name == "e" for name in "abcde"
        }
