"""vLLM's own server (API server, EngineCore, Worker) on the CPU, with its memory on fake GPUs: ``make engines-test``.

Times are the wall's: real engines follow no speed. ``figures`` of each case are printed.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import small_node
from tests.until import until

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
PACKAGES = ROOT / ".venv-vllm"
if os.environ.get("KYB_VLLM") != "1":
    pytest.skip("vLLM's own server: make engines-test installs and tries it", allow_module_level=True)

GIB = 2**30
START_SECONDS = 900
"""Imports, compiler and first step; six minutes have been seen where eight others used two cores."""
CONFIG = """
profiles: [{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 3}]
gpuTopology: {groups: [{name: G0, gpus: [0]}]}
"""
PATHS = os.pathsep.join(map(str, (PACKAGES, HERE / "plugin", ROOT)))
POD = """---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, annotations: {{kyb.ai/model: {name}, kyb.ai/backend: vllm}}}}
spec:
  containers:
    - name: engine
      image: vllm
      command: [{python}, -m, vllm.entrypoints.openai.api_server, --model, {model}, --served-model-name, {name}]
      args: [--host, $(POD_IP), --enable-sleep-mode, --dtype, float32, --max-model-len, "512", --max-num-seqs, "4",
        --kv-cache-memory-bytes, "16777216"]
      env: [{env}]
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""
USUAL = {
    "PYTHONPATH": PATHS,
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KYB_VLLM_BYTES": str(50 * GIB),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder: Path = tmp_path_factory.mktemp("model")
    command = [sys.executable, str(HERE / "make_model.py"), str(folder), "1"]
    os.spawnve(os.P_WAIT, sys.executable, command, {**os.environ, "PYTHONPATH": str(PACKAGES)})
    assert (folder / "model.safetensors").exists()
    return folder


def vllm(name: str, model: Path, **env: str) -> str:
    """A pod."""
    listed = ", ".join(f"{{name: {key}, value: '{value}'}}" for key, value in {**USUAL, **env}.items())
    return POD.format(name=name, model=model, python=sys.executable, env=listed)


class Node:
    """A stack whose engines are vLLM's, and its clients."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession, driver: FakeDriverClient) -> None:
        self.stack, self.http, self.driver = stack, http, driver
        self.figures: dict[str, Any] = {}

    async def ask(self, name: str) -> tuple[int, str]:
        """Status and text of one greedy answer."""
        body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0, "seed": 1}
        async with self.http.post(f"{self.stack.url}/v1/completions", json=body) as answer:
            found = await answer.json()
            return answer.status, found["choices"][0]["text"] if answer.status == 200 else str(found)

    async def seats(self) -> dict[str, dict[str, Any]]:
        """The seats that are taken, by model."""
        async with self.http.get(f"{self.stack.console}/v1/seats") as answer:
            return {seat["model"]: seat for seat in (await answer.json())["seats"] if seat["model"]}

    async def park(self, name: str) -> None:
        """Park it, and wait for that."""

        async def accepted() -> bool:
            async with self.http.post(f"{self.stack.console}/v1/seats/{name}/park") as answer:
                found = await answer.json()
                assert answer.status == 202 or found["error"]["code"] == "busy", found
                return answer.status == 202

        await until(accepted, what=f"the activation of {name} ends after its first answer", timeout=10, interval=0.1)
        await self.state(name, "parked", 60)

    async def state(self, name: str, wanted: str, timeout: float) -> None:
        """Wait until a seat has a state."""

        async def there() -> bool:
            return bool((await self.seats()).get(name, {}).get("state") == wanted)

        await until(there, what=f"{name} is {wanted}", saw=self.tail, timeout=timeout, interval=0.1)

    async def timed(self, what: str, name: str) -> str:
        """The text of an answer, whose seconds become a figure."""
        began = time.monotonic()
        status, text = await self.ask(name)
        self.figures[what] = round(time.monotonic() - began, 2)
        assert status == 200, (text, self.tail())
        return text

    def worker(self) -> int:
        """The process of vLLM's Worker."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cmdline").read_bytes().startswith(b"VLLM::Worker") and self.mine(entry):
                        return int(entry.name)
                except OSError:
                    continue
        raise AssertionError("no worker")

    def mine(self, process: Path) -> bool:
        """True for a process of this stack."""
        return f"KYB_FAKE_DRIVER={self.stack.layout.driver_socket}".encode() in (process / "environ").read_bytes()

    def tail(self) -> str:
        """What manager and checkpointer wrote last."""
        return "".join(self.stack.logs(name)[-4000:] for name in ("gpu_manager", "checkpointer"))

    async def demotions(self) -> dict[str, str]:
        """Why seats were demoted, by model."""
        async with self.http.get(f"{self.stack.console}/v1/why") as answer:
            (node,) = (await answer.json())["nodes"]
        seats = [seat for group in node["groups"] for seat in group["seats"]]
        return {seat["model"]: seat["demoted"] for seat in seats if seat["demoted"]}

    async def no_violation(self) -> None:
        """The driver has counted nothing that breaks exclusivity."""
        stats = await self.driver.call("stats")
        assert stats["violations"]["count"] == 0, stats["violations"]
        assert stats["requests"], stats


@asynccontextmanager
async def node(folder: Path, pods: Sequence[str], figures: str) -> AsyncIterator[Node]:
    began = time.monotonic()
    total = aiohttp.ClientTimeout(total=START_SECONDS)
    async with (
        Stack(small_node(folder, CONFIG, pods, speed=1)) as stack,
        aiohttp.ClientSession(timeout=total) as http,
        await FakeDriverClient.connect(stack.layout.driver_socket, wait_seconds=60) as driver,
    ):
        here = Node(stack, http, driver)
        try:
            await stack.ready(START_SECONDS)
            here.figures["ready"] = round(time.monotonic() - began, 1)
            yield here
            await here.no_violation()
        finally:
            sys.stdout.write(f"\nfigures of {figures}: {here.figures}\n")


@pytest.mark.timeout(2400)
async def test_it_parks_and_wakes_and_starts_anew_where_its_worker_is_killed(tmp_path: Path, model: Path) -> None:
    """The first start has a cold cache, the one after the kill a warm one."""
    async with node(tmp_path, [vllm("a", model)], "one engine") as here:
        first = await here.timed("first answer, cold cache", "a")
        for turn in range(5):
            began = time.monotonic()
            await here.park("a")
            here.figures[f"park {turn}"] = round(time.monotonic() - began, 2)
            assert await here.timed(f"wake {turn}", "a") == first
        assert not await here.demotions()
        os.kill(here.worker(), signal.SIGKILL)
        assert await here.timed("answer after the worker's end, warm cache", "a") == first


@pytest.mark.timeout(2400)
async def test_one_that_says_asleep_and_moves_no_byte_is_parked_by_the_driver(tmp_path: Path, model: Path) -> None:
    async with node(tmp_path, [vllm("liar", model, KYB_FAKE_LIES="sleep-ignored")], "a liar") as here:
        first = await here.timed("answer", "liar")
        began = time.monotonic()
        await until(here.demotions, what="the liar is demoted", saw=here.tail, timeout=60, interval=0.1)
        here.figures["demoted after"] = round(time.monotonic() - began, 1)
        assert "its memory was not released" in (await here.demotions())["liar"]
        await here.park("liar")
        here.figures["parked after"] = round(time.monotonic() - began, 1)
        assert await here.timed("wake", "liar") == first


@pytest.mark.timeout(3600)
async def test_three_that_share_a_cold_cache_all_answer_and_none_is_demoted(tmp_path: Path, model: Path) -> None:
    cache = {
        name: str(tmp_path / "cache" / name)
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    }
    async with node(tmp_path, [vllm(name, model, **cache) for name in "abc"], "three on one cache") as here:
        for turn in range(2):
            answers = [await here.timed(f"{name} {turn}", name) for name in "abc"]
            assert len(set(answers)) == 1
        together = await asyncio.gather(*(here.ask(name) for name in "abc"))
        assert {status for status, _ in together} == {200}, together
        assert not await here.demotions()
