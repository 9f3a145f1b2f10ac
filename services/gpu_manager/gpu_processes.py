"""Processes on the GPUs that belong to no seat: while one is there, nothing is started or restored on its groups.

A restore that runs out of memory destroys what it restores, and a foreign process may allocate more at any time. Seats
that run already go on. This module reads /proc; the decision what follows is the board's.
"""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from kybernate.gpus import GpuError, Gpus
from kybernate.logs import OnceLogger
from services.gpu_manager.inputs import ForeignProcess

PROC = Path("/proc")
READS = 2
"""A process counts once it was seen in so many reads in a row: containers start and end between two reads of pods."""
_PROCESS = "process://"


class GpuProcesses:
    """Reads which processes use the GPUs."""

    def __init__(self, gpus: Gpus, proc: Path = PROC) -> None:
        self._gpus, self._proc = gpus, proc
        self._seen: dict[tuple[int, str], int] = {}
        self._unread = OnceLogger("gpu_processes.read_failed")

    async def foreign(self, containers: Collection[str]) -> tuple[ForeignProcess, ...] | None:
        """Processes that are in none of these containers, by GPU; None when the driver does not answer."""
        try:
            processes = await self._gpus.processes()
        except GpuError as error:
            self._unread.log(reason=str(error))
            return None
        self._unread.clear()
        on = {(process.pid, process.gpu) for process in processes}
        names = await asyncio.to_thread(self._names, {pid for pid, _ in on}, tuple(containers))
        self._seen = {key: self._seen.get(key, 0) + 1 for key in on if key[0] in names}
        return tuple(
            ForeignProcess(gpu, pid, names[pid]) for (pid, gpu), times in sorted(self._seen.items()) if times >= READS
        )

    def _names(self, pids: set[int], containers: tuple[str, ...]) -> dict[int, str]:
        """Names of the processes that belong to no container; a process that cannot be read here is left out."""
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                name = self._read(pid, "comm").strip()
                if not any(self._inside(pid, container) for container in containers):
                    found[pid] = name
        return found

    def _inside(self, pid: int, container: str) -> bool:
        if container.startswith(_PROCESS):
            return int(container.removeprefix(_PROCESS)) in self._ancestors(pid)
        identity = container.rpartition("/")[2]
        return bool(identity) and identity in self._read(pid, "cgroup")

    def _read(self, pid: int, file: str) -> str:
        """A file of a process, which may contain any bytes."""
        return (self._proc / str(pid) / file).read_text(errors="replace")

    def _ancestors(self, pid: int) -> list[int]:
        """The process, its parent, and so on. A parent that ended leaves its children to the reaper."""
        line = [pid]
        while line[-1] > 1:
            fields = self._read(line[-1], "stat").rpartition(")")[2].split()
            parent, session = int(fields[1]), int(fields[3])
            if session not in line and session > 1:
                line.insert(0, session)  # a container's first process leads its session
            line.append(parent)
        return line
