"""A machine for the helper: the fake GPU daemon, the stub libraries in front of it, and processes that use its GPUs."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs.build import build_stubs
from services.checkpointer.helper_pool import HelperPool

GIB = 2**30
SPEED = 100.0
DEADLINE = 30.0

USER = """
import sys
from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient
client = SyncDriverClient(sys.argv[1])
assert client.request("attach", seat="s00")["code"] == 0
for gpu in sys.argv[3:]:
    assert client.request("alloc", gpu=gpu, bytes=int(sys.argv[2]))["code"] == 0
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass
class StubNode:
    """What the tests see of the machine."""

    folder: Path
    client: FakeDriverClient
    gpus: tuple[str, ...]
    stubs: Path
    users: list[asyncio.subprocess.Process] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        """What leads a process to this machine through NVIDIA's libraries."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
        return {
            **mine,
            "LD_LIBRARY_PATH": str(self.stubs),
            "KYB_FAKE_DRIVER": str(self.folder / "driver.sock"),
            "KYB_DRIVER": "cuda",
            **more,
        }

    def command(self, **environment: str) -> tuple[str, ...]:
        """A helper's command line on this machine."""
        assigned = {"LD_LIBRARY_PATH", "KYB_FAKE_DRIVER", *environment}
        settings = [f"{name}={value}" for name, value in self.environment(**environment).items() if name in assigned]
        helper = (sys.executable, "-m", "services.checkpointer.helper")
        return ("/usr/bin/env", *settings, *helper)

    @asynccontextmanager
    async def helper(self, **environment: str) -> "AsyncIterator[Helper]":
        """A pool of helpers, asked one call at a time."""
        async with HelperPool(self.command(**environment), self.folder / "helpers") as pool:
            yield Helper(pool)

    async def user(self, *gpus: str, gib: int = 40) -> int:
        """Start a process with that much memory on each GPU; its pid once it has it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            USER,
            str(self.folder / "driver.sock"),
            str(gib * GIB),
            *gpus,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.users.append(process)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return process.pid

    async def inject(self, fault: str, **arguments: Any) -> None:
        await self.client.call("inject", fault=fault, **arguments)

    async def used(self) -> dict[str, int]:
        """Bytes in use by GPU."""
        return {gpu["uuid"]: gpu["used_bytes"] for gpu in (await self.client.call("devices"))["gpus"]}


@dataclass
class Helper:
    """One helper at a time, replaced when it hangs."""

    pool: HelperPool

    async def call(self, verb: str, *, deadline: float = DEADLINE, **arguments: Any) -> dict[str, Any]:
        return await self.pool.call("G0", verb, deadline=deadline, **arguments)

    async def code(self, verb: str, pid: int, **arguments: Any) -> tuple[int, str]:
        """(number, name) of the result."""
        reply = await self.call(verb, pid=pid, **arguments)
        return reply["code"], reply["name"]

    async def state(self, pid: int) -> str:
        reply = await self.call("state", pid=pid)
        return str(reply.get("state", reply["name"]))


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()
    await process.stdout.read()


@asynccontextmanager
async def stub_node(*, gpus: int = 2, options: tuple[str, ...] = ()) -> AsyncIterator[StubNode]:
    """A machine with nothing on it."""
    folder = Path(tempfile.mkdtemp(prefix="kyb-"))
    socket = folder / "driver.sock"
    machine = ("--socket", str(socket), "--gpus", str(gpus), "--memory", "80GiB", "--speed", str(SPEED), *options)
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kybernate.dev.fakes.gpu", *machine, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with await FakeDriverClient.connect(socket, wait_seconds=DEADLINE) as client:
            uuids = tuple(gpu["uuid"] for gpu in (await client.call("devices"))["gpus"])
            node = StubNode(folder, client, uuids, await asyncio.to_thread(build_stubs))
            try:
                yield node
            finally:
                for user in node.users:
                    await end(user)
    finally:
        driver.terminate()
        await driver.wait()
        shutil.rmtree(folder)
