"""The engine's side of the GPUs: memory taken and given back, requests reported, work that stops while locked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.memory import CudaMemory, DriverMemory, Memory
from kybernate.dev.fakes.gpu.client import FakeDriverClient

_SLEEP_BANDWIDTH = 48e9
"""Bytes per model second of engine sleep and wake-up."""


class Vram:
    """Memory of one engine on the GPUs of its seat. Each GPU has two blocks: what engine sleep leaves, and the rest."""

    def __init__(
        self, memory: Memory, driver: FakeDriverClient | None, vram_bytes: int, residue_bytes: int, clock: Clock
    ) -> None:
        self._memory = memory
        self._driver = driver
        """Who counts what is computed; None on a real GPU."""
        self._shares = split(vram_bytes, memory.gpus)
        self._residues = split(residue_bytes, memory.gpus)
        self._clock = clock
        self.freezable = False
        """Requests may be frozen with the process; the driver is told so."""

    @classmethod
    async def connect(
        cls, socket: Path, seat: str, gpus: Sequence[str], vram_bytes: int, residue_bytes: int, clock: Clock
    ) -> Self:
        """Become a process of the fake driver. Raises DriverGoneError, DriverError."""
        memory = DriverMemory(gpus)
        memory.client = await FakeDriverClient.connect(socket, wait_seconds=2, on_event=memory.on_event)
        await memory.client.call("attach", seat=seat, watch=True)
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
        await self._take_rest()

    async def sleep(self) -> None:
        """Give back all but the residue."""
        await self._clock.sleep(self._sleep_seconds())
        for gpu, count in self._rest().items():
            await self._memory.free(gpu, count)

    async def wake(self) -> None:
        """Take back what ``sleep`` gave. Raises DriverError or CudaError when there is no room."""
        await self._take_rest()
        await self._clock.sleep(self._sleep_seconds())

    @asynccontextmanager
    async def computing(self, request: str) -> AsyncIterator[None]:
        """Compute a request inside: the driver says when it may begin, and knows its end before the caller goes on.

        Raises DriverError when the driver refuses, e.g. while the engine is asleep.
        """
        if self._driver is None:
            yield
            return
        try:
            await self._driver.call("begin", request=request, freezable=self.freezable)
            yield
        except BaseException:
            self._driver.post("end", request=request)  # nobody is left who could wait for the reply
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

    async def _take_rest(self) -> None:
        for gpu, count in self._rest().items():
            await self._memory.alloc(gpu, count)

    def _rest(self) -> dict[str, int]:
        rest = {gpu: count - self._residues[gpu] for gpu, count in self._shares.items()}
        return {gpu: count for gpu, count in rest.items() if count > 0}

    def _sleep_seconds(self) -> float:
        return 0.1 + sum(self._shares.values()) / _SLEEP_BANDWIDTH


def split(total_bytes: int, gpus: Sequence[str]) -> dict[str, int]:
    """Bytes for each GPU: even, the first ones take what is left over."""
    share, rest = divmod(total_bytes, len(gpus))
    return {gpu: share + (place < rest) for place, gpu in enumerate(gpus)}
