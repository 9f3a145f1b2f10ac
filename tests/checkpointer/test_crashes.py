"""SIGKILL of the checkpointer, of the engine and of both at every step of a half, for every backend but the driver's.

The seat ends active or parked, or starts cold, and a replay that is interrupted at its end comes to the same end again.
A killed checkpointer is a job that stands still at the moment and is then forgotten, with all that it kept in memory;
the next one reads what it had written. The driver's prefixes are in ``test_procedure`` and ``test_process``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import JobStatus, SeatProgress, SwitchJob
from services.checkpointer.engine_http import AnswerCheck, EngineHttp
from services.checkpointer.job_run import JobRun
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record
from tests.checkpointer.crash_cases import BACKENDS, COLD, Crash, Half, crashes
from tests.checkpointer.engines import FULL, IN_VAIN, RESIDUE, PlayedEngine, Stand, played
from tests.thorough import part

CALLS = ("/sleep", "/wake_up", "/release_memory", "/resume_memory", "/api/generate", "/models/load", "/models/unload")


@dataclass
class Watched:
    """A journal and calls that act at a moment: once ``act`` returns, work goes on; ``act`` None: it stands still."""

    journal: Journal
    moment: str
    act: Callable[[], Any] | None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    written: SeatProgress | None = None
    """What was to be journaled as the end."""

    async def at(self, moment: str) -> None:
        if moment != self.moment or self.reached.is_set():
            return
        self.reached.set()
        if self.act is None:
            await asyncio.Event().wait()
        else:
            await self.act()

    def wrap(self, monkeypatch: pytest.MonkeyPatch, http: EngineHttp) -> None:
        write, call = self.journal._record, http.call

        async def watched_write(job: JobFile, record: Record, **rest: Any) -> None:
            if record.kind == "end":
                self.written = record.progress
            await self.at(record.kind)
            await self.at(record.step or record.kind)
            await write(job, record, **rest)

        async def watched_call(seat: Any, method: str, path: str, **rest: Any) -> Any:
            changes = method == "POST" and path.startswith((*CALLS, "/sleep", "/release_memory_", "/resume_memory_"))
            if changes:
                await self.at("call")
            elif path == "/collective_rpc":
                await self.at("between")
            answer = await call(seat, method, path, **rest)
            if changes and path != "/wake_up?tags=weights":
                await self.at("called")
            return answer

        monkeypatch.setattr(self.journal, "_record", watched_write)
        monkeypatch.setattr(http, "call", watched_call)


@dataclass
class Machine:
    """A seat, and the state folder that outlives its checkpointers."""

    it: Stand
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @asynccontextmanager
    async def checkpointer(self, moment: str, act: Callable[[], Any] | None) -> AsyncIterator[Watched]:
        """One checkpointer's life."""
        journal = Journal(self.folder)
        journal.load()
        watched = Watched(journal, moment, act)
        with self.monkeypatch.context() as patch:
            watched.wrap(patch, self.it.check.engines)
            try:
                yield watched
            finally:
                journal.close()

    async def run(self, half: Half, moment: str = "", act: Callable[[], Any] | None = None) -> SeatProgress | None:
        """Begin the half, or go on with the one in the journal, until it ends or stands still. Its end, or what was to
        be journaled as that."""
        async with self.checkpointer(moment, act) as here:
            job = SwitchJob(
                cause="c", node="n1", epoch=1 if half == "park" else 2, op=half, group="G0",
                **({"park": (self.it.target,)} if half == "park" else {"activate": self.it.target}),
            )  # fmt: skip
            file = here.journal.jobs.get(half)
            if file is None:
                file = JobFile([Record(kind="switch", switch=job)])
                await here.journal.begin(file)
            check = AnswerCheck(self.it.check.engines, seconds=5.0)
            run = JobRun(file, here.journal, {self.it.target.backend: self.it.backend}, lambda _: None, check)
            task = asyncio.create_task(run.run())
            standing = asyncio.create_task(here.reached.wait() if act is None else asyncio.Event().wait())
            await asyncio.wait({task, standing}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            standing.cancel()
            if not task.done():
                assert here.reached.is_set(), f"{half} does not end"
                task.cancel()
                await asyncio.wait({task})
                return here.written
            status: JobStatus = task.result()
            return status.park[0] if half == "park" else status.activate


def name_of(end: SeatProgress | None) -> str:
    return COLD if end.outcome in ("lost", "gone") else end.outcome


async def play(backend: str, crash: Crash, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of the seat."""
    kind = {"vllm-2": "vllm", "restart": "vllm"}.get(backend, backend)
    async with played(PlayedEngine(kind), {"vllm-2": "vllm-2", "restart": "restart"}.get(backend, "")) as it:
        machine = Machine(it, folder, monkeypatch)
        if crash.half == "activate":
            assert name_of(await machine.run("park")) == "parked"

        async def end_engine() -> None:
            it.engine.end()
            await it.process.wait()

        if crash.victim == "engine":
            end = await machine.run(crash.half, crash.moment, end_engine)
        else:
            await machine.run(crash.half, crash.moment)
            if crash.victim == "checkpointer" and crash.moment in ("step", "call", "between"):
                it.readings.timeouts = IN_VAIN  # an effect that never comes
            if crash.victim == "both":
                await end_engine()
            first = await machine.run(crash.half, "end")
            end = await machine.run(crash.half)
            assert name_of(first) == name_of(end), f"{backend}: {crash}: a replay of the replay ends otherwise"
        assert it.engine.resumed <= 1, "a second resume ends SGLang"
        if backend == "restart" and crash.victim == "checkpointer":
            assert name_of(end) == "parked", "what the crash left was ended, and its container starts at the gate"
        # That it ended after the half is evidence of the manager, not of the half.
        ended_after = crash.victim == "engine" and crash.moment == "end"
        outcome = COLD if backend == "restart" or ended_after else name_of(end)
        if outcome == COLD:
            await asyncio.wait_for(it.process.wait(), 60)
        else:
            assert it.process.returncode is None
            assert it.engine.held == (FULL if outcome == "active" else RESIDUE), f"{backend}: {crash}"
        return outcome


@pytest.mark.parametrize("backend", part(BACKENDS, 2))
async def test_a_kill_at_any_step_ends_active_parked_or_in_a_cold_start(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [crash for crash in crashes() if crash.end(backend)]
    found = {}
    for number, crash in enumerate(rows):
        found[crash] = await play(backend, crash, tmp_path / str(number), monkeypatch)
    assert found == {crash: crash.end(backend) for crash in rows}
