"""What a supervisor does with its workers, here small scripts in place of routers."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.router import supervisor
from services.router.settings import RouterSettings
from services.router.supervisor import Slot, Worker, WorkerFailedError
from tests.until import until

READY = """
import socket, sys
link = socket.socket(fileno=int(sys.argv[-1]))
link.send(b"r")
"""
UNTIL_DRAINED = READY + "link.recv(1)"
NEVER_DRAINED = READY + "link.recv(1); link.recv(1)"


def command(script: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", script


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda script: monkeypatch.setattr(supervisor, "COMMAND", command(script))


@asynccontextmanager
async def kept() -> AsyncIterator[tuple[Slot, asyncio.Task[None]]]:
    settings = RouterSettings.from_env({"KYB_WORKERS": "1", "KYB_HEALTH_PORT": "9474", "KYB_INSTANCE": "r"})
    with socket.socket() as api, socket.socket() as operations:
        slot = Slot(settings, 0, api, operations)
        task = asyncio.create_task(slot.keep())
        try:
            yield slot, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await slot.stop()


async def ready(slot: Slot, *others: Worker) -> Worker:
    def found() -> Worker | None:
        worker = slot._worker
        return worker if worker and worker not in others and worker.ready.is_set() else None

    worker = await until(found, what="a worker is ready")
    assert worker is not None
    return worker


async def test_a_successor_that_dies_is_started_again_while_its_predecessor_ends(runs: Callable[[str], None]) -> None:
    runs(NEVER_DRAINED)
    async with kept() as (slot, _):
        first = await ready(slot)
        assert await slot.replace()
        successor = await ready(slot, first)
        os.kill(successor._process.pid, signal.SIGKILL)
        third = await ready(slot, first, successor)
        assert not first.ended.done(), "it still answers"
        assert slot._workers == {first, third}, "the code of the dead one does not count when all stop"
        assert {first.name, successor.name, third.name} == {"r-0a", "r-0b"}, "the third has the successor's name"


async def test_workers_are_replaced_again_while_earlier_ones_end_and_names_stay_different(
    runs: Callable[[str], None],
) -> None:
    runs(NEVER_DRAINED)
    async with kept() as (slot, _):
        await ready(slot)
        assert [await slot.replace() for _ in supervisor.NAMES] == [True] * 7 + [False]
        assert {worker.name for worker in slot._workers} == {f"r-0{letter}" for letter in "abcdefgh"}
        await slot.stop()


async def test_a_successor_that_cannot_be_started_leaves_its_predecessor(
    runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(UNTIL_DRAINED)
    async with kept() as (slot, _):
        first = await ready(slot)
        monkeypatch.setattr(supervisor, "COMMAND", ("/nonexistent/python",))
        assert not await slot.replace()
        assert slot._worker is first
        assert not first.ended.done()
        os.kill(first._process.pid, signal.SIGKILL)
        await until(first.ended.done, what="the worker ended")
        runs(UNTIL_DRAINED)
        await ready(slot, first)


async def test_a_worker_is_tried_again_when_it_cannot_be_started(
    runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()
    start = asyncio.create_subprocess_exec

    async def once(*args: str, pass_fds: list[int]) -> asyncio.subprocess.Process:
        if not tried.is_set():
            tried.set()
            raise BlockingIOError("no processes are left")
        return await start(*args, pass_fds=pass_fds)

    runs(UNTIL_DRAINED)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", once)
    async with kept() as (slot, _):
        await ready(slot)
        assert tried.is_set()


async def test_a_configuration_that_a_first_worker_refuses_ends_the_supervisor(runs: Callable[[str], None]) -> None:
    runs("raise SystemExit(2)")
    async with kept() as (_, task):
        await until(task.done, what="the supervisor ends")
        assert isinstance(task.exception(), WorkerFailedError)


async def test_a_worker_that_refuses_its_configuration_later_is_tried_again(runs: Callable[[str], None]) -> None:
    runs(UNTIL_DRAINED)
    async with kept() as (slot, task):
        first = await ready(slot)
        runs("raise SystemExit(2)")
        os.kill(first._process.pid, signal.SIGKILL)
        await until(lambda: slot._worker is not first and slot._worker and slot._worker.ended.done(), what="it ended")
        runs(UNTIL_DRAINED)
        await ready(slot, first)
        assert not task.done()


async def test_a_worker_that_sigterm_ends_was_stopped_cleanly(runs: Callable[[str], None]) -> None:
    """A drained worker that leaves has the default action back when its loop is closed."""
    runs(UNTIL_DRAINED)
    async with kept() as (slot, task):
        await ready(slot)
        task.cancel()
        assert await slot.stop() == [0]


async def test_silence_counts_while_the_supervisor_runs(runs: Callable[[str], None]) -> None:
    runs(UNTIL_DRAINED)
    async with kept() as (slot, _):
        worker = await ready(slot)
        loop, pid = asyncio.get_running_loop(), worker._process.pid
        os.kill(pid, signal.SIGSTOP)
        clock, passed = loop.time, supervisor.SILENT_SECONDS * 2.0
        loop.time = lambda: clock() + passed  # type: ignore[method-assign]  # the machine was paused
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        assert not worker.ended.done()


async def test_a_silent_worker_is_killed(runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENT_SECONDS", 2)
    runs(UNTIL_DRAINED)
    async with kept() as (slot, _):
        worker = await ready(slot)
        await until(worker.ended.done, what="it is killed")
        assert worker.ended.result() == -signal.SIGKILL
