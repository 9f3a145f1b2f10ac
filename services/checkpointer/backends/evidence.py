"""What is proven before a seat counts as parked or running, and before anything is restored. Reads only."""

import asyncio
import time
from dataclasses import dataclass

from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError, Use, unaccounted
from services.checkpointer.backends.port import Unit
from services.checkpointer.failures import Seen, Trouble
from services.checkpointer.freezer import Freezer

FREED_SHARE = 0.9
"""Park evidence: memory in use must have fallen by this share of the footprint (research/checkpoint.md §7)."""
POLL_SECONDS = 0.01
UNKNOWN_FOOTPRINT_IDLE_SHARE = 0.05
"""A seat whose footprint nobody knows is only restored on GPUs that are as good as empty."""


@dataclass
class Evidence:
    """Proofs about units. Every one raises StepFailedError saying what speaks against it."""

    calls: DriverCalls
    freezer: Freezer
    margin_bytes: int = 0
    """Free memory wanted beyond the footprint before a restore beside other processes."""

    async def baseline(self, unit: Unit) -> dict[str, int]:
        """Before a park: what must fall. Never less than the seat's own memory, whoever came or went meanwhile."""
        now = _not_others(unit, *await self.calls.usage(unit.group, unit.at))
        return {gpu: max(size, now.get(gpu, 0)) for gpu, size in unit.footprint.items()}

    async def verify(self, unit: Unit) -> None:
        """Every process runs."""
        for member in unit.members:
            state = await self.calls.state(unit.group, member)
            if state is not Seen.RUNNING:
                raise StepFailedError(Trouble.REFUSED, f"pid {member.who.pid} is {state} and not RUNNING")

    async def prove(self, unit: Unit) -> None:
        """All checkpointed, none listed, memory fell. Waits a little: real drivers show it late.

        A stopped process is not asked (that hangs); we stop only what is checkpointed, and the list speaks for it.
        """
        for member in unit.members:
            if self.freezer.stopped(member.who):
                continue
            state = await self.calls.state(unit.group, member)
            if state is not Seen.CHECKPOINTED:
                raise StepFailedError(Trouble.REFUSED, f"pid {member.who.pid} is {state} and not CHECKPOINTED")
        deadline = time.monotonic() + self.calls.patience.settle()
        while missing := await self._missing_evidence(unit):
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, missing)
            await asyncio.sleep(POLL_SECONDS)

    async def _missing_evidence(self, unit: Unit) -> str:
        """What still speaks against the memory being free; empty when nothing does."""
        uses, memory = await self.calls.usage(unit.group, unit.reach)
        listed = {use.pid for use in uses if use.holds}
        still = sorted(listed & {member.who.pid for member in unit.members})
        if still:
            return f"the driver still lists {still} as using GPU memory"
        if not unit.baseline:
            return ""
        now = _not_others(unit, uses, memory)
        for gpu, size in unit.footprint.items():
            fell = unit.baseline.get(gpu, 0) - now.get(gpu, 0)
            if fell < FREED_SHARE * size:
                return f"memory in use on {gpu} fell by {fell} of {size} bytes"
        return ""

    async def make_sure_of_room(self, unit: Unit, states: list[Seen]) -> None:
        """Free memory on each GPU for all that is still checkpointed: a restore without room destroys the process."""
        need = room_needed(unit, states)
        deadline = time.monotonic() + self.calls.patience.settle()
        while missing := await self._missing_room(unit, need):
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, missing)
            await asyncio.sleep(POLL_SECONDS)

    async def _missing_room(self, unit: Unit, need: dict[str, int]) -> str:
        """The margin is for what other processes take meanwhile. Without others it would only keep a seat that fills
        its GPU from ever coming back."""
        ours = {member.who.pid for member in unit.members}
        if self.margin_bytes:
            uses, memory = await self.calls.usage(unit.group, need)
        else:
            uses, memory = [], await self.calls.memory(unit.group, need)
        shared = {use.gpu for use in uses if use.pid not in ours and use.holds}
        for gpu, size in need.items():
            used, total = memory.get(gpu, (0, 0))
            wanted = size + (self.margin_bytes if gpu in shared else 0)
            if size == 0 and used > total * UNKNOWN_FOOTPRINT_IDLE_SHARE:
                return f"{gpu} has {used} bytes in use, and nobody knows how much the seat needs"
            if total - used < wanted:
                return f"{gpu} has {total - used} bytes free and the seat needs {wanted}"
        return ""


def _not_others(unit: Unit, uses: list[Use], memory: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Bytes in use on each GPU of the unit, without those of processes outside it."""
    left = unaccounted(uses, memory, {member.who.pid for member in unit.members})
    return {gpu: left.get(gpu, 0) for gpu in unit.footprint}


def room_needed(unit: Unit, states: list[Seen]) -> dict[str, int]:
    """Bytes by GPU that the restore of all that is checkpointed will take, where it will be restored."""
    need: dict[str, int] = {}
    for member, state in zip(unit.members, states, strict=True):
        if state is Seen.CHECKPOINTED:
            for gpu, size in member.gpu_bytes.items():
                new = unit.moves.get(gpu, gpu)
                need[new] = need.get(new, 0) + size
    if not need:
        share = unit.target.vram_bytes // max(1, len(unit.target.gpus))
        need = dict.fromkeys(unit.target.gpus, share)
    return need
