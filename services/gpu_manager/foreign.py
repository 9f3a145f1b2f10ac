"""Processes on the GPUs that belong to no seat: while one is there, nothing is started or restored on its groups.

A restore that runs out of memory destroys what it restores, and nobody knows what a stranger will take next. Seats
that run already go on: nothing is wrong with them. Reads /proc; the decision what follows is the board's.
"""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from kybernate.gpus import GpuError, Gpus
from kybernate.logs import OnceLogger
from services.gpu_manager.inputs import Stranger

PROC = Path("/proc")
LOOKS = 2
"""So often in a row a process must be seen before it counts: containers come and go between two looks at pods."""
_PROCESS = "process://"


class Watch:
    """Looks at the processes on the GPUs again and again."""

    def __init__(self, gpus: Gpus, proc: Path = PROC) -> None:
        self._gpus, self._proc = gpus, proc
        self._seen: dict[tuple[int, str], int] = {}
        self._unread = OnceLogger("strangers.unread")

    async def look(self, containers: Collection[str]) -> tuple[Stranger, ...] | None:
        """Processes that are in none of these containers, by GPU; None when the driver cannot be asked."""
        try:
            processes = await self._gpus.processes()
        except GpuError as error:
            self._unread.log(reason=str(error))
            return None
        self._unread.clear()
        on = {(process.pid, process.gpu) for process in processes}
        names = await asyncio.to_thread(self._strangers, {pid for pid, _ in on}, tuple(containers))
        self._seen = {key: self._seen.get(key, 0) + 1 for key in on if key[0] in names}
        return tuple(
            Stranger(gpu, pid, names[pid]) for (pid, gpu), times in sorted(self._seen.items()) if times >= LOOKS
        )

    def _strangers(self, pids: set[int], containers: tuple[str, ...]) -> dict[int, str]:
        """Names of those that belong to no container. Who cannot be seen from here cannot be judged."""
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
        """Names in it are any bytes."""
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
