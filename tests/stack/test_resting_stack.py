"""Seats that rest are looked at, from end to end: what has memory past the manager is beside no other for long."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.checkpointer.world import ENGINE
from tests.control_groups import any_control_group
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until

GIB = 2**30


async def ask(session: aiohttp.ClientSession, url: str, model: str) -> int:
    body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def seats(session: aiohttp.ClientSession, stack: Stack) -> dict[str, dict[str, Any]]:
    async with session.get(f"{stack.console}/v1/seats") as answer:
        return {seat["model"]: seat for seat in (await answer.json())["seats"] if seat["model"]}


async def address(session: aiohttp.ClientSession, stack: Stack, model: str) -> str:
    async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
        found = next(one for one in (await answer.json())["items"] if one["metadata"]["name"] == model)
    return f"http://{found['status']['podIP']}:8000"


@pytest.mark.timeout(200)
async def test_a_request_past_the_router_to_an_unloaded_engine_wakes_its_seat(tmp_path: Path) -> None:
    """It loads, and its neighbour was activated beside it: both in the VRAM of one GPU for as long as one looked."""
    pods = [pod(model, vram="30GiB") for model in "ab"]
    options = small_node(tmp_path, ONE_GROUP, pods, backend="unload", speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(90)
        assert [await ask(session, stack.url, model) for model in "ab"] == [200, 200]
        found = await seats(session, stack)
        parked, active = sorted("ab", key=lambda model: found[model]["state"] != "parked")
        assert await ask(session, await address(session, stack, parked), parked) == 200

        async def told() -> bool:
            return "past the router" in (await seats(session, stack))[parked]["reason"]

        await until(told, what="its seat holds the GPU, and says why", timeout=60)
        doctor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kybernate", "doctor", "--url", stack.console), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await doctor.communicate()
        assert f"{parked} on " in (line := next(one for one in out.decode().split("\n") if "past the router" in one))
        assert line.startswith("WARN")
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:

            async def alone() -> bool:
                processes = (await driver.call("processes"))["processes"]
                return len({one["seat"] for one in processes if one["bytes"] > GIB}) == 1

            for model in (active, parked, active):
                assert await ask(session, stack.url, model) == 200
                await until(alone, what="one engine has memory", timeout=60)


@pytest.mark.timeout(200)
async def test_a_program_in_a_container_whose_engine_rests_is_ended(tmp_path: Path) -> None:
    """``kubectl exec`` of a CUDA program beside kyb-run."""
    with any_control_group() as cgroups:
        pods = [pod(model, vram="30GiB").replace("command: [", "command: [/kyb/kyb-run, --, ") for model in "ab"]
        arguments = {"kubelet": ("--cgroups", str(cgroups))}
        options = small_node(tmp_path, ONE_GROUP, pods, backend="restart", speed=8, arguments=arguments)
        async with Stack(options) as stack, aiohttp.ClientSession() as session:
            await stack.ready(90)
            assert [await ask(session, stack.url, model) for model in "ab"] == [200, 200]

            async def resting() -> str:
                found = await seats(session, stack)
                return next((model for model in "ab" if found[model]["state"] == "parked"), "")

            rests = await until(resting, what="one is parked", timeout=60)
            async with session.get(f"{stack.layout.kubelet_url}/pods") as answer:
                of = next(one for one in (await answer.json())["items"] if one["metadata"]["name"] == rests)
            folder = cgroups / of["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
            async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
                gpu = (await driver.call("devices"))["gpus"][0]["uuid"]
                command = (ENGINE, str(stack.layout.driver_socket), rests, "1", gpu, str(10 * GIB))
                inside = ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(folder))
                program = await asyncio.create_subprocess_exec(
                    *(*inside, sys.executable, "-c", *command), stdin=asyncio.subprocess.PIPE
                )
                assert await program.wait() < 0, "it is killed"
            assert [await ask(session, stack.url, model) for model in "ab"] == [200, 200]
