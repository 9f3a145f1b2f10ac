"""What can be read of a machine's GPUs, whoever tells it."""

from typing import Protocol

from kybernate.machine import Gpu, GpuEvent, GpuProcess, Link


class GpuError(Exception):
    """The GPUs cannot be read; the text says what failed and what to do."""


class Gpus(Protocol):
    """What is read of GPUs. Each call may raise GpuError; one GPU that cannot be read is left out of the answers."""

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order."""
        ...

    async def instances(self) -> tuple[Gpu, ...]:
        """The MIG instances of the GPUs in MIG mode, in the order of GPUs and of the driver."""
        ...

    async def links(self) -> tuple[Link, ...]:
        """How GPUs reach each other; every pair of ``list`` once."""
        ...

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID, MIG instances included."""
        ...

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a context on a GPU or MIG instance."""
        ...

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """What XID events came since the call before; waits for the first, at most so long (wall time), then none.

        The first call begins to listen. One caller at a time. A cancelled call loses no event.
        """
        ...

    async def close(self) -> None:
        """Let go of the library or the connection."""
        ...
