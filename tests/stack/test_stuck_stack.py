"""What hangs in a whole stack ends by itself within the time that is shown, and others are served meanwhile."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

NEVER = """---
apiVersion: v1
kind: Pod
metadata:
  name: never
  annotations: {kyb.ai/model: never, kyb.ai/backend: fake}
spec:
  containers:
    - name: engine
      image: fake
      command: [sleep, "600"]
      startupProbe: {failureThreshold: 1, periodSeconds: 1}
      resources: {limits: {kyb.ai/gpu-1x-seat: 1}}
"""
TWO_GROUPS = ONE_GROUP.replace("{name: G0, gpus: [0]}", "{name: G0, gpus: [0]}, {name: G1, gpus: [1]}")


async def ask(session: aiohttp.ClientSession, stack: Stack, model: str) -> int:
    body = {"model": model, "prompt": "hi", "max_tokens": 2}
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def why(session: aiohttp.ClientSession, stack: Stack) -> dict[str, dict[str, Any]]:
    """By model: what its manager says."""
    async with session.get(f"{stack.console}/v1/why") as answer:
        found = await answer.json()
    return {seat["model"]: seat for node in found["nodes"] for group in node["groups"] for seat in group["seats"]}


@pytest.mark.timeout(200)
async def test_an_engine_that_is_never_healthy_gives_its_gpu_back(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, [NEVER, pod("good")])
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await until(lambda: "console.listening" in stack.logs("console"), what="it can be asked", timeout=60)

        async def starts() -> bool:
            seat = (await why(session, stack)).get("never", {})
            return "is not healthy yet" in seat["stage"]["text"] if seat else False

        await until(starts, what="it has the GPU", timeout=90)
        assert "ended at 46 s" in (await why(session, stack))["never"]["stage"]["text"]
        waits = asyncio.create_task(ask(session, stack, "never"))  # else its start gives way at once
        assert await ask(session, stack, "good") == 200, "its engine is ended, and the other one starts"
        waits.cancel()
        seat = (await why(session, stack))["never"]
        assert seat["state"] in ("waiting", "backoff"), seat


@pytest.mark.timeout(200)
@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
async def test_a_hung_park_and_a_hung_activation_end_within_the_time_that_is_shown(tmp_path: Path, verb: str) -> None:
    options = small_node(tmp_path, TWO_GROUPS, [pod(model, vram="2GiB") for model in "abc"], gpus=2)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)

        async def first(model: str) -> dict[str, Any]:
            return (await why(session, stack))[model]

        for model in "abcabc":
            assert await ask(session, stack, model) == 200
        seats = await why(session, stack)
        wanted = "active" if verb == "checkpoint" else "parked"
        victim = next(model for model in "abc" if seats[model]["state"] == wanted)
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            await driver.call("inject", fault="hang", verb=verb, seat=seats[victim]["seat"], times=9)
        if verb == "checkpoint":  # the policy might park another seat
            async with session.post(f"{stack.console}/v1/seats/{seats[victim]['seat']}/park") as answer:
                assert answer.status == 202, await answer.text()
        others = [model for model in "abc" if model != victim]
        asked = [asyncio.create_task(ask(session, stack, model)) for model in "abc"]
        began = time.monotonic()

        async def hangs() -> bool:
            clock = (await first(victim))["stage"].get("clock") or {}
            return bool(clock.get("ends") == "given up" and clock.get("deadline_at"))

        async def given_up() -> bool:
            return (await first(victim))["state"] in ("quarantined", "lost")

        await until(hangs, what="it hangs", timeout=60)
        end = (await first(victim))["stage"]["clock"]["deadline_at"]
        await until(given_up, what="it is given up", timeout=90)
        assert time.time() < end + 30.0, "a look at its state, and the end of a helper"
        assert time.monotonic() - began < 90
        for task, model in zip(asked, "abc", strict=True):
            if model in others:
                assert await task == 200
            else:
                task.cancel()
