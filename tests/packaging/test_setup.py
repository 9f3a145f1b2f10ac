"""``scripts/setup.sh``, which makes .venv: interrupted, without a network, and with what an interrupted one has left.

A shell script stands for Python: ``-m venv`` makes a folder with that script in it, ``-m pip`` does what PIP says.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = (
    "requirements/all.txt",
    "requirements/image.txt",
    "requirements/build.txt",
    "requirements/llama.txt",
    "pyproject.toml",
)
PYTHON = r"""#!/bin/sh
case "$*" in
  "-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    touch "$folder/pyvenv.cfg"
    [ "$PIP" != hangs ] || exec sleep 60 >hung
    cp "$0" "$folder/bin/python"
    printf '#!%s/bin/python\n' "$folder" >"$folder/bin/pip" ;;
  *"-m pip"*)
    case $PIP in
      untrusted) echo "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))" >&2; exit 1 ;;
      away) echo "WARNING: Retrying after NewConnectionError('Temporary failure in name resolution')" >&2; exit 1 ;;
    esac
    echo "$*" >>pips ;;
  "- "*) exec python3 "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "requirements").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    for name in INPUTS:
        (folder / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return folder


def start(checkout: Path, pip: str = "works") -> "subprocess.Popen[str]":
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(checkout.parent / "python"), "PIP": pip}
    script = ["sh", "scripts/setup.sh", "run"]
    pipe = subprocess.PIPE
    return subprocess.Popen(script, cwd=checkout, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def run(checkout: Path, pip: str = "works") -> tuple[int, str]:
    process = start(checkout, pip)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_the_environment_is_whole_or_not_there(checkout: Path) -> None:
    process = start(checkout, "hangs")
    while not (checkout / "hung").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "setup: interrupted; run it again\n")
    assert not (checkout / ".venv").exists()
    assert run(checkout) == (0, "")
    assert (checkout / ".venv/bin/pip").read_text() == f"#!{checkout}/.venv/bin/python\n"
    assert not list(checkout.glob(".venv.*"))


def test_an_environment_without_its_stamp_is_made_anew(checkout: Path) -> None:
    """As releases before left it when they were interrupted: Python is there, pip is not."""
    (checkout / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout.parent / "python", checkout / ".venv/bin/python")
    assert run(checkout) == (0, "")
    assert (checkout / ".venv/bin/pip").exists()


def test_without_a_network_one_sentence_and_the_environment_stays(checkout: Path) -> None:
    assert run(checkout) == (0, "")
    (checkout / "requirements/all.txt").write_text("one==1\n")
    for _ in range(2):
        code, errors = run(checkout, "away")
        assert code == 1
        assert errors.count("\n") == 1
        assert "the package index cannot be reached; check network and proxy" in errors
        assert (checkout / ".venv/bin/python").exists()
    assert run(checkout) == (0, "")


def test_an_authority_that_is_not_trusted_is_named_with_the_remedy(checkout: Path) -> None:
    code, errors = run(checkout, "untrusted")
    assert (code, errors.count("\n"), "export PIP_CERT=FILE" in errors) == (1, 1, True)


def test_nothing_is_installed_twice(checkout: Path) -> None:
    assert run(checkout) == (0, "")
    installed = (checkout / "pips").read_text()
    assert run(checkout) == (0, "")
    assert (checkout / "pips").read_text() == installed
