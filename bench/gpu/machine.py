"""What the bench must know of the machine: room for copies, memory of processes, and the facts for the report."""

import contextlib
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
MARGIN = 1.1
"""A parked process needs so much of its VRAM as host memory (research: the copy, and a little)."""
SPARE_BYTES = 2 * GIB
"""Left to everybody else."""


def host_room() -> int:
    """Bytes that copies may take: what the machine has available, or less if this process' cgroup allows less."""
    room = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return min([room, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterable[int]:
    """Limit less use, for this process' memory cgroup and all above it (v2 and v1)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            with contextlib.suppress(OSError, ValueError):  # not at this level; no limit ("max")
                yield int((folder / limit).read_text()) - int((folder / used).read_text())
            folder = folder.parent


def no_room(gib: float, processes: int, free_bytes: int) -> str | None:
    """Why a case of this size is left out; None when it fits into GPU and host."""
    need = int(gib * processes * GIB)
    if need > free_bytes * 0.95:
        return f"{gib * processes:g} GiB do not fit: {free_bytes / GIB:.1f} GiB of VRAM are free"
    room = host_room()
    if need * MARGIN + SPARE_BYTES > room:
        return f"the copy of {gib * processes:g} GiB does not fit: {room / GIB:.1f} GiB of host memory are free"
    return None


def resident(pids: Iterable[int]) -> int:
    """Bytes of host memory that these processes have together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it had a child that has ended
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
    return total


def facts() -> dict[str, Any]:
    """What a reader of the figures must know."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "host_room_gib": round(host_room() / GIB, 1),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "cuda_checkpoint_cli": shutil.which("cuda-checkpoint") is not None,
        "huge_pages": _first_word("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _first_word(path: str) -> str:
    """The chosen word of a kernel switch: the one in brackets."""
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()
