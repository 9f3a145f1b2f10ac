"""Memory limits of control groups, versions 1 and 2: how much a process may still take before the kernel kills it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages; no machine has this much memory."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit of a process."""

    cgroup: str
    """Where its memory is accounted; empty where it cannot be told."""
    limit_bytes: int | None = None
    free_bytes: int | None = None


def memory_limit(root: Path, pid: int | str) -> MemoryLimit:
    """The limit with the least room over the control group of a process and those above it."""
    mount, path = _memory_cgroup(root, pid)
    if not path or ".." in path:  # ".." is how a control group outside of this namespace is written
        return MemoryLimit("")
    rooms = sorted(_rooms(mount, path))
    if not rooms:
        return MemoryLimit(path)
    free, limit = rooms[0]
    return MemoryLimit(path, limit, free)


def paths(root: Path, pid: int | str) -> dict[str, str]:
    """Path by controller, as /proc/<pid>/cgroup has it; version 2 is the empty name. Empty when it is gone."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def unified_mount(root: Path) -> Path | None:
    """Where version 2 is mounted: at the usual place, or in ``unified`` beside version 1."""
    base = root / "sys/fs/cgroup"
    return next((mount for mount in (base, base / "unified") if (mount / "cgroup.controllers").exists()), None)


def _memory_cgroup(root: Path, pid: int | str) -> tuple[Path, str]:
    found = paths(root, pid)
    if "memory" in found:
        return root / "sys/fs/cgroup/memory", found["memory"]
    return unified_mount(root) or root / "sys/fs/cgroup", found.get("", "")


def _rooms(mount: Path, path: str) -> Iterator[tuple[int, int]]:
    """(free, limit) of every control group on the way up that has a limit."""
    folder = mount / path.lstrip("/")
    while True:
        v1 = (folder / "memory.limit_in_bytes").exists()
        limit = _number(folder / ("memory.limit_in_bytes" if v1 else "memory.max"))
        used = _number(folder / ("memory.usage_in_bytes" if v1 else "memory.current"))
        if limit is not None and limit < _UNLIMITED and used is not None:
            yield max(0, limit - max(0, used - _clean_cache(folder, "total_" if v1 else ""))), limit
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _clean_cache(folder: Path, prefix: str) -> int:
    """Page cache that the kernel drops before it kills anybody."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    dirty = ("total_dirty", "total_writeback") if prefix else ("file_dirty", "file_writeback")
    cache = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return max(0, cache - sum(int(stat.get(name, 0)) for name in dirty))


def _number(file: Path) -> int | None:
    """None where there is no such file, or it says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
