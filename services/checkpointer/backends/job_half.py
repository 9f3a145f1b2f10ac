"""One half for one seat: executes the procedure's steps by driver calls, signals, reads of /proc and reservations."""

import asyncio
import contextlib
import math
import signal
import time
from dataclasses import dataclass, field

from services.checkpointer.backends.driver_calls import DriverCalls, unaccounted
from services.checkpointer.backends.evidence import Discovery, Evidence, listed, room_needed
from services.checkpointer.backends.host import Host, NoDeviceError
from services.checkpointer.backends.port import Ending, Note, SeatProcesses
from services.checkpointer.core.failures import (
    READS,
    SPENT,
    TERMINAL,
    JobGoal,
    ProcessState,
    StepFailedError,
    StepTrouble,
    Verb,
)
from services.checkpointer.core.procedure import Procedure, Step
from services.checkpointer.core.refusals import Allowance, MoveRefusal, move_refusal, park_refusal, permutation
from services.checkpointer.file_locks import why_not_frozen
from services.checkpointer.processes import ProcessIdentity, alive, send

POLL_SECONDS = 0.01
LET_GO_SECONDS = 10.0
"""Model seconds in which locks must be released and compilers end."""
LOOK_SECONDS = 0.1

_LABELS = {Verb.EVIDENCE: "verify", Verb.VERIFY: "verify"}
_REFUSALS = frozenset({Verb.CHECKS, Verb.HEADROOM, Verb.MAP, Verb.ROOM})
"""A failure of these steps is a refusal by seat or machine and does not count as a failure of the backend."""
_UNACCOUNTED_SHARE, _UNACCOUNTED_BYTES = 0.1, 64 * 2**20
"""Growth of unaccounted memory that is tolerated after a kill: a share of the footprint plus some bytes."""


@dataclass
class JobHalf:
    """One run of the procedure. ``run`` once."""

    seat: SeatProcesses
    note: Note
    calls: DriverCalls
    host: Host
    evidence: Evidence
    gentle: bool = True
    """Lock and checkpoint processes before they are killed."""
    _gpu_map: dict[str, str] | None = None
    _failed: set[Verb] = field(default_factory=set)
    _noted: set[Verb] = field(default_factory=set)
    """Verbs about attached members that are journaled: one record each, since there may be a hundred of them."""
    _unmovable: MoveRefusal | None = None
    _residue_bytes: int = 0
    _until: float = 0.0
    """Monotonic: the first transfer in this direction and all after it end by then; 0: none has begun."""
    _holds: bool = False
    """It was not parked for what it holds, now."""

    async def run(self, goal: JobGoal, *, replaying: bool = False) -> Ending:
        """Run to the end. Raises only what the journal raises."""
        seat, ending = self.seat, Ending("started", vram_bytes=self.seat.vram_bytes)
        try:
            states, frozen = await Discovery(self.calls, self.host).observe(seat, seat.group)
        except StepFailedError:
            stopped = [self.host.freezer.stopped(member.who) for member in seat.members]
            # A parked member that is still stopped is CHECKPOINTED; a thaw just to read its state would unprotect it.
            remembered = bool(seat.parked_on) and not replaying
            states = [ProcessState.CHECKPOINTED if one and remembered else ProcessState.UNKNOWN for one in stopped]
            frozen = any(stopped)
        procedure = Procedure(
            goal,
            states,
            frozen=frozen,
            replaying=replaying,
            moving=bool(seat.moves),
            gentle=self.gentle,
            attached=seat.attached,
            hangs=seat.hangs,
            refusals=seat.refusals,
        )
        try:
            while isinstance(step := procedure.next(), Step):
                await self._step(procedure, step, ending)
        finally:
            self.host.headroom.release(seat.target.seat)
            self.host.reservations.release(seat.target.seat)
        ending.outcome, ending.reason = step.outcome, step.reason
        if step.outcome == "parked":
            ending.host_bytes, ending.residue_bytes = seat.vram_bytes, self._residue_bytes
        if step.outcome in ("parked", "active"):  # else uncertain
            ending.gpus = (seat.moved() if seat.moves and step.outcome == "active" else seat).memory_on
        ending.move_refused = self._unmovable.whose if self._unmovable is not None else ""
        ending.failed = ending.outcome != goal and bool(self._failed - _REFUSALS)
        ending.refused = Verb.CHECKS in self._failed and not self._holds
        return ending

    async def _step(self, procedure: Procedure, step: Step, ending: Ending) -> None:
        pid, goal = None if step.member is None else self.seat.members[step.member].who.pid, procedure.goal
        if step.verb not in READS:
            await self._journal(step, pid)
        with ending.timed(_LABELS.get(step.verb, str(step.verb))):
            try:
                seen, killed = await self._do(step, procedure.states, dying=procedure.goal is JobGoal.DEAD)
            except StepFailedError as error:
                self._failed.add(step.verb)
                if error.trouble is StepTrouble.HUNG:
                    await self.note(StepTrouble.HUNG, pid, str(step.verb))
                elif error.trouble is StepTrouble.SLOW:
                    self._until = 0.0  # while the driver stalled, nothing was transferred
                elif step.verb is Verb.RESTORE and error.trouble in TERMINAL:
                    # At once: its state reads CHECKPOINTED on, and a replay must not believe it.
                    await self.note(SPENT, pid)
                elif step.verb is Verb.RESTORE and error.trouble is StepTrouble.REFUSED:
                    if self.seat.moves:
                        self._unmovable = MoveRefusal(error.text)
                    else:
                        await self.note(StepTrouble.REFUSED, pid, str(step.verb))
                procedure.failed(step, error.trouble, error.text)
                if procedure.goal is not goal:
                    self._until = 0.0  # what undoes it has its own time
            else:
                procedure.done(step, seen, killed)
        if procedure.goal is not JobGoal.PARKED:
            self.host.headroom.release(self.seat.target.seat)  # no copy follows; other parks may wait for that memory
        ending.last_call_at = time.time()

    async def _journal(self, step: Step, pid: int | None) -> None:
        if step.member in self.seat.attached:
            if step.verb not in self._noted:
                self._noted.add(step.verb)
                await self.note(step.verb, None, "attached")
            return
        how = self.host.freezer.means(self.host.cgroup(self.seat)) if step.verb is Verb.FREEZE else ""
        await self.note(step.verb, pid, how)

    async def _do(self, step: Step, states: list[ProcessState], *, dying: bool) -> tuple[ProcessState | None, int]:
        """Execute one step. Returns (state that STATE read, processes that KILL killed). Raises StepFailedError."""
        if step.member is not None and step.verb is Verb.STATE:
            seconds = 0.0 if dying else self._left()
            return await self.calls.state(self.seat.group, self.seat.members[step.member], seconds), 0
        if step.member is not None:
            if dying and step.verb is Verb.CHECKPOINT:  # a copy without memory makes the kernel kill, maybe other pods
                await self._reserve_memory(states, only=step.member)
            await self._move(step.verb, step.member, states)
            return None, 0
        seat, host = self.seat, self.host
        match step.verb:
            case Verb.CHECKS:
                await check_park(seat, self.calls, self.host)
                await self._let_go()
            case Verb.HEADROOM:
                await self._reserve_memory(states)
            case Verb.EVIDENCE:
                self._residue_bytes = await self.evidence.prove(seat)
            case Verb.MAP:
                await self._make_map()
            case Verb.ROOM:
                await self._reserve_gpus(states)
            case Verb.VERIFY:
                await self.evidence.verify(seat)
            case Verb.FREEZE:
                await host.freezer.freeze(host.cgroup(seat), lambda: host.living(seat))
            case Verb.THAW:
                await host.freezer.thaw(host.cgroup(seat), lambda: host.living(seat))
            case Verb.KILL:
                return None, await self._kill()
        return None, 0

    async def _let_go(self) -> None:
        """Wait until no process of the seat holds what others need. Raises StepFailedError."""
        deadline = time.monotonic() + self.calls.timeouts.wall(LET_GO_SECONDS)
        shared = Allowance.FILE_LOCKS not in _allowed(self.seat, self.host)
        while why := why_not_frozen(self.host.living(self.seat), shared=shared, proc=self.host.inspection.proc):
            if time.monotonic() > deadline:
                self._holds = True
                raise StepFailedError(why)
            await asyncio.sleep(LOOK_SECONDS)

    async def _move(self, verb: Verb, index: int, states: list[ProcessState]) -> None:
        seat, member = self.seat, self.seat.members[index]
        if verb is Verb.RESTORE and not self.host.reservations.holds(seat.target.seat, room_needed(seat, states)):
            raise StepFailedError("its GPUs are not reserved")
        gpu_map = self._gpu_map if verb is Verb.RESTORE else None
        await self.calls.move(seat.group, verb, member, seat.epoch, self._left(), gpu_map)
        if verb is Verb.CHECKPOINT:
            self.host.headroom.copied(seat.target.seat, member.total)

    def _left(self) -> float:
        """Wall seconds of this direction's time that are left."""
        self._until = self._until or time.monotonic() + self.calls.timeouts.half(self.seat)
        return self._until - time.monotonic()

    async def _reserve_memory(self, states: list[ProcessState], *, only: int | None = None) -> None:
        """Reserve host memory for all members not yet checkpointed, or for ``only`` one that is about to be killed."""
        seat = self.seat
        todo = [
            member.total
            for index, member in enumerate(seat.members)
            if states[index] is not ProcessState.CHECKPOINTED and only in (None, index)
        ]
        size = sum(todo) or (seat.target.vram_bytes if len(todo) == len(seat.members) else 0)
        seconds = self.calls.timeouts.transfer(size) if only is None else 0.0  # a kill does not wait for memory
        await self.host.headroom.reserve(seat.target.seat, self.host.cgroup(seat), size, seconds)

    async def _reserve_gpus(self, states: list[ProcessState]) -> None:
        """Reserve the GPUs for this seat, then wait for free memory on them."""
        seat, need = self.seat, room_needed(self.seat, states)
        await self.host.reservations.take(seat.target.seat, need, self.calls.timeouts.half(seat))
        await self.evidence.wait_for_room(seat, need)

    async def _make_map(self) -> None:
        """Build the driver's map for a restore to other GPUs; every refusal of a move happens here, before the thaw."""
        seat = self.seat
        driver = self.calls.known or await self.calls.describe(seat.group)
        count = len(seat.holders)
        allowed = _allowed(seat, self.host)
        why = move_refusal(seat.at, count, allowed, driver_can=driver.gpu_map, driver=driver.version)
        try:
            if why is None and self.host.device_nodes:
                for gpu in seat.moves.values():
                    self.host.inspection.check_device(seat.holders[0].who, gpu)
            self._gpu_map = None if why else permutation(await self.calls.memory(seat.group), seat.moves)
        except NoDeviceError as error:
            why = MoveRefusal(str(error))
        except ValueError as error:  # the GPU may answer again later, so the seat is not marked unmovable
            raise StepFailedError(str(error)) from error
        if why is not None:
            self._unmovable = why
            raise StepFailedError(why.reason)

    async def _kill(self) -> int:
        """End all, and announce that to ``kyb-run``. Returns the number of processes."""
        if (keeper := self.host.containers.keeper(self.seat.target)) is not None:
            self.host.announce_end(self.seat)
        try:
            return await self._end_all(keeper)
        except StepFailedError:
            self.host.withdraw_end(self.seat)
            raise

    async def _end_all(self, keeper: ProcessIdentity | None) -> int:
        """SIGKILL all, children first, until none exists or is listed and their memory is free; also what the driver
        lists in the container and was not found there. Returns the number.

        ``kyb-run``, the ``keeper``, lives on, unless memory is held that only it may hold.

        Their time counts from the first signal on, and only a look that began after it ends the wait: each reading may
        take as long itself, where the driver hangs or this process gets no CPU.
        """
        seconds = self.calls.timeouts.wall(self.calls.timeouts.base_seconds)
        deadline = math.inf
        before: dict[str, int] = {}
        with contextlib.suppress(StepFailedError):  # kill anyway
            before = await self._unaccounted()
        killed: set[ProcessIdentity] = set()
        began = time.monotonic()
        while living := {*self.host.living(self.seat, strays=True), *(one for one in killed if alive(one))}:
            try:
                for process in sorted(living, key=lambda who: -who.start):
                    killed |= {process} if send(process, signal.SIGKILL) else set()
            except PermissionError as error:
                raise StepFailedError(f"SIGKILL refused: {error.strerror}") from error
            if any(self.host.freezer.stopped(process) for process in living):
                # A frozen control group of version 1 delays even SIGKILL; after it no process resumes.
                self.host.freezer.release(self.host.cgroup(self.seat), list)
            if began > deadline:
                who = sorted(process.pid for process in living)
                raise StepFailedError(f"pids {who} do not end; see the kernel log, restart the machine")
            deadline = min(deadline, time.monotonic() + seconds)
            await asyncio.sleep(POLL_SECONDS)
            began = time.monotonic()
        deadline = min(deadline, began + seconds)
        ours = {process.pid for process in killed} | {member.who.pid for member in self.seat.members}
        ours |= set() if keeper is None else {keeper.pid}
        while (found := await self._still_held(ours, before))[1]:
            inside = {*found[0]} - killed
            if inside and keeper not in inside:
                killed |= {one for one in inside if send(one, signal.SIGKILL)}
                ours |= {one.pid for one in inside}
            elif keeper is not None and (began > deadline or keeper in inside):
                killed |= {keeper} if send(keeper, signal.SIGKILL) else set()
                keeper, deadline = None, time.monotonic() + seconds
            elif began > deadline:
                raise StepFailedError(found[1])
            await asyncio.sleep(POLL_SECONDS)
            began = time.monotonic()
        return len(killed)

    async def _unaccounted(self) -> dict[str, int]:
        """Bytes in use on the seat's GPUs that no listed process accounts for."""
        seat = self.seat
        return unaccounted(*await self.calls.usage(seat.group, seat.reach))

    async def _still_held(self, ours: set[int], before: dict[str, int]) -> tuple[list[ProcessIdentity], str]:
        """(processes with memory in its container, why its GPU memory is not free yet; empty if it is)."""
        uses = await self.calls.processes(self.seat.group)
        inside, why = listed(self.host, self.seat.target, uses)
        if still := ours & {use.pid for use in uses if use.holds}:
            return (
                inside,
                f"pids {sorted(still)} ended but still hold GPU memory; see the kernel log, restart the machine",
            )
        if inside or why:
            return inside, why or f"pids {[one.pid for one in inside]} of its container hold GPU memory"
        allowed = _UNACCOUNTED_BYTES + int(_UNACCOUNTED_SHARE * self.seat.vram_bytes)
        for gpu, size in (await self._unaccounted()).items():
            if size - before.get(gpu, 0) > allowed:
                why = f"{gpu} has {size} bytes in use that no process accounts for; see nvidia-smi, restart the machine"
                return [], why
        return [], ""


def _allowed(seat: SeatProcesses, host: Host) -> frozenset[str]:
    """The allowances that hold for this seat."""
    allowed = host.allowed
    for member in seat.holders:
        allowed = host.inspection.allowed(member.who, allowed)
    return allowed


async def check_park(seat: SeatProcesses, calls: DriverCalls, host: Host) -> None:
    """Apply the rules of the driver's checkpoint; changes nothing. Raises StepFailedError."""
    driver = calls.known or await calls.describe(seat.group)
    if seat.reading is not None:
        pids = seat.reading.pids
    else:
        pids = frozenset(use.pid for use in await calls.processes(seat.group, seat.at))
    processes = [host.inspection.process(member.who) for member in seat.holders]
    neighbours = {host.inspection.name(pid) for pid in pids}
    gpus = tuple(dict.fromkeys((*seat.at, *(gpu for gpu, size in seat.footprint.items() if size))))
    why = park_refusal(gpus, driver, processes, neighbours, _allowed(seat, host), host.machine)
    if why is not None:
        raise StepFailedError(why)
