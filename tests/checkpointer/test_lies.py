"""Engines that lie, as real processes with the APIs of their vendors: nothing wrong is served and no seat is stuck.

Each engine has its own GPU, and all engines of a vendor run at the same time: one test per vendor and half. What
becomes of each is in ``lie_cases.ENDS``; what must never happen is in ``Seat.promise``.

Deadlines are long, so that a busy machine is no lie. Only what never comes, and what an engine reports that it never
answers, is waited for briefly (``wait_briefly``).
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.lies import Lie
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.messages import Outcome, SeatProgress, SeatTarget
from services.checkpointer.backends.engine import EngineBackend
from services.checkpointer.backends.port import Ending, EngineReply, EngineSilentError, SeatProcesses
from services.checkpointer.engine_http import EngineHttp
from services.checkpointer.processes import alive, identify
from tests.checkpointer.lie_cases import ENDS, SERVES
from tests.checkpointer.world import GIB, Checkpointer, Engine, Node, checkpointer, node, own_address, plain_environment
from tests.thorough import part
from tests.until import until

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--enable-sleep-mode",),
    "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"),
    "llamacpp": ("--no-models-autoload", "--metrics"),
    "ollama": (),
}
BACKENDS = dict(zip(SWITCHES, SWITCHES, strict=True)) | {"llamacpp": "unload", "ollama": "unload"}
VRAM, TOKENS = 20 * GIB, 8
PATIENT_SECONDS, BRIEF_SECONDS = 60.0, 0.5
"""Wall: for what comes, however busy the machine is, and for what never comes."""
PATIENT = {"floor_wall_seconds": PATIENT_SECONDS, "settle_floor_wall_seconds": PATIENT_SECONDS}
NEVER: Mapping[str, frozenset[str]] = {
    "parked": frozenset({Lie.SLEEP_FAILS, Lie.SLEEP_HANGS, Lie.SLEEP_NOOP, Lie.SLEEP_IGNORED, Lie.SLEEP_HALF}),
    "active": frozenset({Lie.WAKE_FAILS, Lie.WAKE_HANGS, Lie.WAKE_NOOP, Lie.WAKE_IGNORED}),
}
"""State → lies of engines that never reach it."""
HANGS = frozenset({Lie.SLEEP_HANGS, Lie.WAKE_HANGS, Lie.WAKE_WEDGES})

ENGINES = """
import json, os, signal, sys
from kybernate.dev.fakes.engine.__main__ import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order = json.loads(line)
    if pid := os.fork():
        print(pid, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    for target, source in enumerate((os.devnull, order["log"], order["log"])):
        os.dup2(os.open(source, os.O_RDWR | os.O_CREAT | os.O_APPEND), target)
    main(order["options"])
"""
"""Forks an engine for each line: 17 interpreters that import the same would take most of the test's time. Its command
line, which the engines inherit and the checkpointer reads, has the vendors' switches."""


@dataclass
class Forked:
    """A process of ENGINES, as far as ``Engine`` needs it."""

    pid: int

    def __post_init__(self) -> None:
        self._who = identify(self.pid)

    async def wait(self) -> None:
        await until(
            lambda: self._who is None or not alive(self._who), what=f"{self.pid} has ended", timeout=PATIENT_SECONDS
        )


@dataclass
class ForkedEngine(Engine):
    """An engine of ENGINES; ``log`` is the file that it writes."""

    log: Path = Path()

    def hangs(self) -> bool:
        """True once it has reported that it does not answer a request."""
        return "engine.hangs" in self.log.read_text()

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def world() -> AsyncIterator[tuple[Node, asyncio.subprocess.Process]]:
    """A node with a GPU for each lie, and the process that forks its engines."""
    switches = (switch for vendor in SWITCHES.values() for switch in vendor)
    async with node(options=("--gpus", str(len(ENDS)), "--memory", "80GiB")) as here:
        forks = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENGINES, *switches),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=plain_environment(),
        )
        try:
            yield here, forks
        finally:
            await forks.communicate(b"")  # its stdin ends


def wait_briefly(
    patch: pytest.MonkeyPatch, never: Callable[[str, Outcome], bool], hangs: Callable[[str], bool]
) -> None:
    """Wait BRIEF_SECONDS for a state that a seat ``never`` reaches, and for calls of an engine that reports that it
    ``hangs``; PATIENT_SECONDS for all other calls."""
    settled, call = EngineBackend._settled, EngineHttp.call

    async def settle(
        self: EngineBackend, seat: SeatProcesses, ending: Ending, wanted: Outcome, seconds: float
    ) -> Outcome | None:
        if not never(seat.target.seat, wanted):
            return await settled(self, seat, ending, wanted, seconds)
        brief = replace(self.calls.timeouts, settle_seconds=0.0, settle_floor_wall_seconds=BRIEF_SECONDS)
        hasty = replace(self, calls=replace(self.calls, timeouts=brief))
        return await settled(hasty, seat, ending, wanted, min(seconds, BRIEF_SECONDS))

    async def ask(
        self: EngineHttp, seat: SeatProcesses, method: str, path: str, *, seconds: float, **rest: Any
    ) -> EngineReply:
        patience = max(seconds, PATIENT_SECONDS)
        asked = asyncio.create_task(call(self, seat, method, path, seconds=patience, **rest))
        try:
            if method == "POST" or path == "/health":  # the other questions about its state are answered all the same
                await until(
                    lambda: asked.done() or hangs(seat.target.seat), what=f"{path} is answered", timeout=patience
                )
                await asyncio.wait([asked], timeout=BRIEF_SECONDS)
                if not asked.done():
                    raise EngineSilentError(f"{method} {path} was not answered")
            return await asked
        finally:
            asked.cancel()

    patch.setattr(EngineBackend, "_settled", settle)
    patch.setattr(EngineHttp, "call", ask)


@dataclass
class Seat:
    """One engine in its seat."""

    lie: str
    it: Checkpointer
    engine: ForkedEngine
    ends: list[str] = field(default_factory=list)

    async def half(self, verb: str) -> SeatProgress:
        """A park or an activation from beginning to end."""
        target, group = self.engine.target, self.engine.target.seat
        if verb == "park":
            (done,) = (await self.it.do(park=(target,), group=group)).park
        else:
            status = await self.it.do(activate=target, group=group)
            done = status.activate
        self.ends.append("cold start" if done.outcome in ("lost", "gone") else done.outcome)
        return done

    async def answer(self, tokens: int = TOKENS) -> str:
        """What it answers to the request that a router would forward."""
        body = {"model": "m", "prompt": "hello", "max_tokens": tokens, "temperature": 0, "seed": 1}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENT_SECONDS)) as http,
            http.post(f"{self.engine.target.endpoint}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, f"{self.lie}: {await answer.text()}"
            return str((await answer.json())["choices"][0]["text"])

    async def used(self) -> int:
        return (await self.it.node.used())[self.engine.target.gpus[0]]

    async def promise(self, end: SeatProgress) -> None:
        """What holds after every half, whatever the engine did."""
        match end.outcome:
            case "active":
                assert await self.answer() == expected_text("m", "hello", TOKENS), self.lie
                assert await self.used() == VRAM, self.lie
            case "parked":
                assert await self.used() <= VRAM // 10, f"{self.lie}: its memory was published as free"
                assert end.residue_bytes >= await self.used(), f"{self.lie}: what it keeps is on its account"
            case "lost" | "gone":
                await asyncio.wait_for(self.engine.process.wait(), 60)
                assert await self.used() == 0, self.lie
            case other:
                raise AssertionError(f"{self.lie}: the seat is stuck in {other}: {end.reason}")

    async def play(self) -> str:
        """A park, and activations while it is parked: the ends. The second brings it back or starts it cold."""
        for verb in ("park", "activate", "activate"):
            await self.promise(await self.half(verb))
            if self.ends[-1] != "parked":
                break
        assert self.ends[-1] != "parked", f"{self.lie}: the model never comes back"
        return SERVES if self.ends == ["active"] else ", ".join(self.ends)


async def start(
    here: Node, it: Checkpointer, forks: asyncio.subprocess.Process, *engines: tuple[str, str]
) -> list[Seat]:
    """Engines that serve, by (vendor, lie); lie "": it tells the truth. Each has a GPU."""
    seats = [await fork(here, it, api, lie, place, forks) for place, (api, lie) in enumerate(engines)]
    for seat in seats:

        async def serves(seat: Seat = seat) -> bool:
            try:
                return await seat.answer() != ""
            except (aiohttp.ClientError, AssertionError, TimeoutError):
                return False

        await until(serves, what=f"{seat.engine.target.endpoint} {seat.lie} serves", timeout=PATIENT_SECONDS)
    return seats


async def fork(here: Node, it: Checkpointer, api: str, lie: str, place: int, forks: asyncio.subprocess.Process) -> Seat:
    """An engine that starts."""
    host, port = own_address(), 20_000 + place  # a port that is free may be so for two engines that begin
    name, gpu = f"s{place:02d}", here.gpus[place]
    lies = ("--lie", lie) if lie else ()
    log = here.folder / f"{name}.log"
    environment = {
        **plain_environment(),
        "KYB_FAKE_DRIVER": str(here.socket),
        "KYB_FAKE_GPU": gpu,
        "KYB_GPU_SEAT": name,
        "KYB_SPEED": "50",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    options = (
        "--api",
        api,
        *SWITCHES[api],
        *lies,
        "--model",
        "m",
        "--vram",
        str(VRAM),
        "--host",
        host,
        "--port",
        str(port),
    )
    order = {"options": options, "environment": environment, "log": str(log)}
    forks.stdin.write(json.dumps(order).encode() + b"\n")
    pid = int(await forks.stdout.readline())
    target = SeatTarget(
        seat=name,
        pod_uid=f"uid-{name}",
        container_id=f"process://{pid}",
        gpus=(gpu,),
        vram_bytes=VRAM,
        backend=BACKENDS[api],
        endpoint=f"http://{host}:{port}",
    )
    engine = ForkedEngine(Forked(pid), target, log)
    here.engines.append(engine)
    return Seat(lie, it, engine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("api", part(SWITCHES, 2))
async def test_no_lie_ends_in_a_wrong_answer_a_lost_request_or_a_stuck_seat(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(ENDS) == {"", *Lie}
    async with world() as (here, forks), checkpointer(here, **PATIENT) as it:
        seats = await start(here, it, forks, *((api, lie) for lie in ENDS))
        by_name = {seat.engine.target.seat: seat for seat in seats}
        wait_briefly(
            monkeypatch,
            lambda name, wanted: by_name[name].lie in NEVER[wanted],
            lambda name: by_name[name].lie in HANGS and by_name[name].engine.hangs(),
        )
        found = dict(zip(ENDS, await asyncio.gather(*(seat.play() for seat in seats)), strict=True))
        assert found == {lie: ends[api] for lie, ends in ENDS.items()}
        assert (await here.violations())["count"] == 0


@pytest.mark.timeout(180)
async def test_a_request_that_runs_is_answered_to_its_end() -> None:
    async with world() as (here, forks), checkpointer(here, **PATIENT) as it:
        seats = await start(here, it, forks, *((api, "") for api in SWITCHES))
        for seat in seats:
            before = (await here.client.call("stats"))["requests"]
            request = asyncio.create_task(seat.answer(3000))

            async def runs(before: int = before) -> bool:
                return bool((await here.client.call("stats"))["requests"] > before)

            await until(runs, what="the request runs", timeout=PATIENT_SECONDS)
            end = await seat.half("park")
            assert await request == expected_text("m", "hello", 3000)
            await seat.promise(end)
        assert (await here.violations())["count"] == 0
