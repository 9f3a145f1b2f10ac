"""Outlives the supervisor and clears up: ``python -I -S guard.py <folder> <stack file>``.

Waits until its standard input ends, which happens when the supervisor is done or has been killed. Then it ends every
process that carries the stack's mark, whatever its parent, and removes the folder and the stack file. Imports the
standard library only.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "KYBERNATE_STACK"
"""Environment variable with the stack's folder; every process of the stack inherits it."""
CONTAINER = "KYBERNATE_CONTAINER"
"""The same of one run of a container, with a word of its own."""
GIVE_UP_SECONDS = 3.0


def main() -> None:
    """Wait for the end of standard input, then clear up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    folder, stack_file = Path(sys.argv[1]), Path(sys.argv[2])
    while os.read(0, 4096):
        pass
    until = time.monotonic() + GIVE_UP_SECONDS
    while kill_left_over(folder) and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stack_file.read_text())["folder"] == str(folder):
            stack_file.unlink()
            stack_file.parent.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


def left_over(of: object, mark: str = MARK) -> list[int]:
    """Processes of this user whose environment has ``of`` in this variable; not this one, and not the dead."""
    line = f"{mark}={of}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if line in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_left_over(of: object, mark: str = MARK) -> list[int]:
    """SIGKILL what ``left_over`` finds; returns the pids."""
    pids = left_over(of, mark)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return pids


if __name__ == "__main__":
    main()
