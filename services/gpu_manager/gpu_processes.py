"""Processes on the GPUs: how much VRAM seats use, and which belong to no seat: while such a one is there, nothing is
started or restored on its groups.

A restore that runs out of memory destroys what it restores, and a foreign process may allocate more at any time. Seats
that run already go on. A process that holds 0 bytes is none: NVML lists whatever opened a device, for example one that
asked for the number of GPUs (llm-d #148). A seat whose processes hold memory on another group's GPUs is ended; its pod
sets CUDA_VISIBLE_DEVICES itself, for example. This module reads /proc; the decision what follows is the board's.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from kybernate.cgroups import PROC
from kybernate.gpus import GpuError, Gpus
from kybernate.homes import Homes
from kybernate.logs import OnceLogger
from services.gpu_manager.core.inputs import ForeignProcess, ForeignProcessesSeen, WallTime

NEVER = WallTime(0.0)
READS = 2
"""A process counts once it was seen in so many reads in a row: containers start and end between two reads of pods."""
STRAY_READS = 3
"""The same for a process on another group's GPU: a seat may move between the look at its place and the read."""


class GpuProcesses:
    """Reads which processes use the GPUs."""

    def __init__(self, gpus: Gpus, helpers: Path, proc: Path = PROC) -> None:
        """``helpers``: folder in which the checkpointer notes its helpers."""
        self._gpus, self._helpers, self._proc = gpus, helpers, proc
        self._seen: dict[tuple[int, str], int] = {}
        self._astray: dict[tuple[str, str], int] = {}
        self._used: dict[str, dict[str, int]] = {}
        """Bytes by container and GPU in the last read."""
        self._began = NEVER
        self._unread = OnceLogger("gpu_processes.read_failed")

    async def read(
        self,
        containers: Collection[str],
        places: Mapping[str, frozenset[str]] = MappingProxyType({}),
        *,
        resting: Collection[str] = (),
        began: WallTime = NEVER,
        reads: int = READS,
    ) -> ForeignProcessesSeen | None:
        """Processes that are in none of these containers and were seen in so many ``reads`` in a row, by GPU, what each
        container uses, and which have processes elsewhere than in their ``places`` (UUIDs); of those that
        are ``resting`` what they hold. ``began``: now. None when the driver does not answer, which ends a row of reads.
        """
        try:
            processes = await self._gpus.processes()
        except GpuError as error:
            self._unread.log(reason=str(error))
            self._used = {}
            return None
        self._unread.clear()
        on = {(process.pid, process.gpu) for process in processes if process.bytes > 0}
        names, homes = await asyncio.to_thread(self._names, {pid for pid, _ in on}, containers)
        self._seen = {key: self._seen.get(key, 0) + 1 for key in on if key[0] in names}
        used: dict[str, dict[str, int]] = {}
        for process in processes:
            if process.pid in homes and process.bytes > 0:
                gpus = used.setdefault(homes[process.pid], {})
                gpus[process.gpu] = gpus.get(process.gpu, 0) + process.bytes
        astray = {(one, gpu) for one, place in places.items() for gpu in used.get(one, {}).keys() - place}
        self._astray = {key: self._astray.get(key, 0) + 1 for key in astray}
        before, since, self._used, self._began = self._used, self._began, used, began
        held = {
            one: {gpu: min(size, used[one][gpu]) for gpu, size in before[one].items() if gpu in used[one]}
            for one in before.keys() & used.keys() & {*resting}
        }
        return ForeignProcessesSeen(
            tuple(ForeignProcess(gpu, pid, names[pid]) for (pid, gpu), n in sorted(self._seen.items()) if n >= reads),
            {container: max(gpus.values()) * len(gpus) for container, gpus in used.items()},
            frozenset(key for key, n in self._astray.items() if n >= STRAY_READS),
            held,
            since,
        )

    def _names(self, pids: set[int], containers: Collection[str]) -> tuple[dict[int, str], dict[int, str]]:
        """By process: the name of one that belongs to no container, else its container. One that has ended is left
        out; one that may not be read here is none that is known."""
        found: dict[int, str] = {}
        homes: dict[int, str] = {}
        homes_of = Homes(containers, self._proc)  # processes share ancestors: each is read once
        for pid in pids - self._own(homes_of) if pids else ():
            try:
                home = homes_of.of(pid)
                if home is None:
                    found[pid] = homes_of.read(pid, "comm").strip()
                else:
                    homes[pid] = home
            except PermissionError:
                found[pid] = "a process that cannot be read"
            except OSError:
                pass
        return found, homes

    def _own(self, homes: Homes) -> set[int]:
        """Pids of the checkpointer's helpers, whose bytes a driver may not report; a reused pid does not count."""
        own = set()
        with contextlib.suppress(OSError):
            for note in self._helpers.iterdir():
                pid, _, start = note.name.partition("-")
                with contextlib.suppress(OSError, ValueError):
                    if homes.stat(int(pid))[19] == start:
                        own.add(int(pid))
        return own
