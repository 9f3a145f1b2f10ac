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
from services.checkpointer.backends.evidence import Evidence
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

POLL_SECONDS = 0.01

_LABELS = {Verb.EVIDENCE: "verify", Verb.VERIFY: "verify"}


def container_process(container_id: str) -> Identity | None:
    """First process of a container named ``process://<pid>``; None when it is gone."""
    scheme, _, pid = container_id.partition("://")
    return identify(int(pid)) if scheme == "process" and pid.isdigit() else None


@dataclass
class DriverBackend:
    """Parks and activates by the checkpoint API of whichever driver the helper speaks to."""

    calls: DriverCalls
    evidence: Evidence
    locate: Callable[[str], Identity | None] = container_process
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
            return unit.model_copy(update={"baseline": await self.evidence.baseline(unit)})
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
                await self.evidence.prove(unit)
            case Verb.ROOM:
                await self.evidence.make_sure_of_room(unit, states)
            case Verb.VERIFY:
                await self.evidence.verify(unit)
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
