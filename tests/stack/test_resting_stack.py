"""Seats that rest are looked at, from end to end: what has memory past the manager is beside no other for long."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

GIB = 2**30


@pytest.mark.timeout(200)
async def test_a_request_past_the_router_to_an_unloaded_engine_wakes_its_seat(tmp_path: Path) -> None:
    """It loads, and its neighbour was activated beside it: both in the VRAM of one GPU for as long as one looked."""
    pods = [pod(model, vram="30GiB") for model in "ab"]
    async with running(small_node(tmp_path, ONE_GROUP, pods, backend="unload", speed=8), strict=False) as here:
        await here.answered(*"ab")
        found = await here.seats()
        parked, active = sorted("ab", key=lambda model: found[model]["state"] != "parked")
        address = (await here.pods())[parked]["status"]["podIP"]
        assert (await here.ask(parked, url=f"http://{address}:8000"))[0] == 200
        await here.until_seats(lambda rows: "past the router" in rows[parked]["reason"], "its seat says why")
        doctor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kybernate", "doctor", "--url", here.stack.console), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await doctor.communicate()
        assert f"{parked} on " in (line := next(one for one in out.decode().split("\n") if "past the router" in one))
        assert line.startswith("WARN")

        async def alone() -> bool:
            processes = (await here.driver("processes"))["processes"]
            return len({one["seat"] for one in processes if one["bytes"] > GIB}) == 1

        for model in (active, parked, active):
            await here.answered(model)
            await until(alone, what="one engine has memory", timeout=60)
