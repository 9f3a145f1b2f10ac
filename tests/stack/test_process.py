import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kybernate.dev.stack import process as process_module
from kybernate.dev.stack.process import ProcessCommand, SupervisedProcess
from tests.until import until

Lines = list[tuple[str, str]]


def python(text: str, **more: float) -> ProcessCommand:
    return ProcessCommand("dummy", (sys.executable, "-c", text), dict(os.environ), **more)


async def test_what_it_writes_is_logged_and_handed_on_line_by_line(tmp_path: Path) -> None:
    lines: Lines = []
    text = "import sys, time; print('one'); sys.stderr.write('two\\n'); sys.stdout.flush(); time.sleep(60)"
    process = SupervisedProcess(python(text), tmp_path / "log", lambda name, line: lines.append((name, line)))
    process.start()
    try:
        await until(lambda: len(lines) == 2, what="two lines of output", saw=lambda: lines)
        assert sorted(lines) == [("dummy", "one"), ("dummy", "two")]
        assert sorted(process.tail().splitlines()) == ["one", "two"]
    finally:
        await process.stop()


async def test_a_killed_process_is_started_again_with_growing_backoff(tmp_path: Path) -> None:
    process = SupervisedProcess(python("import time; time.sleep(60)"), tmp_path / "log")
    process.start()
    try:
        await until(lambda: process.pid is not None, what="the process is started")
        first = process.send(signal.SIGKILL)
        await until(
            lambda: process.starts == 2 and process.pid is not None,
            what="the second start of the process",
            saw=lambda: process.starts,
        )
        assert process.pid != first
        process.send(signal.SIGKILL)
        await until(lambda: process.starts == 3, what="starts of the process: 3", saw=lambda: process.starts)
        assert process.exits == [-signal.SIGKILL] * 2
        assert "ended by SIGKILL; started again in 0.2 s" in process.tail()
        assert "started again in 0.4 s" in process.tail()
    finally:
        await process.stop()


async def test_backoff_begins_anew_after_a_long_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "SETTLED_SECONDS", 0.0)
    process = SupervisedProcess(python("raise SystemExit(3)"), tmp_path / "log")
    process.start()
    try:
        await until(lambda: len(process.exits) == 2, what="two exits", saw=lambda: process.exits)
        await until(
            lambda: process.tail().count("ended with code 3; started again in 0.2 s") == 2,
            what="the log says twice that the process is started again after 0.2 s",
            saw=process.tail,
        )
    finally:
        await process.stop()


async def test_a_process_that_refuses_its_configuration_is_left_alone(tmp_path: Path) -> None:
    process = SupervisedProcess(python("raise SystemExit('bad')".replace("'bad'", "2")), tmp_path / "log")
    process.start()
    await until(lambda: process.refused, what="the process is refused", saw=process.tail)
    await process.stop()
    assert process.starts == 1


async def test_the_log_names_a_program_that_does_not_exist(tmp_path: Path) -> None:
    process = SupervisedProcess(ProcessCommand("dummy", ("/nowhere/program",), dict(os.environ)), tmp_path / "log")
    process.start()
    try:
        await until(
            lambda: "No such file or directory" in process.tail(),
            what="the log says that there is no such program",
            saw=process.tail,
        )
    finally:
        await process.stop()


async def test_it_ends_by_sigterm_and_stays_ended(tmp_path: Path) -> None:
    process = SupervisedProcess(python("import time; time.sleep(60)"), tmp_path / "log")
    process.start()
    await until(lambda: process.pid is not None, what="the process is started")
    await process.stop()
    assert process.pid is None
    assert process.exits[-1] in (-signal.SIGTERM, -signal.SIGKILL)
    process.start()
    await until(lambda: process.starts == 2, what="starts of the process: 2", saw=lambda: process.starts)
    await process.stop()
    await process.stop()  # ending twice is nothing special


async def test_one_that_ignores_sigterm_is_killed_at_its_time(tmp_path: Path) -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = SupervisedProcess(python(text, stop_seconds=0.3), tmp_path / "log")
    process.start()
    await until(lambda: "up" in process.tail(), what='the process has written "up"', saw=process.tail)
    began = time.monotonic()
    await process.stop()
    assert time.monotonic() - began > 0.25
    assert process.exits[-1] == -signal.SIGKILL


async def test_a_deadline_is_shorter_than_its_patience(tmp_path: Path) -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = SupervisedProcess(python(text, stop_seconds=30), tmp_path / "log")
    process.start()
    await until(lambda: "up" in process.tail(), what='the process has written "up"', saw=process.tail)
    began = time.monotonic()
    await process.stop(deadline=began + 0.2)
    assert time.monotonic() - began < 30


async def test_one_that_was_stopped_by_a_signal_can_end_too(tmp_path: Path) -> None:
    process = SupervisedProcess(python("print('up', flush=True); import time; time.sleep(60)"), tmp_path / "log")
    process.start()
    await until(lambda: "up" in process.tail(), what='the process has written "up"', saw=process.tail)
    process.send(signal.SIGSTOP)
    await process.stop()
    assert process.exits == [-signal.SIGTERM]


async def test_a_full_disk_stops_neither_the_process_nor_its_supervisor() -> None:
    lines: Lines = []
    text = (
        "import sys; sys.stdout.write('x' * 500_000 + '\\n'); sys.stdout.flush(); print('end', flush=True); sys.exit(3)"
    )
    process = SupervisedProcess(python(text), Path("/dev/full"), lambda name, line: lines.append((name, line)))
    process.start()
    try:
        await until(lambda: process.starts >= 2, what="the process has ended and is started again", saw=lambda: lines)
        assert process.exits[0] == 3
        assert ("dummy", "end") in lines
    finally:
        await process.stop()
