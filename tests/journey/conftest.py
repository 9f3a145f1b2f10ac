"""One real stack for all journeys: `kyb up` as a person starts it, at eight times the pace."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SPEED = 8.0


@dataclass(frozen=True)
class Up:
    """A running `kyb up`."""

    url: str
    nats_url: str
    driver_socket: str
    kubelet_url: str
    env: dict[str, str]
    """In which `kyb` finds this stack."""


def wait_for(process: subprocess.Popen[str], path: Path, log: Path, deadline: float) -> dict[str, Any]:
    while time.monotonic() < deadline:
        if path.exists() and "Ready after" in log.read_text():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"kyb up did not get ready:\n{log.read_text()[-8000:]}")


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    runtime = folder / "runtime"
    runtime.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("KYB_")}
    env["XDG_RUNTIME_DIR"] = str(runtime)
    log = folder / "up.log"
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "up", "--speed", str(SPEED)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        told = wait_for(process, runtime / "kybernate" / "stack.json", log, time.monotonic() + 50)
        yield Up(told["url"], told["nats_url"], told["driver_socket"], told["kubelet_url"], env)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 0, log.read_text()[-4000:]
