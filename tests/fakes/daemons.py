"""Fake drivers, engines and GPU-using children as real processes for tests; each ends with its block."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.nats_server import free_port
from tests.until import until

CHILD = """
import json, sys
from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient
with SyncDriverClient(sys.argv[1]) as driver:
    for line in sys.stdin:
        call = json.loads(line)
        print(json.dumps(driver.request(call.pop("call"), **call)), flush=True)
"""


@contextlib.asynccontextmanager
async def process(*arguments: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process; terminated at the end, killed if that takes 5 s."""
    started = await asyncio.create_subprocess_exec(sys.executable, *arguments, **options)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            with contextlib.suppress(ProcessLookupError):
                started.send_signal(signal.SIGCONT)  # a stopped one cannot end
            try:
                await asyncio.wait_for(started.wait(), 5)
            except TimeoutError:
                started.kill()
                await started.wait()
        if started.stdin is not None:
            started.stdin.close()


@contextlib.asynccontextmanager
async def driver(socket: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A fake driver that listens."""
    arguments = ("--socket", str(socket), "--log-level", "error", *options)
    async with process("-m", "kybernate.dev.fakes.gpu", *arguments) as started:
        async with await FakeDriverClient.connect(socket, wait_seconds=30):
            pass
        yield started


class Child:
    """A separate process that makes calls to the driver."""

    def __init__(self, started: asyncio.subprocess.Process) -> None:
        self.process = started
        self.pid = started.pid

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """A call, and its reply."""
        self.start(name, **arguments)
        return await self.reply()

    def start(self, name: str, **arguments: Any) -> None:
        """A call whose reply is not awaited."""
        self.process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")

    async def reply(self) -> dict[str, Any]:
        """The next reply."""
        return json.loads(await self.process.stdout.readline())


@contextlib.asynccontextmanager
async def child(socket: Path) -> AsyncIterator[Child]:
    """A process that is connected to the driver when asked the first time."""
    pipe = asyncio.subprocess.PIPE
    async with process("-c", CHILD, str(socket), stdin=pipe, stdout=pipe) as started:
        yield Child(started)


@contextlib.asynccontextmanager
async def engine(
    socket: Path,
    port: int,
    gpus: list[str],
    *options: str,
    speed: float = 100.0,
    more_env: Mapping[str, str] | None = None,
    **more: Any,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A fake engine that was started, maybe still loading."""
    env = os.environ | {
        "POD_IP": "127.0.0.1",
        "KYB_FAKE_DRIVER": str(socket),
        "KYB_FAKE_GPU": ",".join(gpus),
        "KYB_GPU_SEAT": "1x-test.s00",
        "KYB_SPEED": str(speed),
        **(more_env or {}),
    }
    arguments = ("--model", "m", "--port", str(port), *options)
    async with process("-m", "kybernate.dev.fakes.engine", *arguments, env=env, **more) as started:
        yield started


async def healthy(http: aiohttp.ClientSession) -> bool:
    """True once it has loaded."""
    try:
        async with http.get("/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


@contextlib.asynccontextmanager
async def ready(node: SimpleNamespace, *options: str, gpus: int = 1, **more: Any) -> AsyncIterator[SimpleNamespace]:
    """A healthy engine on the first GPUs of a node, and a client of it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        engine(node.socket, port, node.gpus[:gpus], *options, **more) as started,
        aiohttp.ClientSession(url) as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy")
        yield SimpleNamespace(process=started, http=http, url=url, node=node)
