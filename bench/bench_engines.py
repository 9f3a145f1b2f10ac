"""What a park and an activation cost beyond the engine's own call, by backend: the whole job, with its journal on disk.

A fake engine as a process with the API of each vendor, whose calls take nearly no time, on a fake GPU driver.
``beyond``: wall time of a job without the calls that move memory (``own``). Most of it is ``verify``: the 0.2 s for
which engine and driver must agree, and the comparison of answers. ``cuda``: the driver's procedure on the same engine.
A parked seat of ``restart`` starts at its gate, so it has no activation here.
"""

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.gpu.harness import GROUP, NODE, TimedJournal
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.nats_server import free_port
from kybernate.messages import SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver import Backend
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.backends.host import open_host
from services.checkpointer.engine_http import AnswerCheck, open_engines
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.job_run import JobRun
from services.checkpointer.records import JobFile, Record
from services.checkpointer.settings import fake_helper_command

CYCLES = 15
WARM = 1
SPEED = 1e4
"""Model seconds per wall second of engines and driver. The checkpointer's own waits are real."""
KEY = "key"
_VLLM = ("--api", "vllm", "--enable-sleep-mode")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": _VLLM,
    "vllm-2": _VLLM,
    "sglang": ("--api", "sglang", "--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"),
    "unload": ("--api", "llamacpp", "--no-models-autoload", "--metrics"),
    "cuda": (),
    "restart": (),
}
OWN = ("sleep", "wake", "lock", "checkpoint", "restore", "unlock", "kill")


@dataclass
class Stand:
    """A checkpointer without its bus, on a fake driver."""

    folder: Path
    gpu: str
    journal: TimedJournal
    backends: Mapping[str, Backend]
    check: AnswerCheck
    epochs: "itertools.count[int]"

    async def half(self, target: SeatTarget, verb: str) -> tuple[float, SeatProgress]:
        """Wall seconds of a job, and its end."""
        epoch = next(self.epochs)
        park, activate = ((target,), None) if verb == "park" else ((), target)
        job = SwitchJob(
            cause="bench", node=NODE, epoch=epoch, op=f"op-{epoch}", group=GROUP, park=park, activate=activate
        )
        file, began = JobFile([Record(kind="switch", switch=job)]), time.perf_counter()
        await self.journal.begin(file)
        status = await JobRun(file, self.journal, self.backends, lambda _: None, self.check).run()
        took, end = time.perf_counter() - began, status.park[0] if status.park else status.activate
        assert end is not None
        assert end.outcome == ("parked" if verb == "park" else "active"), end
        return took, end

    @asynccontextmanager
    async def engine(self, backend: str) -> AsyncIterator[SeatTarget]:
        """An engine that serves, in its seat."""
        port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")} | {
            "KYB_FAKE_DRIVER": str(self.folder / "driver.sock"),
            "KYB_FAKE_GPU": self.gpu,
            "KYB_GPU_SEAT": backend,
            "VLLM_SERVER_DEV_MODE": "1",
        }
        options = ("--model", "m", "--vram", "20GiB", "--port", str(port), "--speed", str(SPEED), *OPTIONS[backend])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kybernate.dev.fakes.engine", *options, env=environment, start_new_session=True,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            await _serves(url)
            yield SeatTarget(
                seat=backend,
                pod_uid="bench",
                container_id=f"process://{process.pid}",
                gpus=(self.gpu,),
                vram_bytes=20 * 2**30,
                backend="fake" if backend == "cuda" else backend,
                endpoint=url,
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def run(cycles: int = CYCLES) -> dict[str, float]:
    """Milliseconds by backend, half, part and quantile."""
    figures: dict[str, float] = {}
    async with _stand() as stand:
        for backend in OPTIONS:
            halves: dict[str, list[tuple[float, SeatProgress]]] = {"park": [], "activate": []}
            if backend == "restart":
                for _ in range(min(cycles, 5)):
                    async with stand.engine(backend) as target:
                        halves["park"].append(await stand.half(target, "park"))
            else:
                async with stand.engine(backend) as target:
                    for number in range(cycles + WARM):
                        ends = [(verb, await stand.half(target, verb)) for verb in halves]
                        for verb, end in ends if number >= WARM else ():
                            halves[verb].append(end)
            figures |= _figures(backend, halves)
    return figures


def _figures(backend: str, halves: Mapping[str, list[tuple[float, SeatProgress]]]) -> dict[str, float]:
    figures = {}
    for verb, ends in halves.items():
        own = sorted(sum(end.seconds.get(step, 0.0) for step in OWN) for _, end in ends)
        verify = sorted(end.seconds.get("verify", 0.0) for _, end in ends)
        beyond = sorted(took - sum(end.seconds.get(step, 0.0) for step in OWN) for took, end in ends)
        for name, values in (("own", own), ("verify", verify), ("beyond", beyond)):
            if values:
                figures[f"{backend}_{verb}_{name}_p50_ms"] = values[len(values) // 2] * 1e3
        if beyond:
            figures[f"{backend}_{verb}_beyond_p99_ms"] = beyond[min(len(beyond) - 1, int(0.99 * len(beyond)))] * 1e3
    return figures


@asynccontextmanager
async def _stand() -> AsyncIterator[Stand]:
    with tempfile.TemporaryDirectory(prefix="kyb-bench-") as name:
        folder = Path(name)
        path = folder / "driver.sock"
        (folder / KEY).write_text(KEY)
        command = ("--socket", str(path), "--gpus", "1", "--memory", "80GiB", "--speed", str(SPEED))
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kybernate.dev.fakes.gpu", *command, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with (
                await FakeDriverClient.connect(path, wait_seconds=60) as client,
                HelperPool(fake_helper_command(path), folder / "helpers") as pool,
                open_engines(folder) as http,
            ):
                (gpu,) = (await client.call("devices"))["gpus"]
                journal = TimedJournal(folder / "state")
                journal.load()
                timeouts = Timeouts()
                host = open_host(path, timeouts.settle(), fake_kubelet=True)
                backends = open_backends(pool, timeouts, host, fake=True, http=http)
                try:
                    yield Stand(folder, gpu["uuid"], journal, backends, AnswerCheck(http), itertools.count(1))
                finally:
                    journal.close()
        finally:
            driver.terminate()
            await driver.wait()


async def _serves(url: str) -> None:
    """Wait until the engine answers a request."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 1}
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{url}/v1/completions", json=body) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.02)
