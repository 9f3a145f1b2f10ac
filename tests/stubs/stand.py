"""A fake GPU daemon and real processes that reach it through the stub libcuda.so.1."""

import asyncio
import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from tests.fakes import daemons
from tests.until import until

GIB = 2**30
SUCCESS, INVALID, NO_ROOM, NOT_INITIALIZED, NO_DEVICE, OS, ILLEGAL, NOT_READY, NOT_SUPPORTED, UNKNOWN = (
    0, 1, 2, 3, 100, 304, 401, 600, 801, 999,
)  # fmt: skip
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
SECONDS = 30.0
"""How long a test waits for what must come. Nothing waits for what must not."""


class Child:
    """A process that calls the library; each call in its own thread there."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.pid = process, process.pid
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    def start(self, do: str, *arguments: Any) -> "asyncio.Future[dict[str, Any]]":
        """Make a call; the future is its answer: ``code`` and ``value``."""
        number = next(self._numbers)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"id": number, "do": do, "with": arguments}).encode() + b"\n")
        return future

    async def do(self, do: str, *arguments: Any) -> tuple[int, Any]:
        """Make a call and wait for its code and value."""
        reply = await asyncio.wait_for(self.start(do, *arguments), SECONDS)
        return reply["code"], reply["value"]

    async def code(self, do: str, *arguments: Any) -> int:
        """Make a call and wait for its code."""
        return (await self.do(do, *arguments))[0]

    async def value(self, do: str, *arguments: Any) -> Any:
        """Make a call that must succeed, and wait for its value."""
        code, value = await self.do(do, *arguments)
        assert code == SUCCESS, (do, arguments, code, value)
        return value

    async def park(self, pid: int) -> None:
        """Lock and checkpoint."""
        assert [await self.code(verb, pid) for verb in ("lock", "checkpoint")] == [SUCCESS, SUCCESS]

    async def activate(self, pid: int) -> None:
        """Restore and unlock."""
        assert [await self.code(verb, pid) for verb in ("restore", "unlock")] == [SUCCESS, SUCCESS]

    async def ended(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        return await asyncio.wait_for(self.process.wait(), SECONDS)

    async def quit(self) -> int:
        """Let it end by itself; the exit code."""
        self.process.stdin.close()
        return await self.ended()

    async def closed(self) -> None:
        """The process was stopped: nothing reads it any more."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for line in self.process.stdout:
            reply = json.loads(line)
            future = self._replies.pop(reply["id"])
            if not future.done():
                future.set_result(reply)


class Stand:
    """One made-up machine."""

    def __init__(self, stubs: Path, socket: Path, client: FakeDriverClient) -> None:
        self._stubs, self.socket, self.client = stubs, socket, client
        self.gpus: list[str] = []
        self.driver: asyncio.subprocess.Process | None = None
        self._pids: list[int] = []
        self._before: Counter[str] = Counter()
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Stand":
        self.gpus = [gpu["uuid"] for gpu in (await self.client.call("devices"))["gpus"]]
        self._before.update(await self.violations())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        with contextlib.suppress(ConnectionError):  # the test ended the daemon
            for pid in self._pids:
                await self.until_forgotten(pid)

    async def until_forgotten(self, pid: int) -> None:
        """The driver has seen that the process ended."""

        async def forgot() -> bool:
            reply = await self.client.request("get_restore_tid", pid=pid)
            return int(reply["code"]) == OS

        await until(forgot, what=f"the driver has forgotten process {pid}")

    async def child(self, **environment: str) -> Child:
        """A process that called nothing yet."""
        return await self._open.enter_async_context(self._child(environment))

    async def caller(self, **environment: str) -> Child:
        """A process as the checkpointer's helper: cuInit and no context."""
        started = await self.child(**environment)
        assert await started.code("init") == SUCCESS
        return started

    async def user(self, gib: float = 10, ordinal: int = 0, **environment: str) -> Child:
        """A process with a context and memory."""
        started = await self.child(**environment)
        assert [await started.code("init"), await started.code("retain", ordinal)] == [SUCCESS, SUCCESS]
        if gib:
            await started.value("alloc", int(gib * GIB))
        return started

    @contextlib.asynccontextmanager
    async def _child(self, environment: dict[str, str]) -> AsyncIterator[Child]:
        hidden = ("KYB_", "CUDA_VISIBLE", "NVIDIA_VISIBLE")
        mine = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        env = {**mine, "LD_LIBRARY_PATH": str(self._stubs), "KYB_FAKE_DRIVER": str(self.socket), **environment}
        pipe = asyncio.subprocess.PIPE
        script = str(Path(__file__).with_name("child.py"))
        async with daemons.process(script, stdin=pipe, stdout=pipe, env=env) as process:
            child = Child(process)
            self._pids.append(child.pid)
            try:
                yield child
            finally:
                await child.closed()

    async def used_gib(self) -> list[float]:
        """By GPU, as NVML tells it."""
        return [gpu["used_bytes"] / GIB for gpu in (await self.client.call("devices"))["gpus"]]

    async def shown(self) -> set[int]:
        """The processes that NVML shows."""
        return {entry["pid"] for entry in (await self.client.call("processes"))["processes"]}

    async def violations(self) -> dict[str, int]:
        """Since the beginning of this test, by kind."""
        report = Counter((await self.client.call("stats"))["violations"]["by_kind"])
        return dict(report - self._before)

    async def mark(self, pid: int, **marks: Any) -> None:
        """Say what a process does that the library does not know; marks of a process come from itself."""
        await self.client.call("inject", fault="mark", pid=pid, marks=marks)

    async def inject(self, fault: str, **arguments: Any) -> None:
        """Arm a fault."""
        await self.client.call("inject", fault=fault, **arguments)

    async def hangs(self, call: "asyncio.Future[dict[str, Any]]", caller: Child) -> None:
        """The call was made and its caller goes on making others, which are all answered; this one is not."""
        for _ in range(20):
            await caller.do("tid", os.getpid())
        assert not call.done()


USUAL = ("--gpus", "2", "--memory", "80GiB", "--speed", "100", "--bandwidth", "10T")
"""Two GPUs of 80 GiB; transfers take 2 ms and a little."""


@contextlib.asynccontextmanager
async def stand(stubs: Path, socket: Path) -> AsyncIterator[Stand]:
    """A clean machine of a daemon that is there; the next test finds it clean again."""
    async with await FakeDriverClient.connect(socket, wait_seconds=SECONDS) as client:
        async with Stand(stubs, socket, client) as made:
            yield made
        with contextlib.suppress(ConnectionError):  # the test ended the daemon
            await client.call("inject", fault="clear")


@contextlib.asynccontextmanager
async def own_stand(stubs: Path, folder: Path, *options: str) -> AsyncIterator[Stand]:
    """A separate machine, for what cannot be undone; ``options`` of the daemon in place of the usual ones."""
    socket = folder / "driver.sock"
    async with daemons.driver(socket, *(options or USUAL)) as driver, stand(stubs, socket) as made:
        made.driver = driver
        yield made
