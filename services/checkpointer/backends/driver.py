"""Parking through the CUDA checkpoint API.

The helper decides which driver answers (libcuda, or the fake daemon behind the same verbs). ``job_half`` runs the
steps, ``evidence`` finds the processes and proves the results.
"""

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import DriverCalls
from services.checkpointer.backends.evidence import Discovery, Evidence, unseen
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.job_half import JobHalf
from services.checkpointer.backends.port import Ending, NoMemberError, NoProcessError, Note, SeatProcesses
from services.checkpointer.core.failures import JobGoal, ProcessState, StepFailedError
from services.checkpointer.core.refusals import DriverInfo, kill_hangs


@dataclass
class Backend(ABC):
    """A way of parking: the CUDA driver, an engine's sleep mode … A failure of driver or process is an ``Ending``."""

    calls: DriverCalls
    host: Host
    evidence: Evidence
    keeps_processes: ClassVar[bool] = True
    """True if the processes of a parked seat live on, and are to be remembered."""
    moved_by_driver: ClassVar[bool] = False
    """True if it parks by calls of the driver about single processes, which it then also locks and checkpoints before
    they are killed. The others need readings of the driver only, and park and end a container as a whole."""

    async def probe(self) -> str | None:
        """None if the driver answers and can checkpoint, else the reason."""
        try:
            await self.calls.describe("ask")
            await self.calls.memory("ask")
        except StepFailedError as error:
            return error.text
        return None

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The container's processes, with their bytes: those that use CUDA, or all of them. Raises NoProcessError,
        NoMemberError; StepFailedError: they are unknown."""
        return await Discovery(self.calls, self.host, whole=not self.moved_by_driver).find(target, group, epoch)

    def container(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The container without its GPU processes: enough to kill it if they are unknown; makes no driver call."""
        found = None
        with contextlib.suppress(StepFailedError):
            found = self.host.containers.find(target)
        root = None if found is None else found.root
        return SeatProcesses(target=target, group=group, epoch=epoch, root=root, members=())

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        """Read the memory in use before the park, so that its release can be proven. The baseline stays empty if the
        driver does not answer, and for a seat that is parked already: its park releases nothing."""
        if seat.parked_on and any(self.host.freezer.stopped(member.who) for member in seat.members):
            return seat
        try:
            return seat.model_copy(update={"baseline": await self.evidence.baseline(seat)})
        except StepFailedError:
            return seat

    @abstractmethod
    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """Take it out of VRAM."""

    @abstractmethod
    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """Bring it back to VRAM."""

    @abstractmethod
    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """Finish or undo a half that a crash interrupted."""

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        """Lock and checkpoint where possible, kill the container's processes, prove that the memory is free."""
        ending = await self._half(seat, note).run(JobGoal.DEAD)
        if ending.outcome == "lost":  # the kill succeeded: no process is left
            ending.outcome = "gone"
        return ending

    @abstractmethod
    async def state(self, seat: SeatProcesses) -> Ending:
        """The present state of its processes, by evidence. Changes nothing."""

    async def living(self, seat: SeatProcesses) -> bool:
        """True while a process of its container lives that is no kyb-run without memory. Raises StepFailedError."""
        return bool(self.host.living(seat)) or await unseen(self.calls, self.host, seat.target, "ask") is not None

    async def located(self, seat: SeatProcesses, ending: Ending) -> Ending:
        """The state of an active or lost seat with the GPUs that the driver lists its processes on, or that none has a
        context. Where it does neither (virtual machines list no processes), nothing is known. Raises StepFailedError.
        """
        pids = {process.pid for process in self.host.living(seat)}
        uses = await self.calls.processes("ask")
        ending.gpus = tuple(sorted({use.gpu for use in uses if use.holds and use.pid in pids}))
        if not ending.gpus:
            try:
                await Discovery(self.calls, self.host).find(seat.target, "ask", 0)
            except NoMemberError:
                ending.no_context = True
            except (NoProcessError, StepFailedError):
                pass
        return ending

    def keeps(self, target: SeatTarget) -> bool:
        """True unless no kyb-run lives in the target's container, or that cannot be seen."""
        try:
            return self.host.containers.keeper(target) is not None
        except StepFailedError:
            return True

    def host_bytes(self, seat: SeatProcesses) -> int | None:
        """Host memory that its container takes now, by its control group; None where it cannot be read."""
        with contextlib.suppress(StepFailedError):
            cgroup = self.host.cgroup(seat)
            if cgroup is not None:
                return self.host.containers.cgroups.memory_bytes(cgroup)
        return None

    def ends_released(self) -> bool:
        """True if running processes of a deleted pod must be ended by ``kill``, before kubelet signals them: where the
        end of a process that the driver has restored can hang the machine (H2)."""
        module = self.host.inspection.kernel_module()
        return self.moved_by_driver and kill_hangs(self.calls.known or DriverInfo(), module)

    async def thaw(self, seat: SeatProcesses) -> None:
        """Let its frozen processes run, so that they can terminate; does not wait for the effect."""
        with contextlib.suppress(StepFailedError):  # processes that are not visible were not frozen from here
            self.host.freezer.release(self.host.cgroup(seat), lambda: self.host.living(seat))

    def _half(self, seat: SeatProcesses, note: Note) -> JobHalf:
        return JobHalf(seat, note, self.calls, self.host, self.evidence, gentle=self.moved_by_driver)


@dataclass
class DriverBackend(Backend):
    """Parks and activates with the checkpoint API of the driver that the helper calls."""

    moved_by_driver = True

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """Check, reserve host memory, lock all, checkpoint each, prove, freeze."""
        return await self._half(seat, note).run(JobGoal.PARKED)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """Reserve GPUs and wait for room, thaw, restore all, unlock all, verify."""
        return await self._half(seat, note).run(JobGoal.ACTIVE)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """After a crash: choose the goal from the states of the processes, and run to it."""
        return await self._half(seat, note).run(intent, replaying=True)

    async def state(self, seat: SeatProcesses) -> Ending:
        """States of the processes now; the driver is called only for those that are not frozen."""
        try:
            states, _ = await Discovery(self.calls, self.host).observe(seat, "ask")
            for index, member in enumerate(seat.members):
                if states[index] is ProcessState.UNKNOWN:
                    states[index] = await self.calls.state("ask", member)
            uses = [use for use in await self.calls.processes("ask") if use.holds]
        except StepFailedError as error:
            return Ending("quarantined", f"the driver does not report the seat's state: {error.text}")
        seen = _judged(seat, states)
        listed = {use.pid for use in uses}
        pids = {member.who.pid for member in seat.members}
        ending = Ending("lost", "its processes are " + ", ".join(sorted(seen)), vram_bytes=seat.vram_bytes)
        if not seat.parked_on and ProcessState.RUNNING in seen:
            seen.discard(ProcessState.GONE)  # found running a moment ago: engines have short-lived ones
        if seen == {ProcessState.RUNNING}:
            ending.outcome, ending.reason = "active", ""
            ending.gpus = tuple(sorted({use.gpu for use in uses if use.pid in pids}))
        elif seen == {ProcessState.CHECKPOINTED} and not listed & pids:
            ending.outcome, ending.reason, ending.host_bytes = "parked", "", seat.vram_bytes
            ending.gpus = seat.memory_on
        elif seen <= {ProcessState.GONE} and not await self.living(seat):
            ending.outcome, ending.reason = "gone", ""
        return ending


def _judged(seat: SeatProcesses, states: list[ProcessState]) -> set[ProcessState]:
    """The states that tell what the seat is: those of its holders. An attached process counts where it blocks a running
    engine, and where the seat has no holder."""
    attached = {states[index] for index in seat.attached} - {ProcessState.GONE}
    seen = {state for index, state in enumerate(states) if index not in seat.attached}
    return seen | attached if not seen or ProcessState.RUNNING in seen else seen
