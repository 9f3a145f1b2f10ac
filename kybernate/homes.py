"""Which container a process is in: one answer for checkpointer and manager, who read the driver's list on their own.

By the container's id in the process's control groups; ``process://<pid>``, which the fake kubelet reports, by its
ancestors and its session.
"""

import functools
from collections.abc import Collection
from pathlib import Path

from kybernate.cgroups import PROC, container_path, membership, read
from kybernate.seat import container_of

_PROCESS = "process://"


class Homes:
    """These containers, as kubelet names them, at one moment: what it has read of a process is not read again."""

    def __init__(self, containers: Collection[str], proc: Path = PROC) -> None:
        self._proc = proc
        self.stat = functools.cache(self._stat)
        """The fields of a process from its state on. Raises OSError."""
        ids = {container_of(one): one for one in containers}
        self._processes = {
            int(pid): one
            for key, one in ids.items()
            if key.startswith(_PROCESS) and (pid := key.removeprefix(_PROCESS)).isdecimal()
        }
        self._groups = {key.rpartition("/")[2]: one for key, one in ids.items() if not key.startswith(_PROCESS)}

    def of(self, pid: int) -> str | None:
        """The container that the process is in; None: in none of these. Raises OSError if it cannot be read."""
        for one in self._ancestors(pid) if self._processes else ():
            if one in self._processes:
                return self._processes[one]
        paths = membership(self.read(pid, "cgroup")).values() if self._groups else ()
        return next(
            (one for identity, one in self._groups.items() if any(container_path(path, identity) for path in paths)),
            None,
        )

    def read(self, pid: int, file: str) -> str:
        """A file of a process, which may contain any bytes. Raises OSError."""
        return read(f"{self._proc}/{pid}/{file}")

    def _stat(self, pid: int) -> list[str]:
        return self.read(pid, "stat").rpartition(")")[2].split()

    def _ancestors(self, pid: int) -> list[int]:
        """The process, its parent, and so on. A parent that ended leaves its children to the reaper."""
        line = [pid]
        while line[-1] > 1:
            fields = self.stat(line[-1])
            parent, session = int(fields[1]), int(fields[3])
            if session not in line and session > 1:
                line.insert(0, session)  # a container's first process leads its session
            line.append(parent)
        return line
