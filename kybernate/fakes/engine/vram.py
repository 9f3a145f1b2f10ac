"""The engine's side of the GPUs: memory taken and given back, requests reported, work that stops while locked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from kybernate.clock import Clock
from kybernate.fakes.gpu.client import FakeDriverClient

_SLEEP_BANDWIDTH = 48e9
"""Bytes per model second of engine sleep and wake-up."""


class Vram:
    """Memory of one engine on the GPUs of its seat."""

    def __init__(self, shares: dict[str, int], residue_bytes: int, clock: Clock) -> None:
        self._shares = shares
        self._residues = split(residue_bytes, list(shares))
        self._clock = clock
        self._client: FakeDriverClient
        self._runs = asyncio.Event()
        self._runs.set()

    @classmethod
    async def connect(
        cls, socket: Path, seat: str, gpus: Sequence[str], vram_bytes: int, residue_bytes: int, clock: Clock
    ) -> Self:
        """Become a process of the driver. Raises DriverGoneError, DriverError."""
        vram = cls(split(vram_bytes, gpus), residue_bytes, clock)
        vram._client = await FakeDriverClient.connect(socket, wait_seconds=2, on_event=vram._on_event)
        await vram._client.call("attach", seat=seat, watch=True)
        return vram

    async def take(self) -> None:
        """Take all of it. Raises DriverError, e.g. when there is no room."""
        for gpu, count in self._shares.items():
            await self._client.call("alloc", gpu=gpu, bytes=count)

    async def sleep(self) -> None:
        """Give back all but the residue."""
        await self._clock.sleep(self._sleep_seconds())
        for gpu, count in self._shares.items():
            await self._client.call("free", gpu=gpu, bytes=count - self._residues[gpu])

    async def wake(self) -> None:
        """Take back what ``sleep`` gave. Raises DriverError when there is no room."""
        for gpu, count in self._shares.items():
            await self._client.call("alloc", gpu=gpu, bytes=count - self._residues[gpu])
        await self._clock.sleep(self._sleep_seconds())

    @asynccontextmanager
    async def computing(self, request: str) -> AsyncIterator[None]:
        """Compute a request inside: the driver says when it may begin, and knows its end before the caller goes on.

        Raises DriverError when the driver refuses, e.g. while the engine is asleep.
        """
        try:
            await self._client.call("begin", request=request)
            yield
        except BaseException:
            self._client.post("end", request=request)  # nobody is left who could wait for the reply
            raise
        await self._client.call("end", request=request)

    async def runs(self) -> None:
        """Wait while the process is locked: GPU work stands still then."""
        await self._runs.wait()

    async def lost(self) -> None:
        """Return when the driver is gone."""
        await self._client.wait_closed()

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def _sleep_seconds(self) -> float:
        return 0.1 + sum(self._shares.values()) / _SLEEP_BANDWIDTH

    def _on_event(self, message: dict[str, Any]) -> None:
        if message["state"] == "RUNNING":
            self._runs.set()
        else:
            self._runs.clear()


def split(total_bytes: int, gpus: Sequence[str]) -> dict[str, int]:
    """Bytes for each GPU: even, the first ones take what is left over."""
    share, rest = divmod(total_bytes, len(gpus))
    return {gpu: share + (place < rest) for place, gpu in enumerate(gpus)}
