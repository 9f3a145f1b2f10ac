"""Parking by a restart of the engine: the floor for engines that nothing else can park.

A park ends the processes of the container and proves that their VRAM is free: no copy, no residue, no rule to refuse
it. ``kyb-run`` starts the engine again, or without it kubelet the container; the start gate holds it until the manager
gives a ticket: the activation is a cold start, whose time the manager learns as that of any start.
"""

from dataclasses import dataclass

from services.checkpointer.backends.driver import Backend
from services.checkpointer.backends.port import Ending, Note, SeatProcesses
from services.checkpointer.core.failures import JobGoal, StepFailedError


@dataclass
class RestartBackend(Backend):
    """Ends containers."""

    keeps_processes = False

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        """Nothing: the proof after a kill needs no baseline."""
        return seat

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """End the container; ``parked`` once its memory is proven free, ``gone`` if it had ended by itself."""
        ending = await self._half(seat, note).run(JobGoal.DEAD)
        if ending.outcome == "lost":
            ending.outcome, ending.reason = "parked", ""
        return ending

    async def activate(self, seat: SeatProcesses, _: Note) -> Ending:
        """Nothing to bring back: a container that runs is active, and one that was parked starts at its gate."""
        return await self.state(seat)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """Finish a park: what a crash left is ended, and what it ended counts as parked."""
        if intent is JobGoal.ACTIVE:
            return await self.activate(seat, note)
        ending = await self.park(seat, note)
        if ending.outcome == "gone":
            ending.outcome, ending.reason = "parked", ""
        return ending

    async def state(self, seat: SeatProcesses) -> Ending:
        """``active`` with the GPUs that it uses while a process of the container lives, else ``gone``."""
        try:
            if not await self.living(seat):
                return Ending("gone", vram_bytes=seat.vram_bytes)
            return await self.located(seat, Ending("active", vram_bytes=seat.vram_bytes))
        except StepFailedError as error:
            return Ending("quarantined", f"the seat's memory cannot be read: {error.text}")
