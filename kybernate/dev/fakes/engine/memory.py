"""Where an engine's memory comes from: straight from the fake GPU driver, or through ``libcuda.so.1`` as on a GPU."""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from kybernate.dev.fakes.engine.libcuda import Libcuda
from kybernate.dev.fakes.gpu.client import FakeDriverClient

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

    The thread is a daemon: a process that is told to end while parked must not wait for it.
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
