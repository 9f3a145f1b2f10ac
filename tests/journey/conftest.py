"""One real stack for all journeys: `kyb up` as a person starts it, at eight times the pace. Seats are bound to their
groups, so that each journey knows which models share one; tests/stack/test_operations.py and the demos move them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kybernate.dev.stack import LAPTOP
from tests.otlp import Collector, collecting
from tests.until import until_blocking

SPEED = 8.0
BOUND = (LAPTOP / "config.yaml").read_text().replace("seatsPerGroup: 3\n", "seatsPerGroup: 3\n    rebalance: false\n")
"""Configuration of the laptop's stack, each seat bound to its group."""


@dataclass(frozen=True)
class Up:
    """A running `kyb up`."""

    url: str
    console: str
    nats_url: str
    driver_socket: str
    kubelet_url: str
    env: dict[str, str]
    """In which `kyb` finds this stack."""


def announced(process: subprocess.Popen[str], path: Path, log: Path) -> dict[str, Any]:
    """The stack file of ``kyb up``, once the stack is ready."""

    def ready() -> bool:
        return process.poll() is not None or (path.exists() and "Ready after" in log.read_text())

    until_blocking(ready, what="kyb up is ready", saw=log.read_text, timeout=180, interval=0.1)
    assert process.poll() is None, f"kyb up ended:\n{log.read_text()[-8000:]}"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the traces of the stack."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Up]:
    traces = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running(tmp_path_factory.mktemp("up"), SPEED, BOUND, traces) as up:
        yield up


@contextmanager
def running(folder: Path, speed: float, settings: str, more: Mapping[str, str] | None = None) -> Iterator[Up]:
    """`kyb up` at so many times the pace with this configuration, its files in the folder, until the context ends.
    ``more``: further environment."""
    runtime = folder / "runtime"
    runtime.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("KYB_")}
    env |= {"XDG_RUNTIME_DIR": str(runtime), **(more or {})}
    log, config = folder / "up.log", folder / "config.yaml"
    config.write_text(settings)
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "up", "--speed", str(speed)]
    command += ["--config", str(config)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        stack = announced(process, runtime / "kybernate" / "stack.json", log)
        yield Up(stack["url"], stack["console"], stack["nats_url"], stack["driver_socket"], stack["kubelet_url"], env)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, log.read_text()[-4000:]
