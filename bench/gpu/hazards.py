"""Hazards H1 to H16 of docs/dev/checkpointer.md on hardware. Each has its own target process, and may lose it.

``promise`` is the behaviour that the product guarantees, ``kept`` whether it held. ``driver`` records what this driver
does to an unprotected process; it is neither right nor wrong.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.gpu import machine
from bench.gpu.child import Child, ChildError
from bench.gpu.driver import ROWS, WAITS, play
from bench.gpu.room import CaseError, Room, Target, do
from services.checkpointer.processes import identify, stopped

Finding = dict[str, Any]
GIB_BYTES = machine.GIB


async def h1(room: Room, gib: float) -> Finding:
    """A restore without room destroys the process: the product does not try, and the seat stays parked."""
    async with room.target(gib) as target:
        park = await room.checkpointer.park(target.seat)
        async with room.filled():
            refused = await room.checkpointer.activate(target.seat)
        await room.settled(room.total_bytes - int((gib + 1 / 8) * GIB_BYTES))
        activate = await room.checkpointer.activate(target.seat)
        intact = await target.intact() if activate.outcome == "active" else {}
    outcomes = [park.outcome, refused.outcome, activate.outcome]
    driver = await _unprotected("H1", room, gib)
    kept = outcomes == ["parked", "parked", "active"] and all(intact.values())
    return {"kept": kept, "outcomes": outcomes, "reason": refused.reason, "driver": driver}


async def h2(room: Room, gib: float) -> Finding:
    """Killing a live process that was restored hung hosts: the product locks and checkpoints it before the kill."""
    before = await room.used()
    async with room.target(gib) as target:
        outcomes = [(await room.checkpointer.park(target.seat)).outcome]
        outcomes.append((await room.checkpointer.activate(target.seat)).outcome)
        began = time.perf_counter()
        kill = await room.checkpointer.kill(target.seat)
        seconds = time.perf_counter() - began
        freed = await room.settled(before + GIB_BYTES // 8)
    steps = [verb for verb in ("lock", "checkpoint", "kill") if verb in kill.seconds]
    kept = outcomes == ["parked", "active"] and freed and steps == ["lock", "checkpoint", "kill"]
    return {
        "kept": kept,
        "outcomes": [*outcomes, kill.outcome],
        "reason": f"{', '.join(steps)} in {seconds:.2f} s",
    }


async def h3(room: Room, gib: float) -> Finding:
    """A lock kills a process whose NVML was unloaded without shutdown (610): parked, or known to be lost."""
    return await _survives(room, gib, "nvml", may_be_lost=True)


async def h4(room: Room, gib: float) -> Finding:
    """A synchronize as the first call while parked crashes the process: it is frozen, so it makes no call."""
    async with room.target(gib) as target:
        park = await room.checkpointer.park(target.seat)
        target.child.send("synchronize")
        try:
            await target.child.answer(room.hang_seconds / 4)
            still = False
        except TimeoutError:
            still = target.child.running
        outcomes = [park.outcome, (await room.checkpointer.activate(target.seat)).outcome]
        thawed = await _synchronized(target)
    driver = await _unprotected("H4", room, gib)
    seen = f"{driver}; when it was thawed for its restore, with the call waiting (unprotected): {thawed}"
    return {"kept": park.outcome == "parked" and still, "outcomes": outcomes, "driver": seen}


async def _synchronized(target: Target) -> str:
    """Result of a synchronize that waited for the thaw; in production the router sends no request then."""
    try:
        await target.child.answer(target.seconds)
        return "it came back whole" if all((await target.intact()).values()) else "it came back damaged"
    except (ChildError, TimeoutError) as error:
        return str(error)[:200] or "it did not return"


async def h5(room: Room, gib: float) -> Finding:
    """Driver calls on a stopped process hang: the product calls none, says why at once, and parks it when it runs."""
    async with room.target(gib) as target:
        await _stop(target)
        stopped_park = await room.checkpointer.park(target.seat)
        target.child.signal(signal.SIGCONT)
        park = await room.checkpointer.park(target.seat)
        activate = await room.checkpointer.activate(target.seat)
        intact = await target.intact() if activate.outcome == "active" else {}
    outcomes = [stopped_park.outcome, park.outcome, activate.outcome]
    driver = await _unprotected("H5", room, gib)
    hung = stopped_park.wall > room.hang_seconds
    kept = not hung and outcomes[1:] == ["parked", "active"] and all(intact.values())
    return {"kept": kept, "outcomes": outcomes, "reason": stopped_park.reason, "driver": driver}


async def _stop(target: Target) -> None:
    """SIGSTOP, in effect when this returns."""
    target.child.signal(signal.SIGSTOP)
    async with asyncio.timeout(30):
        while not all((who := identify(pid)) is not None and stopped(who) for pid in target.pids):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # there is no event for it


async def h6(room: Room, gib: float) -> Finding:
    """The copy is host memory of the process itself, and counts against its pod's limit."""
    async with room.target(gib) as target:
        before = machine.resident(target.pids)
        park = await room.checkpointer.park(target.seat)
        grown = machine.resident(target.pids) - before
        activate = await room.checkpointer.activate(target.seat)
        intact = await target.intact()
    share = grown / max(1, park.vram_bytes)
    return {
        "kept": [park.outcome, activate.outcome] == ["parked", "active"] and all(intact.values()),
        "outcomes": [park.outcome, activate.outcome],
        "driver": f"resident memory grew by {grown / GIB_BYTES:.2f} GiB, {share:.0%} of the VRAM",
    }


async def h7(room: Room, gib: float) -> Finding:
    """A process group of one with NCCL aborts on some drivers: refused, or it comes back whole."""
    return await _survives(room, gib, "nccl", may_be_lost=False)


async def h9(room: Room, gib: float) -> Finding:
    """Memory shared by CUDA IPC breaks a checkpoint: refused, back whole, or a cold start with its memory free."""
    return await _survives(room, gib, "share", may_be_lost=True)


async def h10(room: Room, gib: float) -> Finding:
    """Managed memory is not supported: refused, or it comes back whole."""
    return await _survives(room, gib, "managed", may_be_lost=False)


async def h14(room: Room, gib: float) -> Finding:
    """A map that does not name every GPU is refused by the driver and changes nothing; the product never sends one."""
    if not room.described.get("capabilities", {}).get("gpu_map"):
        return {"skipped": "this driver takes no GPU map; needs 580 or newer"}
    stranger = "GPU-00000000-0000-4000-8000-000000000001"
    async with room.target(gib) as target, room.bare() as bare:
        pid = target.child.pid
        for verb in ("lock", "checkpoint"):
            await do(bare, verb, pid, target.seconds)
        wrong = await do(bare, "restore", pid, target.seconds, expect=None, pairs=[[stranger, stranger]])
        state = await do(bare, "state", pid, target.seconds, expect=None)
        if wrong["code"] != 0:
            await do(bare, "restore", pid, target.seconds)
        await do(bare, "unlock", pid, target.seconds)
        intact = await target.intact()
    seen = f"the wrong map answered {wrong['name']}, the process was {state['value']} after it"
    return {"kept": all(intact.values()), "driver": seen}


async def h15(room: Room, gib: float) -> Finding:
    """Some drivers do not answer about another process at all: detected by the first call, not during a park."""
    async with room.target(gib) as target, room.bare() as bare:
        state = await do(bare, "state", target.child.pid, 60, expect=None)
    return {"kept": state["code"] == 0 and state["value"] == "RUNNING", "driver": f"state: {state['name']}"}


async def _survives(room: Room, gib: float, op: str, *, may_be_lost: bool) -> Finding:
    """After any operation ``op`` of the target its park is refused with a reason, or the target comes back intact."""
    before = await room.used()
    async with room.target(gib) as target:
        try:
            answer = await target.child.ask(op, target.seconds)
        except ChildError as error:
            return {"skipped": f"this machine cannot do it: {str(error)[:200]}"}
        park = await room.checkpointer.park(target.seat)
        outcomes, reason = [park.outcome], park.reason
        if park.outcome == "parked":
            activate = await room.checkpointer.activate(target.seat)
            outcomes, reason = [*outcomes, activate.outcome], reason or activate.reason
        lost = outcomes[-1] in ("lost", "gone")
        intact = {} if lost else await target.intact()
    freed = await room.settled(before + GIB_BYTES // 8)
    refused = outcomes == ["active"] and bool(reason)
    whole = outcomes == ["parked", "active"]
    kept = (may_be_lost and freed) if lost else ((refused or whole) and all(intact.values()))
    return {"kept": kept, "outcomes": outcomes, "reason": reason, "answer": answer}


async def _unprotected(hazard: str, room: Room, gib: float) -> str:
    """What the driver answers to the first row of a hazard. The target is lost."""
    row = next(row for row in ROWS if row.hazard == hazard)
    try:
        async with room.bare() as bare, _Hardware(room, gib, bare) as driver:
            seen = await play(driver, row)
    except (CaseError, ChildError, TimeoutError) as error:
        return f"not seen: {type(error).__name__}: {error}"[:300]
    about = zip(row.steps, seen, strict=True)
    return ", ".join(f"{step} {answer}" for (_, _, shown), (step, answer) in about if shown and answer)


class _Hardware(AsyncExitStack):
    """The driver of this machine. What only a fake can do, or count, has no answer."""

    def __init__(self, room: Room, gib: float, bare: Child) -> None:
        super().__init__()
        self._room, self._gib, self._bare = room, gib, bare
        self._targets: dict[str, Target] = {}
        self._filled = AsyncExitStack()
        self._late: Child | None = None
        """Whose answer is still to come."""

    async def do(self, step: list[str], expected: str) -> str:  # noqa: ARG002 - what comes is recorded
        """Implements Driver."""
        room, targets = self._room, self._targets
        match step:
            case [name, "has", *_]:
                targets[name] = await self.enter_async_context(room.target(self._gib))
                self.push_async_callback(targets[name].child.kill)
            case ["fill", _]:
                await self._filled.enter_async_context(room.filled())
            case ["empty"]:
                await self._filled.aclose()
                await room.settled(room.total_bytes // 2)
            case ["stop", name]:
                await _stop(targets[name])
            case ["continue", name]:
                targets[name].child.signal(signal.SIGCONT)
            case ["kill", name]:
                await targets[name].child.kill()
            case [name, "synchronizes"]:
                targets[name].child.send("synchronize")
                return await self._answer(targets[name].child)
            case ["lock" | "checkpoint" | "restore" | "unlock" | "state" as verb, name]:
                self._bare.send(verb, pid=targets[name].child.pid, **({"timeout_ms": 1000} if verb == "lock" else {}))
                return await self._answer(self._bare)
            case ["then", *_] if self._late is not None:
                return await self._answer(self._late)
        return ""

    async def _answer(self, child: Child) -> str:
        try:
            answer = await child.answer(self._room.hang_seconds)
        except TimeoutError:
            self._late = child
            return WAITS
        except ChildError as error:
            return str(error)[:200]
        return str(answer.get("value") or answer.get("name", "SUCCESS"))


HAZARDS: dict[str, Callable[[Room, float], Awaitable[Finding]]] = {
    "h1": h1, "h2": h2, "h3": h3, "h4": h4, "h5": h5, "h6": h6, "h7": h7, "h9": h9, "h10": h10, "h14": h14, "h15": h15,
}  # fmt: skip
ELSEWHERE = {
    "h8": "NCCL between processes needs two GPUs; this bench has one",
    "h11": "MIG needs a GPU in MIG mode; the product refuses it by the mode that NVML reports (tests/checkpointer)",
    "h12": "a move to another GPU needs two of one kind",
    "h13": "device nodes that a container lacks need a container runtime",
    "h16": "an engine's sleep mode and a checkpoint together need that engine",
}
"""Hazards that one GPU without containers cannot show, and why."""


async def meet(room: Room, name: str, gib: float) -> Finding:
    """Run one hazard; an error on the way is part of the finding."""
    finding: Finding = {"hazard": name, "promise": (HAZARDS[name].__doc__ or "").strip()}
    try:
        return finding | await HAZARDS[name](room, gib)
    except (CaseError, ChildError, TimeoutError) as error:
        return finding | {"kept": False, "reason": f"{type(error).__name__}: {error}"}
