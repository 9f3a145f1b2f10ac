"""A fake machine that is read twice: through NVML's stub library in a child process, and from the daemon."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.gpu.node import FakeGpus
from kybernate.dev.fakes.stubs import build_stubs
from kybernate.gpus import GpuError
from kybernate.machine import Gpu, GpuEvent, GpuProcess, GpuSensors, Link, Mig, PcieLevel
from tests.fakes.daemons import driver, process

READER = Path(__file__).with_name("reader.py")


class Reader:
    """NvmlGpus in the child process, with the same methods."""

    def __init__(self, started: asyncio.subprocess.Process) -> None:
        self.process = started

    async def list(self) -> tuple[Gpu, ...]:
        return tuple(gpu(one) for one in await self.ask("list"))

    async def instances(self) -> tuple[Gpu, ...]:
        return tuple(gpu(one) for one in await self.ask("instances"))

    async def links(self) -> tuple[Link, ...]:
        return tuple(Link(**one | {"level": PcieLevel(one["level"])}) for one in await self.ask("links"))

    async def used_bytes(self) -> dict[str, int]:
        """Of physical GPUs, as the checkpointer's helper reads them."""
        return {gpu: used for gpu, (used, _) in (await self.ask("memory")).items()}

    async def processes(self) -> tuple[GpuProcess, ...]:
        return tuple(GpuProcess(**one) for one in await self.ask("processes"))

    async def sensors(self) -> tuple[GpuSensors, ...]:
        return tuple(GpuSensors(**one) for one in await self.ask("sensors"))

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        return tuple(GpuEvent(**one) for one in await self.ask("events", timeout_seconds))

    async def ask(self, method: str, *arguments: Any) -> Any:
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        answer = json.loads(await self.process.stdout.readline())
        if "error" in answer:
            raise GpuError(answer["error"])
        return answer["ok"]

    async def ends(self) -> int:
        """Let it close NVML and end; its exit code."""
        self.process.stdin.close()
        return await self.process.wait()


class Machine:
    """One preset, its daemon, and both ways to read it."""

    def __init__(self, socket: Path, client: FakeDriverClient, nvml: Reader) -> None:
        self.socket, self.client, self.nvml, self.fake = socket, client, nvml, FakeGpus(socket)

    async def inject(self, fault: str, **arguments: Any) -> None:
        await self.client.call("inject", fault=fault, **arguments)


@contextlib.asynccontextmanager
async def machine(folder: Path, preset: str, *options: str, in_sysfs: bool = True) -> AsyncIterator[Machine]:
    """The preset's machine. ``in_sysfs``: NUMA nodes can be read from sysfs."""
    socket = folder / "driver.sock"
    async with driver(socket, "--preset", preset, *options), await FakeDriverClient.connect(socket) as client:
        gpus = (await client.call("devices"))["gpus"]
        sysfs = write_sysfs(folder / "devices", gpus if in_sysfs else ())
        async with reader(socket, sysfs) as nvml:
            made = Machine(socket, client, nvml)
            try:
                yield made
            finally:
                await made.fake.close()


@contextlib.asynccontextmanager
async def reader(socket: Path, sysfs: Path) -> AsyncIterator[Reader]:
    env = os.environ | {
        "LD_LIBRARY_PATH": str(await asyncio.to_thread(build_stubs)),
        "KYB_FAKE_DRIVER": str(socket),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    pipe = asyncio.subprocess.PIPE
    async with process(str(READER), str(sysfs), env=env, stdin=pipe, stdout=pipe) as started:
        yield Reader(started)


def write_sysfs(folder: Path, gpus: Iterable[dict[str, Any]]) -> Path:
    """The NUMA nodes of PCI devices, as in sysfs."""
    folder.mkdir()
    for one in gpus:
        device = folder / one["pci_bus_id"]
        device.mkdir()
        (device / "numa_node").write_text(f"{one['numa_node']}\n")
    return folder


def gpu(one: dict[str, Any]) -> Gpu:
    return Gpu(**one | {"mig": Mig(**one["mig"]) if one["mig"] else None})
