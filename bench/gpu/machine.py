"""Facts about the machine: host memory for copies, memory of processes, and the facts for the report."""

import contextlib
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kybernate.cgroups import Cgroups

GIB = 2**30
MARGIN = 1.1
"""Host memory per byte of parked VRAM (``kybernate.cuda``: the copy and buffers)."""
SPARE_BYTES = 2 * GIB
"""Host memory left to other processes."""


def host_room() -> int:
    """Bytes that copies may take: MemAvailable, or less if a memory limit of this process leaves less."""
    room = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    cgroups = Cgroups()
    cgroup = cgroups.of_process("self")
    limits = [] if cgroup is None or cgroup.folder is None else cgroups.memory_rooms(cgroup)
    return min([room, *(limit.free for limit in limits)])


def no_room(gib: float, processes: int, free_bytes: int) -> str | None:
    """The reason why a case of this size is left out; None if it fits into GPU and host."""
    need = int(gib * processes * GIB)
    if need > free_bytes * 0.95:
        return f"{gib * processes:g} GiB do not fit: {free_bytes / GIB:.1f} GiB of VRAM are free"
    room = host_room()
    if need * MARGIN + SPARE_BYTES > room:
        return f"the copy of {gib * processes:g} GiB does not fit: {room / GIB:.1f} GiB of host memory are free"
    return None


def resident(pids: Iterable[int]) -> int:
    """Resident bytes of these processes together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it had a child that has ended
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
    return total


def facts() -> dict[str, Any]:
    """Driver, GPU and host properties that the report states."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "host_room_gib": round(host_room() / GIB, 1),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "cuda_checkpoint_cli": shutil.which("cuda-checkpoint") is not None,
        "huge_pages": huge_pages(),
    }


def huge_pages() -> str:
    """The machine's setting of transparent huge pages: the word in brackets."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()
