"""Processes from /proc: identity, descendants, process groups, stopped or not; and signals to them.

A pid alone does not identify a process, because pids are reused: a process is its (pid, start time). A signal is sent
through a pidfd after that pair was checked, so it never reaches another process.
"""

import asyncio
import contextlib
import errno
import os
import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kybernate.cgroups import HIDDEN, PROC, HiddenProcessesError, pids, read


class ProcessIdentity(BaseModel):
    """One process: its pid and its start time in clock ticks since boot."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    start: int


def identify(pid: int, proc: Path = PROC) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none or it is a zombie."""
    fields = _stat(pid, proc)
    return None if fields is None else ProcessIdentity(pid=pid, start=int(fields[19]))


def alive(process: ProcessIdentity, proc: Path = PROC) -> bool:
    """True if this process (not another with its pid) exists and is no zombie."""
    fields = _stat(process.pid, proc)
    return fields is not None and int(fields[19]) == process.start


async def ended(process: ProcessIdentity) -> None:
    """Wait until it is gone or a zombie; it need not be a child."""
    handle = _open(process.pid)
    if handle is None:
        return
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    try:
        if alive(process):
            loop.add_reader(handle, done.set)
            await done.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def stopped(process: ProcessIdentity, proc: Path = PROC) -> bool:
    """True if a signal or a debugger stopped it. For frozen control groups see ``freezer.Freezer.stopped``."""
    fields = _stat(process.pid, proc)
    return fields is not None and fields[0] in ("T", "t") and int(fields[19]) == process.start


def tree(root: ProcessIdentity, proc: Path = PROC) -> list[ProcessIdentity]:
    """The process and all its descendants, parents first; empty if it is gone."""
    found: list[ProcessIdentity] = []
    todo = [root] if alive(root, proc) else []
    while todo:
        process = todo.pop(0)
        if process in found:
            continue
        found.append(process)
        todo += [child for pid in _children(process.pid, proc) if (child := identify(pid, proc)) is not None]
    return found


def parent(pid: int, proc: Path = PROC) -> int:
    """The pid of its parent; 0 if that is in another pid namespace, or the process is gone."""
    fields = _stat(pid, proc)
    return 0 if fields is None else int(fields[1])


def group(leader: int, proc: Path = PROC) -> list[ProcessIdentity]:
    """Members of the process group of ``leader``, parents alive or not."""
    found = []
    for pid in pids(proc):
        fields = _stat(pid, proc)
        if fields is not None and int(fields[2]) == leader:
            found.append(ProcessIdentity(pid=pid, start=int(fields[19])))
    return found


def thread_names(pid: int, proc: Path = PROC) -> frozenset[str]:
    """Names of its threads; empty if it is gone."""
    names = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError):
                names.add(read(f"{proc}/{pid}/task/{thread}/comm").strip())
    return frozenset(names)


def send(process: ProcessIdentity, signum: signal.Signals) -> bool:
    """Send a signal; False if the process is gone. Raises PermissionError."""
    handle = _open(process.pid)
    if handle is None:
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


def _open(pid: int) -> int | None:
    """A pidfd of the process that has this pid now; None if there is none, also where a thread has the number."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):  # a thread: ENOENT, or EINVAL of older kernels
            return None
        raise


def _stat(pid: int, proc: Path = PROC) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None if the process is gone or a zombie. Raises
    HiddenProcessesError."""
    try:
        text = read(f"{proc}/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        raise HiddenProcessesError(HIDDEN.format(proc)) from error
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields


def _children(pid: int, proc: Path = PROC) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += [int(child) for child in read(f"{proc}/{pid}/task/{thread}/children").split()]
    return children
