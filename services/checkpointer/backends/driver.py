"""Parking through the CUDA checkpoint API.

Which driver answers is the helper's matter (the fake daemon or libcuda behind the same verbs); everything else is the
same. The steps are in ``half``, what is looked for in ``discovery``, what is proven in ``evidence``.
"""

import contextlib
from dataclasses import dataclass, field

from kybernate.cgroups import HiddenProcessesError
from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError
from services.checkpointer.backends.evidence import Discovery, Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.job_half import JobHalf
from services.checkpointer.backends.port import Capabilities, Ending, Note, SeatProcesses
from services.checkpointer.containers import UnknownContainerError
from services.checkpointer.failures import JobGoal, ProcessState


@dataclass
class DriverBackend:
    """Parks and activates by the checkpoint API of whichever driver the helper speaks to."""

    calls: DriverCalls
    host: Host
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

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """Processes of the container that the driver knows, with their bytes. One retry after a hang."""
        return await Discovery(self.calls, self.host).find(target, group, epoch)

    def container(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The container's processes only; asks no driver."""
        try:
            found = self.host.container(target)
        except (UnknownContainerError, HiddenProcessesError):
            found = None
        root = None if found is None else found.root
        return SeatProcesses(target=target, group=group, epoch=epoch, root=root, members=())

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        """Read what is in use before the park, so that the fall can be proven. Unknown stays empty, as does that of a
        seat that is parked already: nothing will fall."""
        if seat.parked_on and any(self.host.freezer.stopped(member.who) for member in seat.members):
            return seat
        try:
            return seat.model_copy(update={"baseline": await self.evidence.baseline(seat)})
        except StepFailedError:
            return seat

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """Check, make sure of host memory, lock all, checkpoint each, prove, freeze."""
        return await self._half(seat, note).run(JobGoal.PARKED)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """Make sure of room, thaw, restore all, unlock all, verify."""
        return await self._half(seat, note).run(JobGoal.ACTIVE)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """After a crash: decide from the states where to go, and go there."""
        return await self._half(seat, note).run(intent, replaying=True)

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        """Lock and checkpoint what lets us, kill the container's processes, prove that the memory is free."""
        ending = await self._half(seat, note).run(JobGoal.DEAD)
        if ending.outcome == "lost":  # killed as asked: no process is left
            ending.outcome = "gone"
        return ending

    async def state(self, seat: SeatProcesses) -> Ending:
        """What the processes do now; asks the driver only about those that are not frozen."""
        try:
            states, _ = await Discovery(self.calls, self.host).observe(seat, "ask")
            for index, member in enumerate(seat.members):
                if states[index] is ProcessState.UNKNOWN:
                    states[index] = await self.calls.state("ask", member, quick=True)
            uses = [use for use in await self.calls.processes("ask") if use.holds]
        except StepFailedError as error:
            return Ending("quarantined", f"the driver does not say what the seat does: {error.text}")
        seen, listed = set(states), {use.pid for use in uses}
        pids = {member.who.pid for member in seat.members}
        ending = Ending("lost", "its processes are " + ", ".join(sorted(seen)), vram_bytes=seat.vram_bytes)
        passing = (
            ProcessState.GONE if not seat.parked_on else None
        )  # found running a moment ago: engines have short-lived ones
        if seen - {passing} == {ProcessState.RUNNING}:
            ending.outcome, ending.reason = "active", ""
            ending.gpus = tuple(sorted({use.gpu for use in uses if use.pid in pids}))
        elif seen == {ProcessState.CHECKPOINTED} and not listed & pids:
            ending.outcome, ending.reason, ending.host_bytes = "parked", "", seat.vram_bytes
            ending.gpus = seat.memory_on
        elif seen <= {ProcessState.GONE} and not self.host.living(seat):
            ending.outcome, ending.reason = "gone", ""
        return ending

    async def thaw(self, seat: SeatProcesses) -> None:
        """Every process of the seat may run on; waits for nothing."""
        with contextlib.suppress(StepFailedError):  # its processes cannot be seen from here, so nobody froze them
            self.host.freezer.release(self.host.cgroup(seat), lambda: self.host.living(seat))

    def _half(self, seat: SeatProcesses, note: Note) -> JobHalf:
        return JobHalf(seat, note, self.calls, self.host, self.evidence)
