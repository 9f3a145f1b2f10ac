import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kybernate.dev.stack import process as process_module
from kybernate.dev.stack.process import ProcessCommand, SupervisedProcess
from tests.until import until

SLEEP = "print('up', flush=True); import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
Lines = list[tuple[str, str]]


@asynccontextmanager
async def supervised(
    text: str, log: Path, lines: Lines | None = None, *, says: str = "", **more: float
) -> AsyncIterator[SupervisedProcess]:
    """A started process of this Python text, which has written ``says``."""
    command = ProcessCommand("dummy", (sys.executable, "-c", text), dict(os.environ), **more)
    seen: Lines = [] if lines is None else lines
    process = SupervisedProcess(command, log, lambda name, line: seen.append((name, line)))
    process.start()
    try:
        if says:
            await until(lambda: says in process.tail(), what=f"the process has written {says}", saw=process.tail)
        yield process
    finally:
        await process.stop()


async def test_what_it_writes_is_logged_and_handed_on_line_by_line(tmp_path: Path) -> None:
    lines: Lines = []
    text = "import sys, time; print('one'); sys.stderr.write('two\\n'); sys.stdout.flush(); time.sleep(60)"
    async with supervised(text, tmp_path / "log", lines) as process:
        await until(lambda: len(lines) == 2, what="two lines of output", saw=lambda: lines)
        assert sorted(lines) == [("dummy", "one"), ("dummy", "two")]
        assert sorted(process.tail().splitlines()) == ["one", "two"]


async def test_a_killed_process_is_started_again_with_growing_backoff(tmp_path: Path) -> None:
    async with supervised(SLEEP, tmp_path / "log", says="up") as process:
        for count in (1, 2):
            pid = process.send(signal.SIGKILL)
            await until(lambda: process.starts > count and process.pid, what="the next start")  # noqa: B023
            assert process.pid != pid
        assert process.exits == [-signal.SIGKILL] * 2
        assert "ended by SIGKILL; started again in 0.2 s" in process.tail()
        assert "started again in 0.4 s" in process.tail()


async def test_backoff_begins_anew_after_a_long_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "SETTLED_SECONDS", 0.0)
    async with supervised("raise SystemExit(3)", tmp_path / "log") as process:
        again = "ended with code 3; started again in 0.2 s"
        await until(lambda: process.tail().count(again) == 2, what=f"it says twice: {again}", saw=process.tail)


async def test_a_process_that_refuses_its_configuration_is_left_alone(tmp_path: Path) -> None:
    async with supervised("raise SystemExit(2)", tmp_path / "log") as process:
        await until(lambda: process.refused, what="the process is refused", saw=process.tail)
    assert process.starts == 1


async def test_the_log_names_a_program_that_does_not_exist(tmp_path: Path) -> None:
    process = SupervisedProcess(ProcessCommand("dummy", ("/nowhere/program",), dict(os.environ)), tmp_path / "log")
    process.start()
    try:
        await until(lambda: "No such file or directory" in process.tail(), what="the log says so", saw=process.tail)
    finally:
        await process.stop()


async def test_it_ends_by_sigterm_and_stays_ended(tmp_path: Path) -> None:
    async with supervised(SLEEP, tmp_path / "log", says="up") as process:
        process.send(signal.SIGSTOP)  # one that a signal has stopped, too
        await process.stop()
        assert (process.pid, process.exits) == (None, [-signal.SIGTERM])
        process.start()
        await until(lambda: process.starts == 2, what="starts of the process: 2", saw=lambda: process.starts)
        await process.stop()  # ending twice is nothing special


@pytest.mark.parametrize(("patience", "deadline"), [(0.3, None), (30.0, 0.3)], ids=["its own", "given"])
async def test_one_that_ignores_sigterm_is_killed_at_its_time(
    tmp_path: Path, patience: float, deadline: float | None
) -> None:
    async with supervised(STUBBORN, tmp_path / "log", says="up", stop_seconds=patience) as process:
        began = time.monotonic()
        await process.stop(deadline=None if deadline is None else began + deadline)
        assert 0.25 < time.monotonic() - began < 30
        assert process.exits[-1] == -signal.SIGKILL


async def test_a_full_disk_stops_neither_the_process_nor_its_supervisor() -> None:
    lines: Lines = []
    text = "import sys; sys.stdout.write('x' * 500_000 + '\\n'); print('end', flush=True); sys.exit(3)"
    async with supervised(text, Path("/dev/full"), lines) as process:
        await until(lambda: process.starts >= 2, what="the process has ended and is started again", saw=lambda: lines)
        assert process.exits[0] == 3
        assert ("dummy", "end") in lines
