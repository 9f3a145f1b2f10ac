"""Hazards of docs/dev/checkpointer.md on a real GPU: does the product keep its promise about each?

Every test loses its own target process and touches nothing else. Without a GPU each is skipped, and says so. Run
them last on a node: ``python -m pytest tests/gpu/test_hazards.py``.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import hazards
from bench.gpu.__main__ import NoGpuError, open_room

GIB = float(os.environ.get("GPU_BENCH_GIB", "2"))
pytestmark = pytest.mark.timeout(600)


async def meet(name: str) -> dict[str, Any]:
    """Meet a hazard; what was seen. Skips where this machine cannot show it."""
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
    return found


async def test_h1_no_restore_is_tried_without_room() -> None:
    await meet("h1")


async def test_h2_a_restored_process_is_checkpointed_before_it_is_killed() -> None:
    await meet("h2")


async def test_h3_a_process_that_dropped_nvml_is_parked_or_known_to_be_lost() -> None:
    await meet("h3")


async def test_h4_a_parked_process_makes_no_synchronize() -> None:
    await meet("h4")


async def test_h5_a_stopped_process_is_continued_before_the_driver_is_called() -> None:
    await meet("h5")


async def test_h6_the_copy_is_host_memory_of_the_process() -> None:
    await meet("h6")


async def test_h7_a_single_nccl_group_is_refused_or_comes_back_whole() -> None:
    await meet("h7")


async def test_h9_shared_memory_is_refused_or_comes_back_whole_or_starts_cold() -> None:
    await meet("h9")


async def test_h10_managed_memory_is_refused_or_comes_back_whole() -> None:
    await meet("h10")


async def test_h14_a_partial_map_changes_nothing() -> None:
    await meet("h14")


async def test_h15_the_driver_answers_about_another_process() -> None:
    await meet("h15")
