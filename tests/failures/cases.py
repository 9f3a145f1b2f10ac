"""The failures that are tried: each service killed at each step of a switch and of a move, durable state lost or
torn, a full disk, a second instance, a clock that jumps.

A case breaks something and returns what a client saw. It does not repair: what does not come back by itself needs an
``action``, which the runner then tries.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kybernate.dev.stack.layout import commands
from tests.failures.world import MIG_RESTART, Asked, Failures


@dataclass(frozen=True)
class Case:
    """One failure."""

    section: str
    what: str
    """What fails."""
    when: str
    break_it: Callable[[Failures], Awaitable[Asked]]
    way: str = ""
    """How the incoming seat comes to another group; empty: it stays on its own."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.what}: {self.when}" + f" (move by {self.way})" * bool(self.way)


# --- kills at the steps of a switch, and of a move -----------------------------------------------------------------

SWITCH = "Killed at a step of a switch"
STEPS = {
    "while the victim drains": "",
    "the switch is recorded": '"kind":"switch"',
    "the victim is locked": '"step":"lock"',
    "the victim's memory is saved": '"step":"checkpoint"',
    "the victim is frozen": '"step":"freeze"',
    "the victim is parked": '"half":"activate"',
    "memory is given back to the incoming seat": '"step":"restore"',
    "the incoming seat is unlocked": '"step":"unlock"',
    "the switch is done": '"kind":"done"',
}
"""The text in the checkpointer's journal that tells each step."""
MOVES = {f"Killed at a step of a move by {way}": way for way in ("map", "restart", MIG_RESTART)}
RESTART_STEPS = {
    "the incoming engine is ended": '"kind":"kill"',
    "the incoming seat is at the start gate": "waiting",
    "the incoming engine starts on the other group": "starting",
    "the incoming seat serves there": "active",
}
STEPS_OF = {
    "": STEPS,
    "map": {step: mark for step, mark in STEPS.items() if mark},
    "restart": RESTART_STEPS,
    MIG_RESTART: RESTART_STEPS,
}
"""By way of a move; without quotes: the state of the incoming seat, or one after it."""
KILLED = {
    "plugin": "plugin",
    "GPU manager": "gpu_manager",
    "checkpointer": "checkpointer",
    "router": "router",
    "nats-server": "nats",
    "kubelet": "kubelet",
    "victim's engine": "",
    "incoming engine": "",
}


def killed_at(process: str, mark: str, way: str = "") -> Callable[[Failures], Awaitable[Asked]]:
    """A kill when a switch, with a ``way`` a move, has come so far; without ``mark``, while the victim drains: it
    answers a request until the kill is done."""

    async def break_it(world: Failures) -> Asked:
        victim, incoming = world.victim, world.incoming
        name = KILLED[process] or (victim if process.startswith("victim") else incoming)
        before = world.journaled()
        async with asyncio.TaskGroup() as group:
            if mark:
                if way:
                    await world.move()
                asked = group.create_task(world.ask(incoming))
                reached = world.until_recorded(mark, before) if '"' in mark else world.until_state(incoming, mark)
                await reached
                await world.kill(name)
            else:
                async with world.answering(victim):
                    asked = group.create_task(world.ask(incoming))
                    await world.until_state(victim, "draining")
                    await world.kill(name)
            await world.until_restarted(name)
        return asked.result()

    return break_it


# --- durable state lost or torn, while one model is active and one parked ------------------------------------------

LOST = "Durable state lost or damaged (one model active, one parked)"


def lost(services: tuple[str, ...], *paths: str) -> Callable[[Failures], Awaitable[Asked]]:
    """These services are down, and these files and folders are gone when they start again."""

    async def break_it(world: Failures) -> Asked:
        async with world.without(*services) as folder:
            for path in paths:
                if (folder / path).is_dir():
                    shutil.rmtree(folder / path)
                else:
                    (folder / path).unlink()
        return await world.ask(world.incoming)

    return break_it


def torn(service: str, pattern: str) -> Callable[[Failures], Awaitable[Asked]]:
    """The last record of the newest matching file is cut in half, as a crash during a write leaves it."""

    async def break_it(world: Failures) -> Asked:
        async with world.without(service) as folder:
            path = max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
            text = path.read_bytes()
            last = text.rstrip(b"\n").rfind(b"\n") + 1
            path.write_bytes(text[: last + (len(text) - last) // 2])
        return await world.ask(world.incoming)

    return break_it


# --- a full disk ---------------------------------------------------------------------------------------------------

FULL = "The disk is full (writes of one service fail, then work again)"


def full(service: str) -> Callable[[Failures], Awaitable[Asked]]:
    """No file of this service can grow while a switch is wanted; after three seconds there is room again."""

    async def break_it(world: Failures) -> Asked:
        async with asyncio.TaskGroup() as group, _no_room(world.stack.pids[service]):
            asked = group.create_task(world.ask(world.incoming))
            await asyncio.sleep(3)
        return asked.result()

    return break_it


@asynccontextmanager
async def _no_room(pid: int) -> AsyncIterator[None]:
    """The kernel refuses this process every write to a file (EFBIG; Python ignores SIGXFSZ)."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


# --- two of each ---------------------------------------------------------------------------------------------------

TWICE = "A second instance of a service on the same node"


SECOND_SECONDS = 90.0
"""How long a second instance may take to start and to notice the first; on a loaded machine."""
WITHOUT_MANAGER = b"checkpointer.serving"
"""In the log of a second checkpointer with other folders: no manager connects to it, so it may stay."""


def twice(service: str, *, folders: bool) -> Callable[[Failures], Awaitable[Asked]]:
    """A second process beside the first; ``folders``: with separate state and runtime folders."""

    async def break_it(world: Failures) -> Asked:
        stack = world.stack
        command = commands(stack.layout, stack.options)[service]
        env = dict(command.env)
        if folders:
            for name in {"KYB_STATE_DIR", "KYB_RUN_DIR"} & env.keys():
                env[name] = str(Path(env[name]).with_name(f"{Path(env[name]).name}-second"))
                Path(env[name]).mkdir(exist_ok=True)
        path = stack.folder / "logs" / f"second-{service}.log"
        log = path.open("ab")
        second = await asyncio.create_subprocess_exec(
            *command.argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECOND_SECONDS):
                    while second.returncode is None and WITHOUT_MANAGER not in path.read_bytes():
                        await asyncio.sleep(0.1)
            asked = await world.ask(world.incoming)
            got_jobs = list(Path(env.get("KYB_STATE_DIR", "/nowhere")).glob("journal/*.jsonl"))
            idle = WITHOUT_MANAGER in path.read_bytes() and not got_jobs
            if idle:  # and it says so
                served = next(line for line in path.read_text().splitlines() if WITHOUT_MANAGER.decode() in line)
                async with world.session.get(f"{json.loads(served)['health']}/readyz") as answer:
                    assert (await answer.json())["notes"]["bus"].startswith("no manager is connected at")
            stays = "the second gets no job" if idle else "the second serves too"
            asked.note = stays if second.returncode is None else "the second ends"
            return asked
        finally:
            with contextlib.suppress(ProcessLookupError):
                second.kill()
            await second.wait()

    return break_it


# --- clocks --------------------------------------------------------------------------------------------------------

CLOCK = "The wall clock jumps (libfaketime)"
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)
FAKETIME = next((path for path in LIBRARIES if os.path.exists(path)), None)


def jump(service: str, seconds: int) -> Callable[[Failures], Awaitable[Asked]]:
    """The service is started again with a clock that differs from the others'."""

    async def break_it(world: Failures) -> Asked:
        process = world.stack._process(service)
        command = process.command
        assert FAKETIME is not None
        fake = {"LD_PRELOAD": FAKETIME, "FAKETIME": f"{seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        await world.stack.pause(service)
        process.command = type(command)(command.name, command.argv, {**command.env, **fake}, command.stop_seconds)
        await world.stack.resume(service)
        try:
            asked = await world.ask(world.incoming)
        finally:
            await world.stack.pause(service)
            process.command = command
            await world.stack.resume(service)
        other = await world.ask(world.victim)
        return other if other.status != 200 else asked

    return break_it


def every_case() -> tuple[Case, ...]:
    """All of them, in the order of the page."""
    both = ("gpu_manager", "checkpointer")
    kills = [
        Case(section, process, step, killed_at(process, mark, way), way)
        for section, way in {SWITCH: "", **MOVES}.items()
        for step, mark in STEPS_OF[way].items()
        for process in KILLED
    ]
    losses = {
        "the manager's ledger": lost(("gpu_manager",), "state/ledger"),
        "the checkpointer's journal": lost(("checkpointer",), "state/journal"),
        "the checkpointer's records of parked seats": lost(("checkpointer",), "state/parked"),
        "journal and records of parked seats": lost(("checkpointer",), "state/journal", "state/parked"),
        "ledger and journal": lost(both, "state/ledger", "state/journal"),
        "the plugin's allocations": lost(("plugin",), "state/plugin-seats.json"),
        "the seat folders": lost(("plugin", *both), "run/seats"),
        "the whole state folder": lost(("plugin", *both), "state"),
        "the store of NATS": lost(("nats",), "nats/jetstream"),
        "half of the ledger's last record": torn("gpu_manager", "state/ledger"),
        "half of the journal's last record": torn("checkpointer", "state/journal/*.jsonl"),
        "half of a parked seat's record": torn("checkpointer", "state/parked/*.json"),
    }
    cases = [*kills, *(Case(LOST, what, "service restarted", act) for what, act in losses.items())]
    cases += [
        Case(FULL, f"disk of the {name}", "a switch is wanted", full(KILLED[name]))
        for name in ("GPU manager", "checkpointer", "plugin")
    ]
    for folders in (False, True):
        when = "with other state and runtime folders" if folders else "with the same folders"
        cases += [
            Case(TWICE, f"a second {name}", when, twice(KILLED[name], folders=folders)) for name in list(KILLED)[:4]
        ]
    for name in list(KILLED)[:4]:
        cases += [
            Case(CLOCK, f"clock of the {name}", f"{hours:+d} h", jump(KILLED[name], hours * 3600)) for hours in (1, -1)
        ]
    return tuple(cases)
