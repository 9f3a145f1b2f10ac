"""What hangs in a whole stack ends by itself within the time that is shown, and others are served meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.stack.client import Client, Json, running
from tests.stack.pods import TWO_GROUPS, pod, small_node
from tests.until import until


async def why(here: Client) -> dict[str, Json]:
    """By model: what its manager says."""
    nodes = (await here.read("why")).get("nodes", ())
    return {seat["model"]: seat for node in nodes for group in node["groups"] for seat in group["seats"]}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
async def test_a_hung_park_and_a_hung_activation_end_within_the_time_that_is_shown(tmp_path: Path, verb: str) -> None:
    async with running(small_node(tmp_path, TWO_GROUPS, [pod(m, vram="2GiB") for m in "abc"], gpus=2)) as here:
        await here.answered(*"abcabc")
        seats = await why(here)
        wanted = "active" if verb == "checkpoint" else "parked"
        victim = next(model for model in "abc" if seats[model]["state"] == wanted)
        await here.driver("inject", fault="hang", verb=verb, seat=seats[victim]["seat"], times=9)
        if verb == "checkpoint":  # the policy might park another seat
            assert (await here.order(f"seats/{seats[victim]['seat']}/park"))["accepted"]
        asked = {model: asyncio.create_task(here.answered(model)) for model in "abc"}
        began = time.monotonic()

        async def hangs() -> float:
            clock = (await why(here))[victim]["stage"].get("clock") or {}
            return float(clock["deadline_at"] or 0) if clock.get("ends") == "given up" else 0.0

        end = await until(hangs, what="it hangs", timeout=60)
        await here.until_state(victim, "quarantined", "lost", timeout=90)
        assert time.time() < end + 30.0, "a look at its state, and the end of a helper"
        assert time.monotonic() - began < 90
        asked.pop(victim).cancel()
        await asyncio.gather(*asked.values())
