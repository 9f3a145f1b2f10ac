"""Processes on the GPUs: how much VRAM seats use, and which belong to no seat: while such a one is there, nothing is
started or restored on its groups.

A restore that runs out of memory destroys what it restores, and a foreign process may allocate more at any time. Seats
that run already go on. A process that holds 0 bytes is none: NVML lists whatever opened a device, for example one that
asked for the number of GPUs (llm-d #148). A seat whose processes hold memory on another group's GPUs is ended; its pod
sets CUDA_VISIBLE_DEVICES itself, for example. This module reads /proc; the decision what follows is the board's.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from kybernate.gpus import GpuError, Gpus
from kybernate.logs import OnceLogger
from kybernate.seat import container_of
from services.gpu_manager.core.inputs import ForeignProcess, ForeignProcessesSeen

PROC = Path("/proc")
READS = 2
"""A process counts once it was seen in so many reads in a row: containers start and end between two reads of pods."""
STRAY_READS = 3
"""The same for a process on another group's GPU: a seat may move between the look at its place and the read."""
_PROCESS = "process://"


class GpuProcesses:
    """Reads which processes use the GPUs."""

    def __init__(self, gpus: Gpus, helpers: Path, proc: Path = PROC) -> None:
        """``helpers``: folder in which the checkpointer notes its helpers."""
        self._gpus, self._helpers, self._proc = gpus, helpers, proc
        self._seen: dict[tuple[int, str], int] = {}
        self._peaks: dict[str, int] = {}
        self._astray: dict[tuple[str, str], int] = {}
        self._unread = OnceLogger("gpu_processes.read_failed")

    async def read(
        self,
        containers: Collection[str],
        places: Mapping[str, frozenset[str]] = MappingProxyType({}),
        *,
        reads: int = READS,
    ) -> ForeignProcessesSeen | None:
        """Processes that are in none of these containers and were seen in so many ``reads`` in a row, by GPU, what each
        container used at most, and which have processes elsewhere than in their ``places`` (UUIDs); None when the
        driver does not answer."""
        try:
            processes = await self._gpus.processes()
        except GpuError as error:
            self._unread.log(reason=str(error))
            return None
        self._unread.clear()
        on = {(process.pid, process.gpu) for process in processes if process.bytes > 0}
        names, homes = await asyncio.to_thread(self._names, {pid for pid, _ in on}, tuple(containers))
        self._seen = {key: self._seen.get(key, 0) + 1 for key in on if key[0] in names}
        used: dict[str, dict[str, int]] = {}
        for process in processes:
            if process.pid in homes and process.bytes > 0:
                gpus = used.setdefault(homes[process.pid], {})
                gpus[process.gpu] = gpus.get(process.gpu, 0) + process.bytes
        now = {container: max(gpus.values()) * len(gpus) for container, gpus in used.items()}
        self._peaks = {one: max(now.get(one, 0), self._peaks.get(one, 0)) for one in containers}
        astray = {(one, gpu) for one, place in places.items() for gpu in used.get(one, {}).keys() - place}
        self._astray = {key: self._astray.get(key, 0) + 1 for key in astray}
        return ForeignProcessesSeen(
            tuple(ForeignProcess(gpu, pid, names[pid]) for (pid, gpu), n in sorted(self._seen.items()) if n >= reads),
            self._peaks,
            frozenset(key for key, n in self._astray.items() if n >= STRAY_READS),
        )

    def _names(self, pids: set[int], containers: tuple[str, ...]) -> tuple[dict[int, str], dict[int, str]]:
        """By process: the name of one that belongs to no container, else its container. A process that cannot be read
        here is left out."""
        found: dict[int, str] = {}
        homes: dict[int, str] = {}
        stat = functools.cache(self._stat)  # processes share ancestors: each is read once
        for pid in pids - self._own(stat) if pids else ():
            with contextlib.suppress(OSError):
                home = self._home(pid, containers, stat)
                if home is None:
                    found[pid] = self._read(pid, "comm").strip()
                else:
                    homes[pid] = home
        return found, homes

    def _own(self, stat: Callable[[int], list[str]]) -> set[int]:
        """Pids of the checkpointer's helpers, whose bytes a driver may not report; a reused pid does not count."""
        own = set()
        with contextlib.suppress(OSError):
            for note in self._helpers.iterdir():
                pid, _, start = note.name.partition("-")
                with contextlib.suppress(OSError, ValueError):
                    if stat(int(pid))[19] == start:
                        own.add(int(pid))
        return own

    def _home(self, pid: int, containers: tuple[str, ...], stat: Callable[[int], list[str]]) -> str | None:
        """The container that the process is in; None: in none of these."""
        ids = {container_of(one): one for one in containers}
        processes = {int(number): one for key, one in ids.items() if (number := key.removeprefix(_PROCESS)).isdecimal()}
        line = _ancestors(pid, stat) if processes else []
        found = next((processes[one] for one in line if one in processes), None)
        identities = {key.rpartition("/")[2]: one for key, one in ids.items() if one not in processes.values()}
        groups = self._read(pid, "cgroup") if identities and found is None else ""
        return found or next((one for identity, one in identities.items() if identity and identity in groups), None)

    def _stat(self, pid: int) -> list[str]:
        """The fields of a process from its state on."""
        return self._read(pid, "stat").rpartition(")")[2].split()

    def _read(self, pid: int, file: str) -> str:
        """A file of a process, which may contain any bytes."""
        with open(f"{self._proc}/{pid}/{file}", errors="replace") as opened:  # pathlib takes as long as the read
            return opened.read()


def _ancestors(pid: int, stat: Callable[[int], list[str]]) -> list[int]:
    """The process, its parent, and so on. A parent that ended leaves its children to the reaper."""
    line = [pid]
    while line[-1] > 1:
        fields = stat(line[-1])
        parent, session = int(fields[1]), int(fields[3])
        if session not in line and session > 1:
            line.insert(0, session)  # a container's first process leads its session
        line.append(parent)
    return line
