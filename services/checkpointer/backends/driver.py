"""Parking through the CUDA checkpoint API.

Which driver answers is the helper's matter (the fake daemon or libcuda behind the same verbs); everything else is the
same. The steps are in ``half``, what is looked for in ``discovery``, what is proven in ``evidence``.
"""

import contextlib
from dataclasses import dataclass, field

from kybernate.cgroups import HiddenProcessesError
from kybernate.messages import SeatTarget
from services.checkpointer.backends.discovery import Discovery
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.half import Half
from services.checkpointer.backends.port import Capabilities, Ending, Note, Unit
from services.checkpointer.backends.site import Site
from services.checkpointer.containers import UnknownContainerError
from services.checkpointer.failures import Goal, Seen


@dataclass
class DriverBackend:
    """Parks and activates by the checkpoint API of whichever driver the helper speaks to."""

    calls: DriverCalls
    site: Site
    evidence: Evidence
    capabilities: Capabilities = field(
        default=Capabilities(
            frees_all_vram=True, needs_host_ram=True, migrates=True, multi_process=True, needs_cooperation=False
        )
    )

    async def probe(self) -> str | None:
        """None when the driver answers and can checkpoint, else why not."""
        try:
            driver = await self.calls.describe("ask", anew=True)
            await self.calls.memory("ask")
        except StepFailedError as error:
            return error.text
        return None if driver.checkpoint else f"driver {driver.version} has no checkpoint API; install 570 or newer"

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> Unit:
        """Processes of the container that the driver knows, with their bytes. One retry after a hang."""
        return await Discovery(self.calls, self.site).find(target, group, epoch)

    def container(self, target: SeatTarget, group: str, epoch: int) -> Unit:
        """The container's processes only; asks no driver."""
        try:
            found = self.site.container(target)
        except (UnknownContainerError, HiddenProcessesError):
            found = None
        root = None if found is None else found.root
        return Unit(target=target, group=group, epoch=epoch, root=root, members=())

    async def prepare(self, unit: Unit) -> Unit:
        """Read what is in use before the park, so that the fall can be proven. Unknown stays empty, as does that of a
        seat that is parked already: nothing will fall."""
        if unit.parked_on and any(self.site.freezer.stopped(member.who) for member in unit.members):
            return unit
        try:
            return unit.model_copy(update={"baseline": await self.evidence.baseline(unit)})
        except StepFailedError:
            return unit

    async def park(self, unit: Unit, note: Note) -> Ending:
        """Check, make sure of host memory, lock all, checkpoint each, prove, freeze."""
        return await self._half(unit, note).run(Goal.PARKED)

    async def activate(self, unit: Unit, note: Note) -> Ending:
        """Make sure of room, thaw, restore all, unlock all, verify."""
        return await self._half(unit, note).run(Goal.ACTIVE)

    async def replay(self, unit: Unit, intent: Goal, note: Note) -> Ending:
        """After a crash: decide from the states where to go, and go there."""
        return await self._half(unit, note).run(intent, replaying=True)

    async def kill(self, unit: Unit, note: Note) -> Ending:
        """Lock and checkpoint what lets us, kill the container's processes, prove that the memory is free."""
        ending = await self._half(unit, note).run(Goal.DEAD)
        if ending.outcome == "lost":  # killed as asked: no process is left
            ending.outcome = "gone"
        return ending

    async def state(self, unit: Unit) -> Ending:
        """What the processes do now; asks the driver only about those that are not frozen."""
        try:
            states, _ = await Discovery(self.calls, self.site).observe(unit, "ask")
            for index, member in enumerate(unit.members):
                if states[index] is Seen.UNKNOWN:
                    states[index] = await self.calls.state("ask", member, quick=True)
            uses = [use for use in await self.calls.processes("ask") if use.holds]
        except StepFailedError as error:
            return Ending("quarantined", f"the driver does not say what the seat does: {error.text}")
        seen, listed = set(states), {use.pid for use in uses}
        pids = {member.who.pid for member in unit.members}
        ending = Ending("lost", "its processes are " + ", ".join(sorted(seen)), vram_bytes=unit.vram_bytes)
        passing = Seen.GONE if not unit.parked_on else None  # found running a moment ago: engines have short-lived ones
        if seen - {passing} == {Seen.RUNNING}:
            ending.outcome, ending.reason = "active", ""
            ending.gpus = tuple(sorted({use.gpu for use in uses if use.pid in pids}))
        elif seen == {Seen.CHECKPOINTED} and not listed & pids:
            ending.outcome, ending.reason, ending.host_bytes = "parked", "", unit.vram_bytes
            ending.gpus = unit.memory_on
        elif seen <= {Seen.GONE} and not self.site.living(unit):
            ending.outcome, ending.reason = "gone", ""
        return ending

    async def thaw(self, unit: Unit) -> None:
        """Every process of the seat may run on; waits for nothing."""
        with contextlib.suppress(StepFailedError):  # its processes cannot be seen from here, so nobody froze them
            self.site.freezer.release(self.site.cgroup(unit), lambda: self.site.living(unit))

    def _half(self, unit: Unit, note: Note) -> Half:
        return Half(unit, note, self.calls, self.site, self.evidence)
