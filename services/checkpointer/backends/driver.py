"""Parking through the CUDA checkpoint API: the procedure's steps as calls of a helper, signals and reads of /proc.

Which driver answers is the helper's matter (fake now, CUDA behind the same verbs); everything else is the same.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError
from services.checkpointer.backends.port import (
    Capabilities,
    DriverUnreadableError,
    Ending,
    Member,
    NoMemberError,
    NoProcessError,
    Note,
    Unit,
)
from services.checkpointer.procedure import READS, Goal, Procedure, Seen, Step, Trouble, Verb
from services.checkpointer.processes import Identity, alive, identify, send, stopped, tree

FREED_SHARE = 0.9
"""Park evidence: memory in use must have fallen by this share of the footprint (research/checkpoint.md §7)."""
POLL_SECONDS = 0.01
UNKNOWN_FOOTPRINT_IDLE_SHARE = 0.05
"""A seat whose footprint nobody knows is only restored on GPUs that are as good as empty."""

_LABELS = {Verb.EVIDENCE: "verify", Verb.VERIFY: "verify"}


def container_process(container_id: str) -> Identity | None:
    """First process of a container named ``process://<pid>``; None when it is gone."""
    scheme, _, pid = container_id.partition("://")
    return identify(int(pid)) if scheme == "process" and pid.isdigit() else None


@dataclass
class DriverBackend:
    """Parks and activates by the checkpoint API of whichever driver the helper speaks to."""

    calls: DriverCalls
    locate: Callable[[str], Identity | None] = container_process
    margin_bytes: int = 0
    """Free memory wanted beyond the footprint before a restore."""
    capabilities: Capabilities = field(
        default=Capabilities(
            frees_all_vram=True, needs_host_ram=True, migrates=False, multi_process=True, needs_cooperation=False
        )
    )

    async def probe(self) -> str | None:
        """None when the driver answers, else why not."""
        try:
            await self.calls.memory("ask")
        except StepFailedError as error:
            return error.text
        return None

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> Unit:
        """Processes of the container that the driver knows, with their bytes. One retry after a hang."""
        root = self.locate(target.container_id)
        if root is None:
            raise NoProcessError(f"container {target.container_id} has no process")
        try:
            return await self._discover(target, group, epoch, root)
        except StepFailedError:
            pass
        try:
            return await self._discover(target, group, epoch, root)
        except StepFailedError as error:
            raise DriverUnreadableError(error.text) from error

    def container(self, target: SeatTarget, group: str, epoch: int) -> Unit:
        """The container's process tree only; asks no driver."""
        return Unit(target=target, group=group, epoch=epoch, root=self.locate(target.container_id), members=())

    async def prepare(self, unit: Unit) -> Unit:
        """Read what is in use before the park, so that the fall can be proven. Unknown stays empty."""
        try:
            return unit.model_copy(update={"baseline": await self._unaccounted(unit)})
        except StepFailedError:
            return unit

    async def park(self, unit: Unit, note: Note) -> Ending:
        """Lock all, checkpoint each, prove, freeze."""
        return await self._half(unit, Goal.PARKED, note)

    async def activate(self, unit: Unit, note: Note) -> Ending:
        """Room, thaw, restore all, unlock all, verify."""
        return await self._half(unit, Goal.ACTIVE, note)

    async def replay(self, unit: Unit, intent: Goal, note: Note) -> Ending:
        """After a crash: decide from the states where to go, and go there."""
        return await self._half(unit, intent, note, replaying=True)

    async def kill(self, unit: Unit, note: Note) -> Ending:
        """Lock and checkpoint what lets us, kill the container's processes, prove that the memory is free."""
        ending = await self._half(unit, Goal.DEAD, note)
        if ending.outcome == "lost":  # killed as asked: no process is left
            ending.outcome = "gone"
        return ending

    async def state(self, unit: Unit) -> Ending:
        """What the processes do now; asks the driver only about those that are not frozen."""
        try:
            states, _ = await self._observe(unit, "ask")
            for index, member in enumerate(unit.members):
                if states[index] is Seen.UNKNOWN:
                    states[index] = await self.calls.state("ask", member, quick=True)
            listed = {use.pid for use in await self.calls.processes("ask")}
        except StepFailedError as error:
            return Ending("quarantined", f"the driver does not say what the seat does: {error.text}")
        seen = set(states)
        ending = Ending("lost", "its processes are " + ", ".join(sorted(seen)), vram_bytes=unit.vram_bytes)
        if seen == {Seen.RUNNING}:
            ending.outcome, ending.reason = "active", ""
        elif seen == {Seen.CHECKPOINTED} and not listed & {member.who.pid for member in unit.members}:
            ending.outcome, ending.reason, ending.host_bytes = "parked", "", unit.vram_bytes
        elif seen <= {Seen.GONE} and not self._living(unit):
            ending.outcome, ending.reason = "gone", ""
        return ending

    async def thaw(self, unit: Unit) -> None:
        """SIGCONT to every process of the seat."""
        for process in self._living(unit):
            send(process, signal.SIGCONT)

    async def _discover(self, target: SeatTarget, group: str, epoch: int, root: Identity) -> Unit:
        gpu_bytes: dict[int, dict[str, int]] = {}
        strangers = set()
        for use in await self.calls.processes(group):
            gpu_bytes.setdefault(use.pid, {})[use.gpu] = use.size
            if use.seat not in ("", target.seat, f"process/{use.pid}"):
                strangers.add(use.pid)  # the container's pid came back as somebody else
        members = [
            Member(who=process, gpu_bytes=gpu_bytes.get(process.pid, {}))
            for process in tree(root)
            if process.pid not in strangers and await self.calls.knows(group, process)
        ]
        if not members:
            raise NoMemberError(f"no process of container {target.container_id} uses a GPU")
        return Unit(target=target, group=group, epoch=epoch, root=root, members=tuple(members))

    async def _half(self, unit: Unit, goal: Goal, note: Note, *, replaying: bool = False) -> Ending:
        """Follow the procedure to its end."""
        try:
            states, frozen = await self._observe(unit, unit.group)
        except StepFailedError:
            states = [Seen.UNKNOWN] * len(unit.members)
            frozen = any(stopped(process) for process in self._living(unit))
        procedure = Procedure(goal, states, frozen=frozen, replaying=replaying)
        ending = Ending("started", vram_bytes=unit.vram_bytes)
        while isinstance(step := procedure.next(), Step):
            if step.verb not in READS:
                await note(step.verb, None if step.member is None else unit.members[step.member].who.pid)
            began = time.monotonic()
            try:
                seen, killed = await self._do(unit, step, procedure.states)
            except StepFailedError as error:
                procedure.failed(step, error.trouble, error.text)
            else:
                procedure.done(step, seen, killed)
            ending.last_call_at = time.time()
            label = _LABELS.get(step.verb, str(step.verb))
            ending.seconds[label] = ending.seconds.get(label, 0.0) + time.monotonic() - began
        ending.outcome, ending.reason = step.outcome, step.reason
        ending.host_bytes = unit.vram_bytes if step.outcome == "parked" else 0
        return ending

    async def _do(self, unit: Unit, step: Step, states: list[Seen]) -> tuple[Seen | None, int]:
        """One step. Returns what STATE read and how many KILL found alive. Raises StepFailedError."""
        if step.member is not None:
            member = unit.members[step.member]
            if step.verb is Verb.STATE:
                return await self.calls.state(unit.group, member), 0
            await self.calls.move(unit.group, step.verb, member, unit.epoch)
            return None, 0
        match step.verb:
            case Verb.EVIDENCE:
                await self._prove(unit)
            case Verb.ROOM:
                await self._make_sure_of_room(unit, states)
            case Verb.VERIFY:
                await self._verify(unit)
            case Verb.FREEZE:
                await self._signal_all(unit, signal.SIGSTOP, until_stopped=True)
            case Verb.THAW:
                await self._signal_all(unit, signal.SIGCONT, until_stopped=False)
            case Verb.KILL:
                return None, await self._kill(unit)
        return None, 0

    async def _observe(self, unit: Unit, key: str) -> tuple[list[Seen], bool]:
        """States without asking about stopped processes (that hangs), and whether anything is stopped.

        We freeze only after a checkpoint: what is stopped and holds no memory is CHECKPOINTED.
        """
        frozen = any(stopped(process) for process in self._living(unit))
        listed = {use.pid for use in await self.calls.processes(key)} if frozen else set()
        states = []
        for member in unit.members:
            state = Seen.UNKNOWN if alive(member.who) else Seen.GONE
            if stopped(member.who) and member.who.pid not in listed:
                state = Seen.CHECKPOINTED
            states.append(state)
        return states, frozen

    async def _verify(self, unit: Unit) -> None:
        for member in unit.members:
            state = await self.calls.state(unit.group, member)
            if state is not Seen.RUNNING:
                raise StepFailedError(Trouble.REFUSED, f"pid {member.who.pid} is {state} and not RUNNING")

    async def _prove(self, unit: Unit) -> None:
        """All checkpointed, none listed, memory fell. Waits a little: real drivers show it late."""
        for member in unit.members:
            state = await self.calls.state(unit.group, member)
            if state is not Seen.CHECKPOINTED:
                raise StepFailedError(Trouble.REFUSED, f"pid {member.who.pid} is {state} and not CHECKPOINTED")
        deadline = time.monotonic() + self.calls.patience.wall(self.calls.patience.settle_seconds)
        while missing := await self._missing_evidence(unit):
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, missing)
            await asyncio.sleep(POLL_SECONDS)

    async def _missing_evidence(self, unit: Unit) -> str:
        """What still speaks against the memory being free; empty when nothing does."""
        listed = {use.pid for use in await self.calls.processes(unit.group)}
        still = sorted(listed & {member.who.pid for member in unit.members})
        if still:
            return f"the driver still lists {still} as using GPU memory"
        if not unit.baseline:
            return ""
        now = await self._unaccounted(unit)
        for gpu, size in unit.footprint.items():
            fell = unit.baseline.get(gpu, 0) - now.get(gpu, 0)
            if fell < FREED_SHARE * size:
                return f"memory in use on {gpu} fell by {fell} of {size} bytes"
        return ""

    async def _unaccounted(self, unit: Unit) -> dict[str, int]:
        """Bytes in use on each GPU of the unit, without those of processes outside it."""
        ours = {member.who.pid for member in unit.members}
        used = {gpu: used for gpu, (used, _) in (await self.calls.memory(unit.group)).items()}
        for use in await self.calls.processes(unit.group):
            if use.pid not in ours:
                used[use.gpu] = used.get(use.gpu, 0) - use.size
        return {gpu: used.get(gpu, 0) for gpu in unit.footprint}

    async def _make_sure_of_room(self, unit: Unit, states: list[Seen]) -> None:
        """Free memory on each GPU for all that is still checkpointed: a restore without room destroys the process."""
        need: dict[str, int] = {}
        for member, state in zip(unit.members, states, strict=True):
            if state is Seen.CHECKPOINTED:
                for gpu, size in member.gpu_bytes.items():
                    need[gpu] = need.get(gpu, 0) + size
        if not need:
            share = unit.target.vram_bytes // max(1, len(unit.target.gpus))
            need = dict.fromkeys(unit.target.gpus, share)
        deadline = time.monotonic() + self.calls.patience.wall(self.calls.patience.settle_seconds)
        while missing := self._missing_room(need, await self.calls.memory(unit.group)):
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, missing)
            await asyncio.sleep(POLL_SECONDS)

    def _missing_room(self, need: dict[str, int], memory: dict[str, tuple[int, int]]) -> str:
        for gpu, size in need.items():
            used, total = memory.get(gpu, (0, 0))
            if size == 0 and used > total * UNKNOWN_FOOTPRINT_IDLE_SHARE:
                return f"{gpu} has {used} bytes in use, and nobody knows how much the seat needs"
            if total - used < size + self.margin_bytes:
                return f"{gpu} has {total - used} bytes free and the seat needs {size + self.margin_bytes}"
        return ""

    def _living(self, unit: Unit) -> list[Identity]:
        """Every process of the seat that exists: the container's tree, and members that left it."""
        found = tree(unit.root) if unit.root is not None else []
        return found + [m.who for m in unit.members if m.who not in found and alive(m.who)]

    async def _signal_all(self, unit: Unit, signum: signal.Signals, *, until_stopped: bool) -> None:
        deadline = time.monotonic() + self.calls.patience.floor_wall_seconds
        try:
            for process in self._living(unit):
                send(process, signum)
            while not all(stopped(process) is until_stopped for process in self._living(unit)):
                if time.monotonic() > deadline:
                    raise StepFailedError(Trouble.REFUSED, f"{signum.name} did not take effect")
                await asyncio.sleep(POLL_SECONDS / 10)
        except PermissionError as error:
            raise StepFailedError(Trouble.REFUSED, f"{signum.name} refused: {error.strerror}") from error

    async def _kill(self, unit: Unit) -> int:
        """SIGKILL to all, children first, until none exists and the driver lists none. Raises StepFailedError."""
        deadline = time.monotonic() + self.calls.patience.wall(self.calls.patience.base_seconds)
        killed: set[Identity] = set()
        while living := {*self._living(unit), *(process for process in killed if alive(process))}:
            try:
                for process in sorted(living, key=lambda who: -who.start):
                    killed |= {process} if send(process, signal.SIGKILL) else set()
            except PermissionError as error:
                raise StepFailedError(Trouble.REFUSED, f"SIGKILL refused: {error.strerror}") from error
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, f"pids {sorted(p.pid for p in living)} do not end")
            await asyncio.sleep(POLL_SECONDS)
        ours = {process.pid for process in killed} | {member.who.pid for member in unit.members}
        while still := ours & {use.pid for use in await self.calls.processes(unit.group)}:
            if time.monotonic() > deadline:
                raise StepFailedError(Trouble.REFUSED, f"pids {sorted(still)} ended but still hold GPU memory")
            await asyncio.sleep(POLL_SECONDS)
        return len(killed)
