"""Discovery of a seat's GPU processes and their states, and the proofs that a park or restore needs."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kybernate.cuda import FREED_SHARE
from kybernate.logs import get_logger
from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts, Usage, Use, unaccounted
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import Member, NoMemberError, NoProcessError, Reading, SeatProcesses
from services.checkpointer.containers import SeatContainer
from services.checkpointer.core.failures import ProcessState, StepFailedError
from services.checkpointer.freezer import Freezer
from services.checkpointer.processes import ProcessIdentity, alive

POLL_SECONDS = 0.01
UNKNOWN_FOOTPRINT_IDLE_SHARE = 0.05
"""A seat of unknown footprint is restored only on GPUs with at most this share of their memory in use; and a frozen
one without record is parked only if no process accounts for at most this share on its GPUs."""


async def unseen(calls: DriverCalls, host: Host, target: SeatTarget, group: str) -> SeatContainer | None:
    """The container of a seat in which no engine was found, if the driver lists a process of it all the same; None is
    the proof that nothing of it holds memory: what finds nothing proves nothing.

    A process that has just ended may be listed for a while. Raises StepFailedError: one cannot be looked at, or kyb-run
    holds memory, which only an engine of that name does.
    """
    inside: list[ProcessIdentity] = []

    async def unclear() -> str:
        inside[:], why = listed(host, target, await calls.processes(group))
        return "" if inside else why

    await until_none(calls.timeouts, unclear)
    if not inside:
        return None
    keeper = host.containers.keeper(target)
    if keeper in inside:
        raise StepFailedError(f"pid {keeper.pid} is named kyb-run and holds GPU memory; delete its pod")
    return SeatContainer(inside[0], None)


def listed(host: Host, target: SeatTarget, uses: Sequence[Use]) -> tuple[list[ProcessIdentity], str]:
    """(the processes with memory in a seat's container by the driver's list, why there may be more on its GPUs)."""
    near = target.parked_on or target.gpus
    inside = host.containers.own(target, dict.fromkeys(use.pid for use in uses if use.holds))
    return inside, host.containers.unclear(target, {use.pid for use in uses if use.holds and use.gpu in near})


async def until_none(timeouts: Timeouts, missing: Callable[[], Awaitable[str]]) -> None:
    """Wait until nothing is ``missing`` any more; what a reading says counts that began after ``settle``. Raises
    StepFailedError."""
    began = time.monotonic()
    deadline = began + timeouts.settle()
    while text := await missing():
        if began > deadline:
            raise StepFailedError(text)
        await asyncio.sleep(POLL_SECONDS)
        began = time.monotonic()


@dataclass(frozen=True)
class Discovery:
    """Finds the GPU processes of a seat and their states."""

    calls: DriverCalls
    host: Host
    whole: bool = False
    """Every process of the container counts as one, whether the driver knows it or not."""

    async def find(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The GPU processes of a seat; what fails is tried once more. Raises NoProcessError, NoMemberError or
        StepFailedError."""
        container = self.host.containers.find(target) or await unseen(self.calls, self.host, target, group)
        if container is None:
            raise NoProcessError(f"container {target.container_id} has no process")
        with contextlib.suppress(StepFailedError):
            return await self._find(target, group, epoch, container)
        return await self._find(target, group, epoch, container)

    async def observe(self, seat: SeatProcesses, key: str) -> tuple[list[ProcessState], bool]:
        """(state of each member, True if any process of the seat is stopped).

        A driver call about a stopped process hangs, so its state is inferred: processes are frozen only after a
        checkpoint, hence a stopped one that holds no memory is CHECKPOINTED. All others are UNKNOWN or GONE.
        """
        frozen = any(self.host.freezer.stopped(process) for process in self.host.living(seat))
        uses = await self.calls.processes(key, seat.reach) if frozen else []
        listed = {use.pid for use in uses if use.holds}
        states = []
        for member in seat.members:
            state = ProcessState.UNKNOWN if alive(member.who) else ProcessState.GONE
            if frozen and member.who.pid not in listed and self.host.freezer.stopped(member.who):
                state = ProcessState.CHECKPOINTED
            states.append(state)
        return states, frozen

    async def _find(self, target: SeatTarget, group: str, epoch: int, container: SeatContainer) -> SeatProcesses:
        found = self.host.containers.processes(target, container.root)
        usage, known = await self.calls.survey(group, self._asked(found))
        uses = usage.uses
        # A pid of the container may have been reused by a process that the driver lists under another seat.
        strangers = {use.pid for use in uses if use.seat not in ("", target.seat, f"process/{use.pid}")}
        own = {process.pid for process in found}
        listed = [pid for pid in dict.fromkeys(use.pid for use in uses) if pid not in own | strangers]
        found += self.host.containers.own(target, listed)
        if to_ask := [one for one in self._asked(found) if one not in known]:  # found since, or not stopped any more
            known |= (await self.calls.survey(group, to_ask, {use.pid for use in uses if use.holds}))[1]
        ours = [one for one in found if one.pid not in strangers]
        if not self.whole:  # one that the driver was not asked about, since it is stopped, is judged by its threads
            by_threads = self.host.inspection.uses_cuda
            ours = [one for one in ours if (known[one] if one in known else by_threads(one))]
        members = _classified(ours, uses)
        if not members and any(self.host.freezer.stopped(process) for process in found):
            raise StepFailedError(f"{_unrecorded(target)}; delete its pod")
        if not members:
            raise NoMemberError(f"no process of container {target.container_id} uses a GPU")
        target = _with_observed_gpus(target, members, uses)
        seat = SeatProcesses(target=target, group=group, epoch=epoch, root=container.root, members=tuple(members))
        holding = {use.pid for use in uses if use.holds}
        if all(one.who.pid not in holding and self.host.freezer.stopped(one.who) for one in members):
            return await self._parked_without_record(seat, uses)
        seat = seat if seat.vram_bytes else await self._estimated(seat, uses)
        if not set(seat.at) <= usage.memory.keys():  # a reading of all GPUs leaves out those that fail
            return seat
        pids = frozenset(use.pid for use in uses if use.gpu in seat.at)
        return seat.model_copy(update={"reading": Reading(_baseline(seat, usage), pids)})

    async def _parked_without_record(self, seat: SeatProcesses, uses: list[Use]) -> SeatProcesses:
        """A frozen container that this checkpointer has no record of (its state folder was lost), and whose processes
        the driver does not list.

        Processes are frozen only once they are checkpointed. So it is parked if the memory in use on its GPUs belongs
        to other processes, or is what parked ones are known to keep. Raises StepFailedError where that is not proven.
        """
        target = seat.target
        gpus = target.parked_on or target.gpus
        memory = await self.calls.memory(seat.group, gpus)
        size = target.vram_bytes // max(1, len(gpus))
        for gpu, left in unaccounted(uses, memory).items():
            if left > UNKNOWN_FOOTPRINT_IDLE_SHARE * memory[gpu][1] + target.kept_bytes or (size and left >= size):
                text = f"{left} bytes on {gpu} that no process accounts for may be its own; delete its pod"
                raise StepFailedError(f"{_unrecorded(target)}; {text}")
        share = {gpu: size // len(seat.members) for gpu in gpus}
        known = tuple(member.model_copy(update={"gpu_bytes": share}) for member in seat.members)
        get_logger().info("seat.learned", seat=target.seat, pids=[member.who.pid for member in known], parked_on=gpus)
        residue = round(target.vram_bytes * (1 - FREED_SHARE))  # not known: as much as a proof admits
        return seat.model_copy(update={"members": known, "parked_on": gpus, "residue_bytes": residue})

    def _asked(self, found: list[ProcessIdentity]) -> list[ProcessIdentity]:
        """Those that the driver is asked about: no stopped one, as the call may hang."""
        return [] if self.whole else [one for one in found if not self.host.freezer.stopped(one)]

    async def _estimated(self, seat: SeatProcesses, uses: list[Use]) -> SeatProcesses:
        """The seat with estimated sizes: all memory in use on its GPUs that no other process accounts for.

        For NVML that reports no memory by process, or lists no processes (virtual machines, other pid namespaces).
        """
        ours = {member.who.pid for member in seat.members}
        if not seat.holders or any(use.pid in ours and use.size is not None for use in uses):
            return seat
        sizes = unaccounted(uses, await self.calls.memory(seat.group, seat.at), ours)
        first, *others = sorted(seat.members, key=lambda member: not member.holds)
        known = first.model_copy(update={"gpu_bytes": sizes})
        return seat.model_copy(update={"members": (known, *others)})


@dataclass
class Evidence:
    """Proofs about the processes of a seat. Each raises StepFailedError with the reason why it does not hold."""

    calls: DriverCalls
    freezer: Freezer
    margin_bytes: int = 0
    """Free VRAM required beyond the footprint before a restore beside other processes."""

    async def baseline(self, seat: SeatProcesses) -> dict[str, int]:
        """Bytes in use by GPU before a park, without other seats' processes; at least the seat's own footprint. Of a
        seat that was just discovered they are known."""
        if seat.reading is not None:
            return seat.reading.baseline
        return _baseline(seat, await self.calls.usage(seat.group, seat.at))

    async def verify(self, seat: SeatProcesses) -> None:
        """Every process is RUNNING. Attached ones are read too: one that stays locked blocks its engine."""
        seconds = self.calls.timeouts.half(seat)
        for member in seat.members:
            _require(member, await self.calls.state(seat.group, member, seconds), ProcessState.RUNNING)

    async def prove(self, seat: SeatProcesses) -> int:
        """Park evidence: all holders CHECKPOINTED, none listed, memory fell. Waits up to ``settle``: drivers report it
        late. Returns the bytes that are still in use; of a seat that was parked before, those that were then.

        No state call is made for a stopped process (it hangs): only checkpointed ones are stopped.
        """
        asked = [member for member in seat.holders if not self.freezer.stopped(member.who)]
        states, first = await self.calls.states_and_usage(seat.group, asked, seat.reach)
        for member, state in zip(asked, states, strict=True):
            _require(member, state, ProcessState.CHECKPOINTED)
        left: dict[str, int] = {}

        async def missing() -> str:
            return _missing_evidence(seat, await self.calls.usage(seat.group, seat.reach), left)

        if _missing_evidence(seat, first, left):
            await until_none(self.calls.timeouts, missing)
        return sum(left.values()) if seat.baseline else seat.residue_bytes

    async def wait_for_room(self, seat: SeatProcesses, need: dict[str, int]) -> None:
        """Wait until each GPU has these bytes free: a restore without room destroys the process."""
        await until_none(self.calls.timeouts, lambda: self._missing_room(seat, need))

    async def _missing_room(self, seat: SeatProcesses, need: dict[str, int]) -> str:
        """The GPU that lacks room; empty if none does. The margin covers what other processes on the GPU may allocate
        meanwhile; it does not apply without them, or a seat that fills its GPU could never be restored."""
        ours = {member.who.pid for member in seat.members}
        uses, memory = await self.calls.usage(seat.group, need)
        shared = {use.gpu for use in uses if use.pid not in ours and use.holds}
        for gpu, size in need.items():
            used, total = memory.get(gpu, (0, 0))
            wanted = size + (self.margin_bytes if gpu in shared else 0)
            if size == 0 and used > total * UNKNOWN_FOOTPRINT_IDLE_SHARE:
                return f"{gpu} has {used} bytes in use, and the seat's footprint is unknown"
            if total - used < wanted:
                return f"{gpu} has {total - used} bytes free and the seat needs {wanted}"
        return ""


def _require(member: Member, state: ProcessState, wanted: ProcessState) -> None:
    if state is not wanted and (member.holds or state is not ProcessState.GONE):
        raise StepFailedError(f"pid {member.who.pid} is {state} and not {wanted}")


def _missing_evidence(seat: SeatProcesses, usage: Usage, left: dict[str, int]) -> str:
    """The condition of the park evidence that does not hold yet; empty if all hold. Fills in the bytes ``left``."""
    listed = {use.pid for use in usage.uses if use.holds}
    still = sorted(listed & {member.who.pid for member in seat.members})
    if still:
        return f"the driver still lists {still} as using GPU memory"
    if not seat.baseline:
        return ""
    now = _not_others(seat, usage)
    for gpu, size in seat.footprint.items():
        fell = seat.baseline.get(gpu, 0) - now[gpu]
        left[gpu] = max(0, size - fell)
        if fell < FREED_SHARE * size:
            return f"memory in use on {gpu} fell by {fell} of {size} bytes"
    return ""


def _baseline(seat: SeatProcesses, usage: Usage) -> dict[str, int]:
    now = _not_others(seat, usage)
    return {gpu: max(size, now[gpu]) for gpu, size in seat.footprint.items()}


def _not_others(seat: SeatProcesses, usage: Usage) -> dict[str, int]:
    """Bytes in use on each GPU of the seat, without those of other processes."""
    left = unaccounted(usage.uses, usage.memory, {member.who.pid for member in seat.members})
    return {gpu: left.get(gpu, 0) for gpu in seat.footprint}


def room_needed(seat: SeatProcesses, states: list[ProcessState]) -> dict[str, int]:
    """Bytes by destination GPU that the restore of all checkpointed members takes."""
    need: dict[str, int] = {}
    for member, state in zip(seat.members, states, strict=True):
        if state is ProcessState.CHECKPOINTED:
            for gpu, size in member.gpu_bytes.items():
                new = seat.moves.get(gpu, gpu)
                need[new] = need.get(new, 0) + size
    if not need and not seat.vram_bytes:
        share = seat.target.vram_bytes // max(1, len(seat.target.gpus))
        need = dict.fromkeys(seat.target.gpus, share)
    return need


def _classified(processes: list[ProcessIdentity], uses: list[Use]) -> list[Member]:
    """Holders and attached ones. A process is attached if the driver lists it with 0 bytes, or not at all beside a
    listed holder. Where no holder is listed (virtual machines, other pid namespaces), the rest may hold anything."""
    on = {who.pid: [use for use in uses if use.pid == who.pid] for who in processes}
    listed = any(use.holds for found in on.values() for use in found)

    def holds(found: list[Use]) -> bool:
        return any(use.holds for use in found) or not (found or listed)

    return [
        Member(who=who, holds=holds(found), gpu_bytes={use.gpu: use.size or 0 for use in found if use.holds})
        for who, found in ((who, on[who.pid]) for who in processes)
    ]


def _unrecorded(target: SeatTarget) -> str:
    return f"container {target.container_id} is frozen and its GPU processes are not on record"


def _with_observed_gpus(target: SeatTarget, members: list[Member], uses: list[Use]) -> SeatTarget:
    """The target with the GPUs that its processes hold memory on, if none of those is named in the target.

    The manager's record of a seat's GPUs may be wrong; a seat parked under wrong GPUs would be restored without room.
    """
    pids = {member.who.pid for member in members}
    gpus = tuple(dict.fromkeys(use.gpu for use in uses if use.pid in pids and use.holds))
    wrong = bool(gpus) and not {*gpus} & {*target.gpus}
    return target.model_copy(update={"gpus": gpus}) if wrong else target
