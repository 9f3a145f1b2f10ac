"""Hazards of docs/dev/checkpointer.md on a real GPU: does the product keep its promise about each?

Every test loses its own target process and touches nothing else. Without a GPU each is skipped, and says so. Run
them last on a node: ``python -m pytest tests/gpu/test_hazards.py``.
"""

import os
from pathlib import Path

import pytest

from bench.gpu import hazards
from bench.gpu.__main__ import NoGpuError, open_room

GIB = float(os.environ.get("GPU_BENCH_GIB", "2"))
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", hazards.HAZARDS)
async def test_the_product_keeps_its_promise(name: str) -> None:
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU here (no /dev/nvidiactl); only hardware can show this")
    try:
        async with open_room(0, "auto", "auto") as room:
            found = await hazards.meet(room, name, GIB)
    except NoGpuError as error:
        pytest.skip(str(error))
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["kept"], found
