"""What the kernel says about processes."""

import functools
import glob
import os
import re
import socket
import struct
from dataclasses import dataclass

from kybernate.dev.fakes.gpu.process import Target

_CGROUPS = "/sys/fs/cgroup"
_UNIFIED = (_CGROUPS, f"{_CGROUPS}/unified")
"""Where v2 is mounted, alone or beside v1."""
_MAX_DEPTH = 8
"""No container lies deeper."""
_FREEZER_FUNCTIONS = frozenset({"do_freezer_trap", "get_signal"})
"""The trap of v2 and the function that compilers put it into; a process that is stopped there is told by its state."""


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
    stopped = stat.state in "Tt" or (stat.state in "SD" and is_frozen(pid))
    return Target(zombie=stat.state in "ZX", stopped=stopped)


def is_frozen(pid: int) -> bool:
    """Whether the cgroup freezer holds it, for then /proc shows it asleep (v2: S, v1: D) and not as stopped.

    Asked are the cgroup's own files (v2: ``frozen 1`` in cgroup.events, v1: freezer.state) where this mount namespace
    shows them, else (v2 only) the kernel function that its main thread waits in, where the kernel tells that.
    """
    return _is_frozen_cgroup(pid) or _read(f"/proc/{pid}/wchan").strip() in _FREEZER_FUNCTIONS


def _is_frozen_cgroup(pid: int) -> bool:
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and any("frozen 1" in _read(f"{place(root, path)}/cgroup.events") for root in _UNIFIED):
            return True
        freezer = f"{place(f'{_CGROUPS}/freezer', path)}/freezer.state"
        if "freezer" in controllers.split(",") and _read(freezer).strip() == "FROZEN":
            return True
    return False


@functools.lru_cache(maxsize=1024)
def place(root: str, path: str) -> str:
    """The folder of a control group. From a control group namespace of one's own, as containers of version 2 have, a
    path begins with ``/..`` and does not name the levels in between: the rest is looked for below ``root``."""
    rest = re.sub(r"^(/\.\.)+", "", path).lstrip("/")
    if not path.startswith("/..") or not rest:
        return root + path
    patterns = (f"{root}/{'*/' * depth}{glob.escape(rest)}" for depth in range(_MAX_DEPTH))
    return next((found for pattern in patterns for found in glob.iglob(pattern)), root + path)


def _read(path: str) -> str:
    """The file's text; empty when it is not there, or not for us."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


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
