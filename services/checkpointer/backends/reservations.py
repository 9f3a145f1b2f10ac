"""Memory reserved for parks and restores that run at the same time: host memory for copies, whole GPUs for restores.

The driver copies VRAM into ordinary memory of the process, charged to its pod's control group. Without room there the
kernel kills the pod during the checkpoint. A restore without free VRAM destroys the process. So what one job has
checked and not yet taken is reserved here, and no other job counts on it.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kybernate.cgroups import Cgroup, Cgroups, HiddenLimitsError
from kybernate.clock import wait_for
from kybernate.cuda import HOST_BYTES_PER_VRAM_BYTE
from kybernate.node.host_memory import HostMemory
from kybernate.sizes import format_bytes
from services.checkpointer.core.failures import StepFailedError

HOST = "the host"
POLL_SECONDS = 0.05


@dataclass
class Headroom:
    """Host memory for copies, and its reservations. Sizes are VRAM bytes; HOST_BYTES_PER_VRAM_BYTE is applied here."""

    host: HostMemory
    cgroups: Cgroups | None
    """For the memory limits of containers; None on a fake machine, whose copies take no memory."""
    _taken: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes that each owner has reserved and not yet taken, by place (the host, or one memory limit)."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, owner: str, cgroup: Cgroup | None, vram_bytes: int, seconds: float) -> None:
        """Reserve memory for a copy of ``vram_bytes``. If only other reservations are in the way, wait up to
        ``seconds`` (wall) for their release. Raises StepFailedError."""
        self.release(owner)
        need = round(vram_bytes * HOST_BYTES_PER_VRAM_BYTE)
        deadline = time.monotonic() + seconds
        while True:
            places = await self._places(cgroup)
            short = next(((where, free) for where, free in places.items() if free < need), None)
            if short is not None:
                raise StepFailedError(_no_room(*short, need, vram_bytes))
            crowded = next((w for w, free in places.items() if free - self.reserved_bytes(w) < need), None)
            if crowded is None:
                self._taken[owner] = dict.fromkeys(places, need)
                return
            if time.monotonic() > deadline:
                raise StepFailedError(f"{_no_room(crowded, places[crowded], need, vram_bytes)}; other parks wait too")
            self._changed.clear()
            await wait_for(self._changed, min(POLL_SECONDS, deadline - time.monotonic()))

    def copied(self, owner: str, vram_bytes: int) -> None:
        """Reduce the reservation: this much is copied, so the kernel counts it as used."""
        taken = self._taken.get(owner, {})
        for where in taken:
            taken[where] = max(0, taken[where] - round(vram_bytes * HOST_BYTES_PER_VRAM_BYTE))
        self._changed.set()

    def release(self, owner: str) -> None:
        """Drop the owner's reservation."""
        self._taken.pop(owner, None)
        self._changed.set()

    def reserved_bytes(self, where: str = HOST) -> int:
        """What is reserved at one place, the host or a memory limit, and not yet taken."""
        return sum(taken.get(where, 0) for taken in self._taken.values())

    async def _places(self, cgroup: Cgroup | None) -> dict[str, int]:
        """Free bytes by place: the host, and each memory limit above the container."""
        try:
            places = {HOST: await self.host.free_bytes()}
            if cgroup is not None and self.cgroups is not None:
                for room in self.cgroups.memory_rooms(cgroup):
                    places[f"memory limit of {room.where}"] = room.free
        except (OSError, HiddenLimitsError) as error:
            raise StepFailedError(str(error)) from error
        return places


def _no_room(where: str, free: int, need: int, vram_bytes: int) -> str:
    remedy = "add memory or park fewer seats here" if where == HOST else "raise the pod's memory limit"
    return (
        f"the copy needs {format_bytes(need)} of host memory ({HOST_BYTES_PER_VRAM_BYTE} × {format_bytes(vram_bytes)} "
        f"of VRAM) and {where} has {format_bytes(free)} free; {remedy}, or let the engine take less VRAM"
    )


@dataclass
class GpuReservations:
    """GPUs reserved for restores: each as a whole, for one owner (a seat's name), all GPUs of a seat at once.

    A reservation lasts from the check of free VRAM until the seat runs.
    """

    _owners: dict[str, str] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, owner: str, gpus: Iterable[str], seconds: float) -> None:
        """Reserve all of these GPUs; the owner may hold some. Raises StepFailedError after ``seconds`` (wall)."""
        wanted, deadline = frozenset(gpus), time.monotonic() + seconds
        while others := {self._owners[gpu] for gpu in wanted if self._owners.get(gpu, owner) != owner}:
            self._freed.clear()
            if not await wait_for(self._freed, deadline - time.monotonic()):
                raise StepFailedError(f"{', '.join(sorted(wanted))}: {', '.join(sorted(others))} restores there")
        self._owners.update(dict.fromkeys(wanted, owner))

    def release(self, owner: str) -> None:
        """Release all GPUs of ``owner``."""
        self._owners = {gpu: holder for gpu, holder in self._owners.items() if holder != owner}
        self._freed.set()

    def holds(self, owner: str, gpus: Iterable[str]) -> bool:
        """True if all of these GPUs are reserved for ``owner``."""
        return all(self._owners.get(gpu) == owner for gpu in gpus)
