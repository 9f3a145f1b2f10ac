"""The stub library as a driver on which the rows of ``bench.gpu.driver`` are played."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from bench.gpu.driver import WAITS
from kybernate.cuda import result_name, state_name
from tests.stubs import stand as stubbed
from tests.stubs.stand import GIB, SECONDS, Child
from tests.until import until_blocking, until_equal

VERBS = ("lock", "checkpoint", "restore", "unlock", "state", "tid")
MARKS = {
    "joins": {"communicator": "tp"}, "leaves": {"communicator": None}, "inherits": {"stale": True},
    "shares": {"ipc": True}, "manages": {"managed": True},
}  # fmt: skip


def mapped(moves: list[str], gpus: list[str]) -> list[list[str]]:
    """``0>1`` by UUID; ``?`` is no GPU of the machine."""
    names = {"?": "GPU-00000000-0000-4000-8000-000000000000"} | {str(index): gpu for index, gpu in enumerate(gpus)}
    return [[names[end] for end in move.split(">")] for move in moves]


def arguments(words: list[str], pids: dict[str, int]) -> dict[str, Any]:
    """``verb=lock code=304 pid=a``"""
    pairs = [word.split("=") for word in words]
    return {name: pids[text] if name == "pid" else int(text) if text.isdigit() else text for name, text in pairs}


def counted(kinds: dict[str, int]) -> str:
    return " ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"


def in_gib(used: list[float]) -> str:
    return " ".join(f"{gib:g}" for gib in used)


class StubLibrary:
    """Processes that load the stub ``libcuda.so.1``."""

    def __init__(self, machine: stubbed.Stand, caller: Child) -> None:
        self.machine, self.caller = machine, caller
        self.children: dict[str, Child] = {}
        self.blocks: dict[str, int] = {}
        self.calls: dict[str, tuple[Child, asyncio.Future[dict[str, Any]]]] = {}

    async def do(self, step: list[str], expected: str) -> str:
        machine, children = self.machine, self.children
        match step:
            case [name, "has", gib, *where]:
                nodes = {"NVIDIA_VISIBLE_DEVICES": machine.gpus[0]} if "nodes" in where else {}
                children[name] = await machine.user(0, int("1" in where[1:]), **nodes)
                if gib != "0":
                    self.blocks[name] = await children[name].value("alloc", int(gib) * GIB)
            case ["fill", gib]:
                children["filler"] = await machine.user(int(gib))
            case ["empty"]:
                await self._killed(children["filler"])
            case ["stop", name]:
                stop(children[name].pid)
            case ["continue", name]:
                children[name].process.send_signal(signal.SIGCONT)
            case ["kill", name]:
                await self._killed(children[name])
            case [name, "ends"]:
                code = await children[name].ended()
                await machine.until_forgotten(children[name].pid)
                return signal.Signals(-code).name
            case ["caller", "dies"]:
                self.caller.process.kill()
                await self.caller.ended()
                self.caller = await machine.caller()
            case ["inject", fault, *rest]:
                await machine.inject(fault, **arguments(rest, {name: one.pid for name, one in children.items()}))
            case ["clear"]:
                await machine.inject("clear")
            case ["used"]:
                return in_gib(await machine.used_gib())
            case ["violations"]:
                return counted(await machine.violations())
            case [name, "shares"]:
                await children[name].value("share", self.blocks[name])
            case [name, "manages"]:
                await children[name].value("managed", GIB)
            case [name, how] if how in MARKS:
                await machine.mark(children[name].pid, **MARKS[how])
            case ["soon", *call]:
                await until_equal(lambda: self._answer(self._start(call), ""), expected, what=" ".join(call))
                return expected
            case ["then", *call]:
                return await self._answer(" ".join(call), expected)
            case call:
                return await self._answer(self._start(call), expected)
        return "SUCCESS"

    async def _killed(self, child: Child) -> None:
        child.process.kill()
        await child.ended()
        await self.machine.until_forgotten(child.pid)

    def _start(self, call: list[str]) -> str:
        match call:
            case [verb, name, *moves] if verb in VERBS:
                child, more = self.caller, [mapped(moves, self.machine.gpus)] if moves else []
                future = child.start(verb, self.children[name].pid, *more)
            case [name, how]:
                own = {"allocates": ("alloc", GIB), "asks": ("info",), "synchronizes": ("synchronize",)}
                child = self.children[name]
                future = child.start(*own.get(how, ("synchronize_stream",)))
        self.calls[" ".join(call)] = child, future
        return " ".join(call)

    async def _answer(self, call: str, expected: str) -> str:
        child, future = self.calls[call]
        if expected == WAITS:
            await self.machine.hangs(future, child)
            return WAITS
        ended = asyncio.ensure_future(child.process.wait())
        await asyncio.wait((future, ended), timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            return signal.Signals(-ended.result()).name if ended.done() else WAITS
        ended.cancel()
        code, value = future.result()["code"], future.result()["value"]
        return state_name(value) if code == 0 and call.startswith("state ") else result_name(code)


def stop(pid: int) -> None:
    """SIGSTOP, in effect."""
    os.kill(pid, signal.SIGSTOP)  # takes effect when the process is next scheduled
    stat = Path(f"/proc/{pid}/stat")
    until_blocking(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the process is stopped", saw=stat.read_text
    )
