"""Who may restore on which GPU: one owner at a time, from the look at the room until the seat runs.

Evidence of room is worth nothing if somebody else's restore takes that room a moment later, and a restore without room
destroys the process. A GPU is reserved as a whole, all GPUs of a seat in one step or none.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field


class ReservedError(Exception):
    """Somebody else kept the GPUs for too long."""


@dataclass
class Reservations:
    """GPUs and their owners. Owners are named by whoever restores (seat and job)."""

    _owners: dict[str, str] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, owner: str, gpus: Iterable[str], seconds: float) -> None:
        """All of these GPUs for ``owner``; it may have some already. Raises ReservedError after ``seconds`` (wall)."""
        wanted = frozenset(gpus)
        try:
            async with asyncio.timeout(seconds):
                while others := self._others(owner, wanted):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise ReservedError(f"{', '.join(sorted(wanted))}: {', '.join(others)} restores there") from None
        self._owners.update(dict.fromkeys(wanted, owner))

    def release(self, owner: str) -> None:
        """Give back whatever ``owner`` has."""
        self._owners = {gpu: holder for gpu, holder in self._owners.items() if holder != owner}
        self._freed.set()

    def holds(self, owner: str, gpus: Iterable[str]) -> bool:
        """Whether all of these GPUs are reserved for ``owner``."""
        return all(self._owners.get(gpu) == owner for gpu in gpus)

    def _others(self, owner: str, gpus: frozenset[str]) -> list[str]:
        return sorted({self._owners[gpu] for gpu in gpus if self._owners.get(gpu, owner) != owner})
