"""A model that fails, or that no request waits for any more, in a whole stack: others are served meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

RESTARTED = """---
apiVersion: v1
kind: Pod
metadata:
  name: {model}
  annotations: {{kyb.ai/model: {model}, kyb.ai/backend: restart}}
spec:
  containers:
    - name: engine
      image: own
      command: [sh, -c, "{command}"]
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""
LINE = "OSError: no such model file"


async def ask(session: aiohttp.ClientSession, stack: Stack, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "hi", "max_tokens": 2}
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def rows(session: aiohttp.ClientSession, stack: Stack) -> dict[str, dict[str, Any]]:
    """The roster, by model; empty before the console answers."""
    try:
        async with session.get(f"{stack.console}/v1/seats") as answer:
            found = await answer.json()
    except aiohttp.ClientConnectionError:
        return {}
    return {seat["model"]: seat for seat in found["seats"]}


@pytest.mark.timeout(200)
async def test_a_crash_looper_takes_nothing_from_a_good_model_and_its_callers_get_the_cause_at_once(
    tmp_path: Path,
) -> None:
    bad = RESTARTED.format(model="bad", command=f"echo {LINE} >&2; exit 3")
    options = small_node(tmp_path, ONE_GROUP, [pod("good"), bad])
    async with Stack(options) as stack, aiohttp.ClientSession() as session:

        async def failing() -> bool:
            return bool((await rows(session, stack)).get("bad", {}).get("failed"))

        async def startable() -> bool:
            return not (await rows(session, stack))["bad"]["failed_until"]

        await until(failing, what="bad has failed twice", timeout=90)
        before = (await rows(session, stack))["bad"]["failed"]
        assert (await ask(session, stack, "good"))[0] == 200
        for _ in range(8):
            assert (await ask(session, stack, "good"))[0] == 200
            assert (await rows(session, stack))["good"]["state"] == "active"
        await until(startable, what="its pause is over", timeout=60)
        found = await rows(session, stack)
        assert (found["good"]["state"], found["bad"]["failed"]) == ("active", before), "no request asks for it"

        for count in (3, 3):
            status, answer = await ask(session, stack, "bad")
            assert (status, answer["error"]["code"]) == (503, "engine_failed")
            text = answer["error"]["message"]
            assert text.startswith(f"bad has failed {count} times in a row"), "one attempt, and then none in its pause"
            assert f"exited with code 3: {LINE}; try again in" in text
        assert (await ask(session, stack, "good"))[0] == 200


@pytest.mark.timeout(200)
async def test_a_start_whose_caller_has_left_gives_its_gpu_to_a_model_with_requests(tmp_path: Path) -> None:
    slow = RESTARTED.format(model="slow", command="sleep 900")
    options = small_node(tmp_path, ONE_GROUP + "warmup: false\n", [slow, pod("quick")])
    async with Stack(options) as stack, aiohttp.ClientSession() as session:

        async def known() -> bool:
            return {*(await rows(session, stack))} >= {"slow", "quick"}

        await until(known, what="both models are known", timeout=90)
        left = asyncio.create_task(ask(session, stack, "slow"))

        async def starts() -> bool:
            return bool((await rows(session, stack)).get("slow", {}).get("state") == "starting")

        await until(starts, what="slow starts", timeout=90)
        left.cancel()
        assert (await ask(session, stack, "quick"))[0] == 200
        assert not (await rows(session, stack))["slow"]["failed"]
