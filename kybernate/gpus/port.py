"""The interface through which services read a machine's GPUs."""

from typing import Protocol

from kybernate.machine import Gpu, GpuEvent, GpuProcess, GpuSensors, Link


class GpuError(Exception):
    """The GPUs cannot be read; the text says what failed and what to do."""


class Gpus(Protocol):
    """Readings of all GPUs. Each call may raise GpuError; a GPU that cannot be read is left out of the results."""

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order."""

    async def instances(self) -> tuple[Gpu, ...]:
        """The MIG instances of the GPUs in MIG mode, in the order of GPUs and of the driver."""

    async def links(self) -> tuple[Link, ...]:
        """The connection of every pair of GPUs, each pair once."""

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context on a GPU or MIG instance."""

    async def sensors(self) -> tuple[GpuSensors, ...]:
        """Temperature, power and utilisation of each GPU."""

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """XID events since the previous call; waits for the first up to ``timeout_seconds`` (wall time).

        The first call subscribes. One caller at a time. A cancelled call loses no event.
        """

    async def close(self) -> None:
        """Close the library or the connection."""
