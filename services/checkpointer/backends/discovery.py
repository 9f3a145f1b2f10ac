"""Which processes of a seat's container use GPUs, how many bytes they have, and in which state they are. Reads only."""

from dataclasses import dataclass

from kybernate.cgroups import HiddenProcessesError
from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError, Use, unaccounted
from services.checkpointer.backends.port import DriverUnreadableError, Member, NoMemberError, NoProcessError, Unit
from services.checkpointer.backends.site import Site
from services.checkpointer.containers import Container, UnknownContainerError
from services.checkpointer.failures import Seen
from services.checkpointer.processes import Identity, alive


@dataclass(frozen=True)
class Discovery:
    """Finds units and looks at them."""

    calls: DriverCalls
    site: Site

    async def find(self, target: SeatTarget, group: str, epoch: int) -> Unit:
        """The seat's GPU processes. Asks the driver again once. Raises NoProcessError, NoMemberError or
        DriverUnreadableError."""
        try:
            container = self.site.container(target)
        except (UnknownContainerError, HiddenProcessesError) as error:
            raise DriverUnreadableError(str(error)) from error
        if container is None:
            raise NoProcessError(f"container {target.container_id} has no process")
        try:
            return await self._find(target, group, epoch, container)
        except StepFailedError:
            pass
        try:
            return await self._find(target, group, epoch, container)
        except StepFailedError as error:
            raise DriverUnreadableError(error.text) from error

    async def observe(self, unit: Unit, key: str) -> tuple[list[Seen], bool]:
        """States without asking about stopped processes (that hangs), and whether anything is stopped.

        We freeze only after a checkpoint: what is stopped and holds no memory is CHECKPOINTED.
        """
        frozen = any(self.site.freezer.stopped(process) for process in self.site.living(unit))
        uses = await self.calls.processes(key, unit.reach) if frozen else []
        listed = {use.pid for use in uses if use.holds}
        states = []
        for member in unit.members:
            state = Seen.UNKNOWN if alive(member.who) else Seen.GONE
            if frozen and member.who.pid not in listed and self.site.freezer.stopped(member.who):
                state = Seen.CHECKPOINTED
            states.append(state)
        return states, frozen

    async def _find(self, target: SeatTarget, group: str, epoch: int, container: Container) -> Unit:
        uses = await self.calls.processes(group)
        # The container's pid may have come back as somebody else's, whom the driver knows by another seat.
        strangers = {use.pid for use in uses if use.seat not in ("", target.seat, f"process/{use.pid}")}
        found = self.site.containers.processes(target, container.root)
        listed = [use.pid for use in uses if use.pid not in {process.pid for process in found}]
        found += self.site.containers.own(container, listed) if listed else []
        members = [
            Member(who=process, gpu_bytes={use.gpu: use.size or 0 for use in uses if use.pid == process.pid})
            for process in found
            if process.pid not in strangers and await self._uses_gpu(process, group, uses)
        ]
        if not members and any(self.site.freezer.stopped(process) for process in found):
            text = f"container {target.container_id} is frozen and nobody remembers its GPU processes; delete its pod"
            raise DriverUnreadableError(text)
        if not members:
            raise NoMemberError(f"no process of container {target.container_id} uses a GPU")
        target = _where_seen(target, members, uses)
        unit = Unit(target=target, group=group, epoch=epoch, root=container.root, members=tuple(members))
        return unit if unit.vram_bytes else await self._estimated(unit, uses)

    async def _uses_gpu(self, process: Identity, group: str, uses: list[Use]) -> bool:
        """By the driver's word; of a stopped process only by its threads, since a question about it may hang."""
        if self.site.freezer.stopped(process):
            return self.site.inspection.uses_cuda(process)
        surely = any(use.pid == process.pid and use.holds for use in uses)
        return await self.calls.knows(group, process, surely=surely)

    async def _estimated(self, unit: Unit, uses: list[Use]) -> Unit:
        """Where NVML does not say how much a process has, or names no processes at all (virtual machines, other pid
        namespaces): what nobody else accounts for."""
        ours = {member.who.pid for member in unit.members}
        if any(use.pid in ours and use.size is not None for use in uses):
            return unit
        sizes = unaccounted(uses, await self.calls.memory(unit.group, unit.at), ours)
        first, *others = unit.members
        known = first.model_copy(update={"gpu_bytes": {gpu: max(0, size) for gpu, size in sizes.items()}})
        return unit.model_copy(update={"members": (known, *others)})


def _where_seen(target: SeatTarget, members: list[Member], uses: list[Use]) -> SeatTarget:
    """Who asks may be wrong about where a seat is: the GPUs that its processes hold memory on, if they are all others.

    Otherwise what was parked there would be taken for a copy of the GPUs that were named, and restored without room.
    """
    pids = {member.who.pid for member in members}
    gpus = tuple(dict.fromkeys(use.gpu for use in uses if use.pid in pids and use.holds))
    wrong = bool(gpus) and not {*gpus} & {*target.gpus}
    return target.model_copy(update={"gpus": gpus}) if wrong else target
