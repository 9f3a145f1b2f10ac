"""What the kernel says about processes."""

import os
import socket
import struct
from dataclasses import dataclass

from kybernate.fakes.gpu.process import Target


@dataclass(frozen=True, slots=True)
class ProcStat:
    """Parts of /proc/<pid>/stat."""

    state: str
    start: int
    """Start time in clock ticks after boot: with the pid it names a process for good."""


def read_stat(pid: int) -> ProcStat | None:
    """None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content[content.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return ProcStat(fields[0].decode(), int(fields[19]))


def target(pid: int) -> Target:
    """What a checkpoint call has to know about its target."""
    stat = read_stat(pid)
    if stat is None:
        return Target(exists=False)
    return Target(zombie=stat.state in "ZX", stopped=stat.state in "Tt")


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end as the kernel knows it; 0 if it lives in a pid namespace that we cannot see."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None: it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
