"""Processes of this machine as /proc tells: who is who, who belongs to whom, who is stopped; and signals to them.

A pid alone names nobody, since numbers are used again: everything here goes by (pid, start time), and a signal is sent
through a pidfd after that pair was checked, so it can never hit a stranger.
"""

import contextlib
import os
import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Identity(BaseModel):
    """One process for certain: its pid and its start time in clock ticks since boot."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    start: int


def identify(pid: int) -> Identity | None:
    """Who has this pid now; None when nobody has, or only a zombie."""
    fields = _stat(pid)
    return None if fields is None else Identity(pid=pid, start=int(fields[19]))


def alive(process: Identity) -> bool:
    """Whether this very process still exists and is no zombie."""
    return identify(process.pid) == process


def stopped(process: Identity) -> bool:
    """Whether it is stopped by a signal or a debugger."""
    fields = _stat(process.pid)
    return fields is not None and fields[0] in ("T", "t") and int(fields[19]) == process.start


def tree(root: Identity) -> list[Identity]:
    """The process and all its descendants, parents first; empty when it is gone."""
    found: list[Identity] = []
    todo = [root] if alive(root) else []
    while todo:
        process = todo.pop(0)
        if process in found:
            continue
        found.append(process)
        todo += [child for pid in _children(process.pid) if (child := identify(pid)) is not None]
    return found


def send(process: Identity, signum: signal.Signals) -> bool:
    """Send a signal; False when the process is gone. Raises PermissionError."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the name, from the state on; None for the gone and for zombies."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += [int(child) for child in (thread / "children").read_text().split()]
    return children
