"""One process of a kind per node."""

import subprocess
import sys
from pathlib import Path

import pytest

from kybernate.lifecycle import alone, alone_in_both

HOLD = "import sys; from pathlib import Path; from kybernate.lifecycle import alone\n" + (
    "with alone(Path(sys.argv[1]), 'x', patience_seconds=0.1): print('held', flush=True); sys.stdin.read()"
)


def holder(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_error_of_a_second_process_names_the_holder_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holder(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(SystemExit) as ended, alone(tmp_path, "x", patience_seconds=0.1):
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

    with alone(tmp_path, "x", patience_seconds=0.1):
        assert (tmp_path / "x.lock").exists()


@pytest.mark.parametrize(("run", "state"), [("run", "other"), ("other", "state")])
def test_a_second_process_that_shares_one_of_both_folders_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, state: str
) -> None:
    with (
        alone_in_both(tmp_path / "run", tmp_path / "state", "x"),
        pytest.raises(SystemExit),
        alone_in_both(tmp_path / run, tmp_path / state, "x", patience_seconds=0.1),
    ):
        pass
    assert "KYB_STATE_DIR" in capsys.readouterr().err


def test_one_folder_for_both_is_locked_once(tmp_path: Path) -> None:
    with alone_in_both(tmp_path, tmp_path, "x", patience_seconds=0.1):
        pass


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    command, nothing = [sys.executable, "-c", full + HOLD, str(tmp_path)], subprocess.DEVNULL
    done = subprocess.run(command, stdin=nothing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"held\n"), done.stderr


def test_the_identity_is_that_of_the_file_in_the_run_folder(tmp_path: Path) -> None:
    with alone(tmp_path / "run", "x") as only:
        pass
    with alone_in_both(tmp_path / "run", tmp_path / "state", "x") as both:
        assert both == only
