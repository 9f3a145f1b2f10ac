"""One process of a kind per node. The GPUs are local, so is the lock: flock on a file, gone with its process."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kybernate.logs import get_logger

PREDECESSOR_SECONDS = 5.0
"""How long a predecessor that is still ending is waited for."""


@contextlib.contextmanager
def alone(run_dir: Path, name: str, *, patience_seconds: float = PREDECESSOR_SECONDS) -> Iterator[None]:
    """Hold ``<run_dir>/<name>.lock``. Ends the process with code 1 when another one holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / f"{name}.lock"
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        holder = os.read(file, 32).decode().strip()
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"kyb-{name}: process {holder} holds {path}; one per node: stop it, or set KYB_RUN_DIR\n"
                    sys.stderr.write(text)
                    raise SystemExit(1) from None
                time.sleep(0.05)
        if holder:
            get_logger().warning("lock.left_behind", file=str(path), by_pid=holder)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)
