"""One process of a kind per node, and what a process says that cannot run."""

import asyncio
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kybernate import lifecycle
from kybernate.gpus import GpuError
from kybernate.lifecycle import CannotRunError, alone, alone_in_both, main

HOLD = "import sys; from pathlib import Path; from kybernate.lifecycle import alone\n" + (
    "with alone(Path(sys.argv[1]), 'x'): print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits long for its predecessor."""
    monkeypatch.setattr(lifecycle, "PREDECESSOR_SECONDS", 0.1)


def holder(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_error_of_a_second_process_names_the_holder_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holder(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(SystemExit) as ended, alone(tmp_path, "x"):
            pass
        first.communicate()

    assert ended.value.code == 1
    assert f"process {first.pid} holds" in capsys.readouterr().err


def test_a_killed_holder_leaves_nothing_locked(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        first.communicate()

    with alone(tmp_path, "x"):
        assert (tmp_path / "x.lock").exists()


@pytest.mark.parametrize(("run", "state"), [("run", "other"), ("other", "state")])
def test_a_second_process_that_shares_one_of_both_folders_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, state: str
) -> None:
    with (
        alone_in_both(tmp_path / "run", tmp_path / "state", "x"),
        pytest.raises(SystemExit),
        alone_in_both(tmp_path / run, tmp_path / state, "x"),
    ):
        pass
    assert "KYB_STATE_DIR" in capsys.readouterr().err


def test_one_folder_for_both_is_locked_once(tmp_path: Path) -> None:
    with alone_in_both(tmp_path, tmp_path, "x"):
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended, alone(tmp_path / "file" / "run", "x"):
        pass
    assert ended.value.code == 1
    assert f"kyb-x: cannot use {tmp_path}/file/run/x.lock: Not a directory; check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (CannotRunError("why"), "process.cannot_run"),
        (GpuError("why"), "process.cannot_run"),
        (PermissionError(errno.EACCES, "why", "/file"), "process.cannot_run"),
        (IsADirectoryError(errno.EISDIR, "why", "/file"), "process.cannot_run"),
        (FileExistsError(errno.EEXIST, "why", "/file"), "process.cannot_run"),
        (FileNotFoundError(errno.ENOENT, "why", "/file"), "process.failed"),
        (ConnectionError("why"), "process.failed"),
    ],
)
def test_what_an_operator_can_correct_is_logged_without_a_traceback(error: Exception, event: str) -> None:
    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail() -> None:
        raise error

    with capture_logs() as logs, pytest.raises(SystemExit) as ended:
        main(serve, GpuError)
    assert ended.value.code == 1
    assert [(line["event"], "exc_info" in line) for line in logs] == [(event, event == "process.failed")]
    assert "why" in str(logs)


def test_a_process_gets_the_lock_also_on_a_full_disk(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    command, nothing = [sys.executable, "-c", full + HOLD, str(tmp_path)], subprocess.DEVNULL
    done = subprocess.run(command, stdin=nothing, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"held\n"), done.stderr


def test_the_identity_is_that_of_the_file_in_the_run_folder(tmp_path: Path) -> None:
    with alone(tmp_path / "run", "x") as only:
        pass
    with alone_in_both(tmp_path / "run", tmp_path / "state", "x") as both:
        assert both == only


SERVICE = """
import asyncio, subprocess
from kybernate.lifecycle import run

async def job():
    print(subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True).stdout, flush=True)
    await asyncio.Event().wait()

asyncio.run(run(job=job()))
"""


def test_a_terminal_that_is_closed_ends_no_service_and_what_it_starts_is_not_changed() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        ignored = int(service.stdout.readline().split()[1], 16)
        assert not ignored & 1 << (signal.SIGHUP - 1)
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            service.send_signal(number)
        assert service.wait(30) == 0


STUCK = """
import asyncio
from kybernate import lifecycle

lifecycle.STOP_SECONDS = 0.1

async def stays():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def serve(inner):
    if inner:
        await lifecycle.run(outer=lifecycle.together(stays=stays(), fails=fails()))
    try:
        await lifecycle.run(fails=fails())
    finally:
        task = asyncio.create_task(stays(), name="stays")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

async def fails():
    raise OSError("why")
"""


@pytest.mark.parametrize("inner", [True, False], ids=["a job", "the clearing up"])
def test_what_does_not_end_once_a_job_has_failed_ends_the_process(inner: bool) -> None:
    script = f"{STUCK}\nlifecycle.main(lambda: serve({inner}))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "process.stuck" in ended.stdout
    assert "OSError('why')" in ended.stdout
    assert "'stays'" in ended.stdout


async def test_what_has_ended_and_begun_anew_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a manager whose configuration has changed."""
    monkeypatch.setattr(lifecycle, "STOP_SECONDS", 0.05)
    exits: list[int] = []
    monkeypatch.setattr(lifecycle.os, "_exit", exits.append)

    async def fails() -> None:
        raise OSError("why")

    with pytest.raises(ExceptionGroup):
        await asyncio.create_task(lifecycle.together(fails=fails(), other=asyncio.Event().wait()))
    await asyncio.sleep(0.1)
    assert not exits
