"""One half for one seat: the procedure's steps as calls of a helper, signals, reads of /proc, reservations."""

import asyncio
import signal
import time
from dataclasses import dataclass, field

from services.checkpointer.backends.discovery import Discovery
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError, unaccounted
from services.checkpointer.backends.evidence import Evidence, room_needed
from services.checkpointer.backends.gpu_map import Refusal, permutation, why_not
from services.checkpointer.backends.headroom import NoHeadroomError, UnreadableMemoryError
from services.checkpointer.backends.inspection import NoDeviceError
from services.checkpointer.backends.port import Ending, Note, Unit
from services.checkpointer.backends.refusals import nccl_matters, refusal
from services.checkpointer.backends.reservations import ReservedError
from services.checkpointer.backends.site import Site
from services.checkpointer.failures import READS, Goal, Seen, Trouble, Verb
from services.checkpointer.freezer import FreezeError
from services.checkpointer.procedure import Procedure, Step
from services.checkpointer.processes import Identity, alive, send

POLL_SECONDS = 0.01
HUNG = "hung"
"""Journaled when a call hung, with the verb as its detail."""

_LABELS = {Verb.EVIDENCE: "verify", Verb.VERIFY: "verify"}
_REFUSALS = frozenset({Verb.CHECKS, Verb.HEADROOM, Verb.MAP, Verb.ROOM})
"""What goes wrong here is the seat's or the machine's matter and speaks against no backend."""
_UNACCOUNTED_SHARE, _UNACCOUNTED_BYTES = 0.1, 64 * 2**20
"""After a kill so much may be in use that no process accounts for: a share of the footprint, and some bytes."""


@dataclass
class Half:
    """One run of the procedure. ``run`` once."""

    unit: Unit
    note: Note
    calls: DriverCalls
    site: Site
    evidence: Evidence
    _gpu_map: dict[str, str] | None = None
    _failed: set[Verb] = field(default_factory=set)
    _unmovable: Refusal | None = None

    async def run(self, goal: Goal, *, replaying: bool = False) -> Ending:
        """To its end; raises nothing but what the journal raises."""
        unit, ending = self.unit, Ending("started", vram_bytes=self.unit.vram_bytes)
        try:
            states, frozen = await Discovery(self.calls, self.site).observe(unit, unit.group)
        except StepFailedError:
            stopped = [self.site.freezer.stopped(member.who) for member in unit.members]
            # What was parked and is still stopped is checkpointed: thawing it only to ask would leave it unprotected.
            remembered = bool(unit.parked_on) and not replaying
            states = [Seen.CHECKPOINTED if one and remembered else Seen.UNKNOWN for one in stopped]
            frozen = any(stopped)
        procedure = Procedure(
            goal, states, frozen=frozen, replaying=replaying, hangs=unit.hangs, moving=bool(unit.moves)
        )
        try:
            while isinstance(step := procedure.next(), Step):
                await self._step(procedure, step, ending)
        finally:
            self.site.headroom.release(unit.owner)
            self.site.reservations.release(unit.owner)
        ending.outcome, ending.reason = step.outcome, step.reason
        ending.host_bytes = unit.vram_bytes if step.outcome == "parked" else 0
        ending.gpus = self._where(ending)
        ending.move_refused = self._unmovable.whose if self._unmovable is not None else ""
        ending.failed = ending.outcome != goal and bool(self._failed - _REFUSALS)
        return ending

    async def _step(self, procedure: Procedure, step: Step, ending: Ending) -> None:
        pid = None if step.member is None else self.unit.members[step.member].who.pid
        if step.verb not in READS:
            how = self.site.freezer.means(self.site.cgroup(self.unit)) if step.verb is Verb.FREEZE else ""
            await self.note(step.verb, pid, how)
        began = time.monotonic()
        try:
            seen, killed = await self._do(step, procedure.states, dying=procedure.goal is Goal.DEAD)
        except StepFailedError as error:
            self._failed.add(step.verb)
            if error.trouble is Trouble.HUNG:
                await self.note(HUNG, pid, str(step.verb))
            elif step.verb is Verb.RESTORE and self.unit.moves and error.trouble is Trouble.REFUSED:
                self._unmovable = Refusal(error.text)
            procedure.failed(step, error.trouble, error.text)
        else:
            procedure.done(step, seen, killed)
        if procedure.goal is not Goal.PARKED:
            self.site.headroom.release(self.unit.owner)  # no copy is made any more; others may wait for that memory
        ending.last_call_at = time.time()
        label = _LABELS.get(step.verb, str(step.verb))
        ending.seconds[label] = ending.seconds.get(label, 0.0) + time.monotonic() - began

    async def _do(self, step: Step, states: list[Seen], *, dying: bool) -> tuple[Seen | None, int]:
        """One step. Returns what STATE read and how many KILL found alive. Raises StepFailedError."""
        if step.member is not None and step.verb is Verb.STATE:
            return await self.calls.state(self.unit.group, self.unit.members[step.member], quick=dying), 0
        if step.member is not None:
            if dying and step.verb is Verb.CHECKPOINT:  # without memory for the copy the kernel kills, maybe others
                await self._reserve_memory(states, only=step.member)
            await self._move(step.verb, step.member, states)
            return None, 0
        unit, site = self.unit, self.site
        try:
            match step.verb:
                case Verb.CHECKS:
                    await self._check()
                case Verb.HEADROOM:
                    await self._reserve_memory(states)
                case Verb.EVIDENCE:
                    await self.evidence.prove(unit)
                case Verb.MAP:
                    await self._make_map()
                case Verb.ROOM:
                    await self._reserve_gpus(states)
                case Verb.VERIFY:
                    await self.evidence.verify(unit)
                case Verb.FREEZE:
                    await site.freezer.freeze(site.cgroup(unit), lambda: site.living(unit))
                case Verb.THAW:
                    await site.freezer.thaw(site.cgroup(unit), lambda: site.living(unit))
                case Verb.KILL:
                    return None, await self._kill()
        except FreezeError as error:
            raise StepFailedError(Trouble.REFUSED, str(error)) from error
        return None, 0

    async def _move(self, verb: Verb, index: int, states: list[Seen]) -> None:
        unit, member = self.unit, self.unit.members[index]
        if verb is Verb.RESTORE and not self.site.reservations.holds(unit.owner, room_needed(unit, states)):
            raise StepFailedError(Trouble.REFUSED, "its GPUs are not reserved")
        await self.calls.move(unit.group, verb, member, unit.epoch, self._gpu_map if verb is Verb.RESTORE else None)
        if verb is Verb.CHECKPOINT:
            self.site.headroom.copied(unit.owner, member.total)

    async def _check(self) -> None:
        """What speaks against a park, before anything is touched."""
        unit, inspection = self.unit, self.site.inspection
        driver = await self.calls.describe(unit.group)
        uses = await self.calls.processes(unit.group, unit.at)
        allowed = self.site.allowed.union(*(inspection.allowances(member.who) for member in unit.members))
        nccl = nccl_matters(unit.at, len(unit.members), driver)
        processes = [inspection.process(member.who, nccl=nccl) for member in unit.members]
        neighbours = {inspection.name(pid) for pid in {use.pid for use in uses}}
        gpus = tuple(dict.fromkeys((*unit.at, *(gpu for gpu, size in unit.footprint.items() if size))))
        why = refusal(gpus, driver, processes, neighbours, allowed)
        if why is not None:
            raise StepFailedError(Trouble.REFUSED, why)

    async def _reserve_memory(self, states: list[Seen], *, only: int | None = None) -> None:
        """Host memory for all that is not copied yet, or for one process that is about to be killed."""
        unit = self.unit
        todo = [
            member.total
            for index, member in enumerate(unit.members)
            if states[index] is not Seen.CHECKPOINTED and only in (None, index)
        ]
        size = sum(todo) or (unit.target.vram_bytes if len(todo) == len(unit.members) else 0)
        seconds = self.calls.patience.transfer(size) if only is None else 0.0  # a kill waits for nobody
        try:
            await self.site.headroom.reserve(unit.owner, self.site.cgroup(unit), size, seconds)
        except (NoHeadroomError, UnreadableMemoryError) as error:
            raise StepFailedError(Trouble.REFUSED, str(error)) from error

    async def _reserve_gpus(self, states: list[Seen]) -> None:
        """The GPUs for this seat alone, and only then a look at what is free there."""
        unit = self.unit
        try:
            seconds = self.calls.patience.transfer(unit.vram_bytes)
            await self.site.reservations.take(unit.owner, room_needed(unit, states), seconds)
        except ReservedError as error:
            raise StepFailedError(Trouble.REFUSED, str(error)) from error
        await self.evidence.make_sure_of_room(unit, states)

    async def _make_map(self) -> None:
        """The driver's map for a restore to other GPUs; everything that speaks against it is found before the thaw."""
        unit = self.unit
        driver = await self.calls.describe(unit.group)
        count = len(unit.members)
        why = why_not(unit.at, unit.target.gpus, count, driver_can=driver.gpu_map, driver=driver.version)
        try:
            if why is None and self.site.device_nodes:
                for gpu in unit.moves.values():
                    self.site.inspection.check_device(unit.members[0].who, gpu)
            self._gpu_map = None if why else permutation(await self.calls.memory(unit.group), unit.moves)
        except NoDeviceError as error:
            why = Refusal(str(error))
        except ValueError as error:  # it may come back, and is no fault of the seat
            raise StepFailedError(Trouble.REFUSED, str(error)) from error
        if why is not None:
            self._unmovable = why
            raise StepFailedError(Trouble.REFUSED, why.reason)

    def _where(self, ending: Ending) -> tuple[str, ...]:
        """Where its memory is at the end of this half, as far as that is certain."""
        if ending.outcome == "active":
            return self.unit.moved().memory_on if self.unit.moves else self.unit.memory_on
        return self.unit.memory_on if ending.outcome == "parked" else ()

    async def _kill(self) -> int:
        """SIGKILL to all, children first, until none exists, the driver lists none and their memory is free."""
        deadline = time.monotonic() + self.calls.patience.wall(self.calls.patience.base_seconds)
        before = await self._unaccounted_or_unknown()
        killed: set[Identity] = set()
        while living := {*self.site.living(self.unit, strays=True), *(one for one in killed if alive(one))}:
            try:
                for process in sorted(living, key=lambda who: -who.start):
                    killed |= {process} if send(process, signal.SIGKILL) else set()
            except PermissionError as error:
                raise StepFailedError(Trouble.REFUSED, f"SIGKILL refused: {error.strerror}") from error
            if any(self.site.freezer.stopped(process) for process in living):
                # A frozen control group of version 1 holds even SIGKILL back; nothing runs on after it.
                self.site.freezer.release(self.site.cgroup(self.unit), list)
            if time.monotonic() > deadline:
                who = sorted(process.pid for process in living)
                raise StepFailedError(
                    Trouble.REFUSED, f"pids {who} do not end; see the kernel log, restart the machine"
                )
            await asyncio.sleep(POLL_SECONDS)
        ours = {process.pid for process in killed} | {member.who.pid for member in self.unit.members}
        while held := await self._still_held(ours, before):
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, held)
            await asyncio.sleep(POLL_SECONDS)
        return len(killed)

    async def _unaccounted(self) -> dict[str, int]:
        """Bytes in use on the seat's GPUs that no listed process accounts for."""
        unit = self.unit
        return unaccounted(*await self.calls.usage(unit.group, unit.reach))

    async def _unaccounted_or_unknown(self) -> dict[str, int]:
        """A driver that cannot be asked keeps nobody from being killed."""
        try:
            return await self._unaccounted()
        except StepFailedError:
            return {}

    async def _still_held(self, ours: set[int], before: dict[str, int]) -> str:
        """What the killed still hold; empty when nothing."""
        if still := ours & {use.pid for use in await self.calls.processes(self.unit.group) if use.holds}:
            return f"pids {sorted(still)} ended but still hold GPU memory; see the kernel log, restart the machine"
        allowed = _UNACCOUNTED_BYTES + int(_UNACCOUNTED_SHARE * self.unit.vram_bytes)
        for gpu, size in (await self._unaccounted()).items():
            if size - before.get(gpu, 0) > allowed:
                return (
                    f"{gpu} has {size} bytes in use that no process accounts for; see nvidia-smi, restart the machine"
                )
        return ""
