"""What a freeze would take from others: file locks that a process of a seat holds, and a compiler that runs for it.

Engines share caches of compiled code, and lock their files while they write them (``filelock``: flock). A frozen holder
keeps its lock until its seat is activated, and every engine that wants the file hangs meanwhile, in good health.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kybernate.cgroups import PROC, read_text
from services.checkpointer.processes import ProcessIdentity

COMPILERS = frozenset(
    {"cc1", "cc1plus", "cicc", "ptxas", "nvcc", "g++", "gcc", "c++", "clang", "clang++", "ninja", "as", "ld"}
)
"""Names of processes that compile: they end by themselves, and the lock of a cache is held meanwhile."""
_KINDS = ("FLOCK", "POSIX")


class HeldLock(NamedTuple):
    """A file lock of a process."""

    pid: int
    file: str
    """``major:minor:inode`` as in /proc/locks."""
    exclusive: bool
    awaited: bool
    """A process that is not of the seat waits for it."""


def held(pids: Iterable[int], proc: Path = PROC) -> list[HeldLock]:
    """The file locks of these processes. Those of open file descriptions (OFD) name no process and are left out.

    The list of all locks of the machine is read only where a descriptor has one: its reader waits until no processor
    changes a lock, which takes up to 20 ms.
    """
    own, waiting, found = {*pids}, set[str](), list[HeldLock]()
    if not any(_may_hold(pid, proc) for pid in own):
        return []
    lines = [line.replace("->", "-> ").split() for line in read_text(proc / "locks").splitlines()]
    for waits in (True, False):
        for _, *words in lines:
            if (words[:1] == ["->"]) is not waits or len(words) < 5 + waits or words[waits] not in _KINDS:
                continue
            _, _, mode, pid, file = words[waits : waits + 5]
            if waits and int(pid) not in own:
                waiting.add(file)
            elif not waits and int(pid) in own:
                found.append(HeldLock(int(pid), file, mode == "WRITE", file in waiting))
    return found


def _may_hold(pid: int, proc: Path) -> bool:
    """True if a descriptor of this process has a lock, or its descriptors cannot be read."""
    folder = f"{proc}/{pid}/fdinfo"
    try:
        return any("\nlock:" in read_text(f"{folder}/{name}") for name in os.listdir(folder))
    except OSError:
        return True


def why_not_frozen(processes: list[ProcessIdentity], *, shared: bool, proc: Path = PROC) -> str:
    """Why they must not be frozen now; empty if they may. ``shared``: a lock that nothing waits for counts as well, if
    it is exclusive and its file is not the container's alone."""
    for lock in held((one.pid for one in processes), proc):
        path = _path(lock, proc)
        if lock.awaited:
            return f"pid {lock.pid} holds a lock of {path or lock.file}, for which another engine waits"
        if shared and lock.exclusive and path and not _own(lock.pid, path, proc):
            return f"pid {lock.pid} holds a lock of {path}, which other engines may share"
    for one in processes:
        if (name := read_text(f"{proc}/{one.pid}/comm")) in COMPILERS:
            return f"pid {one.pid} compiles for it ({name})"
    return ""


def _path(lock: HeldLock, proc: Path) -> str:
    """The locked file, as its holder names it; empty if it cannot be found."""
    major, minor, inode = lock.file.split(":")
    wanted = os.makedev(int(major, 16), int(minor, 16)), int(inode)
    with contextlib.suppress(OSError):
        for handle in (proc / str(lock.pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found = handle.stat()
                if (found.st_dev, found.st_ino) == wanted:
                    return str(handle.readlink())
    return ""


def _own(pid: int, path: str, proc: Path) -> bool:
    """True if only this container can open the file: it lies in its root, in memory, or in an emptyDir of its pod."""
    try:
        if os.readlink(proc / str(pid) / "ns" / "mnt") == os.readlink(proc / "self" / "ns" / "mnt"):
            return False  # engines of one container, or of none
    except OSError:
        return False
    best = ("", "", "")
    for line in read_text(proc / str(pid) / "mountinfo").splitlines():
        fields, _, after = line.partition(" - ")
        root, point = fields.split()[3:5]
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = point, root, after.split()[0]
    point, root, kind = best
    return point == "/" or kind == "tmpfs" or "/volumes/kubernetes.io~empty-dir/" in root
