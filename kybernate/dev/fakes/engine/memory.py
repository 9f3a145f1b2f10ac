"""An engine's memory on the GPUs of its seat: by the fake driver's socket, or through ``libcuda.so.1`` as on a GPU."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.libcuda import CudaError, Libcuda
from kybernate.dev.fakes.gpu.client import DriverError, FakeDriverClient
from kybernate.dev.fakes.gpu.sync_client import start_cuda_thread

T = TypeVar("T")


class Memory(Protocol):
    """Memory on the GPUs of one seat. Calls wait while the process is locked or parked."""

    @property
    def gpus(self) -> Sequence[str]:
        """A name for each GPU."""
        ...

    async def alloc(self, gpu: str, count: int) -> None:
        """Take a block of so many bytes. Raises DriverError or CudaError, e.g. when there is no room."""
        ...

    async def free(self, gpu: str, count: int) -> None:
        """Give back the block of this size."""
        ...

    async def runs(self) -> None:
        """Wait while GPU work stands still."""
        ...


class DriverMemory:
    """Memory by calls of the fake driver, which says itself when the process is locked."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.gpus = gpus
        self._runs = asyncio.Event()
        self._runs.set()
        self.client: FakeDriverClient
        """Set before the first call."""

    async def alloc(self, gpu: str, count: int) -> None:
        """Take bytes."""
        await self.client.call("alloc", gpu=gpu, bytes=count)

    async def free(self, gpu: str, count: int) -> None:
        """Give bytes back."""
        await self.client.call("free", gpu=gpu, bytes=count)

    async def runs(self) -> None:
        """Until the driver says RUNNING."""
        await self._runs.wait()

    def on_event(self, message: dict[str, Any]) -> None:
        """What the driver says unasked: the process' new state."""
        if message["state"] == "RUNNING":
            self._runs.set()
        else:
            self._runs.clear()


class CudaMemory:
    """Memory through the CUDA driver. One thread makes all calls; it may block for as long as the process is parked.

    The thread is a daemon: a process that is asked to end while parked must not wait for it.
    """

    def __init__(self, cuda: Libcuda, calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
        self.gpus = [str(device) for device in range(cuda.devices)]
        self._cuda = cuda
        self._calls = calls
        self._blocks: dict[tuple[str, int], list[int]] = {}
        """Addresses by GPU and size."""
        self._look: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls) -> Self:
        """Make a context on each visible GPU. Raises CudaError."""
        calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                calls.get()()

        threading.Thread(target=work, name="cuda", daemon=True).start()
        return cls(await _done_by(calls, Libcuda), calls)

    async def alloc(self, gpu: str, count: int) -> None:
        """Take a block."""
        address = await self._do(lambda: self._cuda.alloc(int(gpu), count))
        self._blocks.setdefault((gpu, count), []).append(address)

    async def free(self, gpu: str, count: int) -> None:
        """Give a block back."""
        address = self._blocks[gpu, count].pop()
        await self._do(lambda: self._cuda.free(int(gpu), address))

    async def runs(self) -> None:
        """Some work on each GPU, and its end. All who wait at a time share one look."""
        if self._look is None or self._look.done():
            places = {int(gpu): addresses[0] for (gpu, _), addresses in self._blocks.items() if addresses}
            self._look = self._do(lambda: self._work(places))
        await asyncio.shield(self._look)

    def _work(self, places: Mapping[int, int]) -> None:
        """A write before the synchronize: it waits while the process is parked, where a synchronize would crash."""
        for device, address in places.items():
            self._cuda.write(device, address, bytes(4))
        for device in places:
            self._cuda.synchronize(device)

    def _do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return _done_by(self._calls, work)


def _done_by(calls: "queue.SimpleQueue[Callable[[], None]]", work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of work that the thread behind ``calls`` does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # it is raised where the result is awaited
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    calls.put(run)
    return future


_SLEEP_BANDWIDTH = 48e9
"""Bytes per model second of engine sleep and wake-up."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)
"""Memory that engine sleep gives back; each is half of it."""


class Vram:
    """Memory of one engine on the GPUs of its seat. Each GPU has three blocks: what engine sleep leaves, and the two
    ``PARTS`` that it gives back."""

    def __init__(
        self, memory: Memory, driver: FakeDriverClient | None, vram_bytes: int, residue_bytes: int, clock: Clock
    ) -> None:
        self._memory = memory
        self._driver = driver
        """Who counts what is computed; None on a real GPU."""
        rest = vram_bytes - residue_bytes
        self._residues = split(residue_bytes, memory.gpus)
        self._parts = {WEIGHTS: split(rest - rest // 2, memory.gpus), KV_CACHE: split(rest // 2, memory.gpus)}
        self.given: set[str] = set()
        """Parts that are given back."""
        self._clock = clock

    @classmethod
    async def connect(
        cls,
        socket: Path,
        seat: str,
        gpus: Sequence[str],
        vram_bytes: int,
        residue_bytes: int,
        clock: Clock,
        device_nodes: Sequence[str] = (),
    ) -> Self:
        """Become a process of the fake driver. ``device_nodes``: GPUs that its container was given; none: nothing says.

        Raises DriverGoneError, DriverError.
        """
        memory = DriverMemory(gpus)
        memory.client = await FakeDriverClient.connect(socket, wait_seconds=2, on_event=memory.on_event)
        await memory.client.call("attach", seat=seat, watch=True, device_nodes=list(device_nodes) or None)
        start_cuda_thread()
        return cls(memory, memory.client, vram_bytes, residue_bytes, clock)

    @classmethod
    async def open_cuda(cls, socket: Path | None, vram_bytes: int, residue_bytes: int, clock: Clock) -> Self:
        """Become a CUDA process on the visible GPUs; ``socket``: the fake driver that counts requests, if any.

        Raises CudaError, DriverGoneError.
        """
        memory = await CudaMemory.open()
        driver = None if socket is None else await FakeDriverClient.connect(socket, wait_seconds=2)
        return cls(memory, driver, vram_bytes, residue_bytes, clock)

    async def take(self) -> None:
        """Take all of it. Raises DriverError or CudaError, e.g. when there is no room."""
        for gpu, count in self._residues.items():
            if count:
                await self._memory.alloc(gpu, count)
        await self._alloc(PARTS)

    async def give(self, parts: Iterable[str]) -> None:
        """Give parts back."""
        parts = [part for part in parts if part not in self.given]
        await asyncio.sleep(self._clock.to_wall(self._seconds(parts)))
        for part in parts:
            self.given.add(part)
            for gpu, count in self._parts[part].items():
                if count:
                    await self._memory.free(gpu, count)

    async def take_back(self, parts: Iterable[str]) -> None:
        """Take back parts that were given, all or none. Raises DriverError or CudaError when there is no room."""
        parts = [part for part in parts if part in self.given]
        await self._alloc(parts)
        self.given.difference_update(parts)
        await asyncio.sleep(self._clock.to_wall(self._seconds(parts)))

    @asynccontextmanager
    async def computing(self, request: str) -> AsyncIterator[None]:
        """Compute a request inside: the driver says when it may begin, and knows its end before the caller goes on.

        Raises DriverError when the driver refuses, e.g. while the engine is asleep.
        """
        if self._driver is None:
            yield
            return
        try:
            await self._driver.call("begin", request=request)
            yield
        except BaseException:
            self._driver.post("end", request=request)  # no caller is left to wait for the reply
            raise
        await self._driver.call("end", request=request)

    async def runs(self) -> None:
        """Wait while the process is locked: GPU work stands still then."""
        await self._memory.runs()

    async def lost(self) -> None:
        """Return when the driver is gone."""
        if self._driver is None:
            await asyncio.Event().wait()
        else:
            await self._driver.wait_closed()

    async def close(self) -> None:
        """Close the connection."""
        if self._driver is not None:
            await self._driver.close()

    async def _alloc(self, parts: Iterable[str]) -> None:
        taken: list[tuple[str, int]] = []
        try:
            for gpu, count in (block for part in parts for block in self._parts[part].items() if block[1]):
                await self._memory.alloc(gpu, count)
                taken.append((gpu, count))
        except (CudaError, DriverError):
            for gpu, count in taken:
                await self._memory.free(gpu, count)
            raise

    def _seconds(self, parts: Iterable[str]) -> float:
        return 0.1 + sum(sum(self._parts[part].values()) for part in parts) / _SLEEP_BANDWIDTH


def split(total_bytes: int, gpus: Sequence[str]) -> dict[str, int]:
    """Bytes for each GPU: even, the first ones take what is left over."""
    share, rest = divmod(total_bytes, len(gpus))
    return {gpu: share + (place < rest) for place, gpu in enumerate(gpus)}
