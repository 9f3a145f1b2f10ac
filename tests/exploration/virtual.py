"""Virtual time for real shells, and a ledger and a client of the bus that fail in it."""

import asyncio
import errno
import selectors
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast
from unittest import mock

from kybernate.bus.port import Bucket, NoAnswerError
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from services.gpu_manager.ledger import Ledger, LedgerFile

Result = TypeVar("Result")

# --- virtual time -----------------------------------------------------------------------------------------------------


class VirtualTime(selectors.DefaultSelector):
    """The clock of a run. It moves on when the event loop would wait, unless a thread is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0.002 if self.working else 0)
        if not ready and not self.working and timeout is not None:
            self.now += timeout
        return ready if ready or timeout is not None or self.working else super().select(1.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which stands still while a thread of ``asyncio.to_thread`` works."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__(clock)
        self._virtual = clock

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Count the thread, also one whose task was cancelled, and the way of its result into the loop. Other
        executors count by themselves."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)

        def over(_: object = None) -> None:
            self._virtual.working -= 1

        def work() -> Any:
            try:
                return func(*args)
            finally:
                self.call_soon_threadsafe(over)

        self._virtual.working += 2
        result = super().run_in_executor(executor, work)
        result.add_done_callback(over)
        return result


def run(work: Callable[[VirtualTime], Coroutine[Any, Any, Result]]) -> Result:
    """Run on a loop in virtual time; ``time.monotonic`` and ``time.time`` show it, too."""
    clock = VirtualTime()

    def monotonic() -> float:
        return clock.now

    def unix() -> float:
        return 1.8e9 + clock.now

    with (
        mock.patch.object(time, "monotonic", monotonic),
        mock.patch.object(time, "time", unix),
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        return runner.run(work(clock))


# --- what goes wrong --------------------------------------------------------------------------------------------------


class FaultyLedger(LedgerFile):
    """A ledger on a disk that hangs or is full. ``trouble``: of the next write, slow and failing."""

    def __init__(self, path: Path, clock: VirtualTime) -> None:
        super().__init__(path)
        self._clock = clock
        self.slow = self.fails = False

    def write(self, ledger: Ledger, *, durable: bool) -> None:
        """Write in a thread, as the manager does."""
        slow, fails, self.slow, self.fails = self.slow, self.fails, False, False
        self._clock.working += 1
        try:
            if slow:
                _rest(0.02)  # longer than the manager's loop waits for it
                self._clock.now += 6.0
            if fails:
                self.close()
                raise OSError(errno.ENOSPC, "no space left")
            super().write(ledger, durable=durable)
        finally:
            self._clock.working -= 1


_rest = time.sleep


class CutBus(MemoryBus):
    """A client whose nats-server may have lost its routes, and whose puts may take long."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.parted = False
        self.put_seconds = 0.0
        self.lose_answer = False
        self.check: Callable[[Message], None] = lambda _: None

    async def publish(self, message: Message) -> None:
        self.check(message)
        if not self.parted:
            await super().publish(message)

    async def request(self, message: Message, reply: type[Any], *, timeout: float) -> Any:
        if self.parted:
            await asyncio.sleep(timeout)
            raise NoAnswerError("cut off")
        return await super().request(message, reply, timeout=timeout)

    async def bucket(self, name: str) -> Bucket:
        await self._led()
        return cast(Bucket, _CutBucket(self, await super().bucket(name)))

    async def _led(self) -> None:
        if self.parted:
            await asyncio.sleep(5.0)
            raise NoAnswerError("no leader")


class _CutBucket:
    def __init__(self, bus: CutBus, bucket: Bucket) -> None:
        self._bus, self._bucket = bus, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def put(self, key: str, value: bytes) -> int:
        await asyncio.sleep(self._bus.put_seconds)
        await self._bus._led()
        revision = await self._bucket.put(key, value)
        if self._bus.lose_answer:
            self._bus.lose_answer = False
            raise NoAnswerError("the answer was lost")
        return revision

    async def entries(self, node: str = "") -> Any:
        await self._bus._led()
        return await self._bucket.entries(node)


# --- a run ----------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """The manager was killed."""


async def until_killed(killed: asyncio.Event) -> NoReturn:
    """A task of a process that ends with it."""
    killed.clear()
    await killed.wait()
    raise KilledError


def search(explore: Callable[[int, Path], object], runs: int, folder: Path) -> None:
    """Explore with the seeds below ``runs``, each in its own folder. Raises ViolationError."""
    for seed in range(runs):
        (folder / str(seed)).mkdir()
        explore(seed, folder / str(seed))
