"""What an engine takes while it runs as a Deployment, and what that means for its seat. Pure.

``kyb onboard`` reads it from the engine's own container: the memory in use on its GPUs, the pages that its control
group has in memory, and how long its start took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kybernate.engines import PINNING, RESTART
from kybernate.sizes import format_bytes, parse_bytes

QUESTION = (
    "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
    " && (cat /sys/fs/cgroup/memory.stat 2>/dev/null || cat /sys/fs/cgroup/memory/memory.stat)"
)
"""The shell's line in the engine's container, whose GPUs are its alone."""
COPY_SPEEDS = (2 * 2**30, 21 * 2**30)
"""Bytes per second, slowest and fastest, at which engines were seen to copy their weights (docs/dev/backends.md)."""
RESIDUE_SHARE, RESIDUE_BYTES, RESIDUE_MOST = 0.1, 4 * 2**30, 0.5
"""What a parked engine may keep on a GPU: a share of its footprint there or these bytes, whichever is more, and never
more than the last share. Published: 1.2 to 4 GiB per GPU."""
_time = datetime.fromisoformat
_PAGES = ("anon", "rss", "shmem")
"""In memory.stat of version 2 and 1: what is not page cache."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a running engine takes."""

    gpu_bytes: tuple[int, ...]
    """VRAM in use, by GPU."""
    host_bytes: int
    """Anonymous and shared pages."""
    start_seconds: float | None
    """From the start of its container until its pod was ready, at most; None: it does not show."""

    @property
    def vram_bytes(self) -> int:
        """On all its GPUs."""
        return sum(self.gpu_bytes)


def running_pod(pods: Sequence[Mapping[str, Any]], container: str) -> tuple[str, float | None] | None:
    """(name, seconds of the start) of a pod whose container is ready; None without one."""
    for pod in pods:
        status = pod.get("status") or {}
        for one in status.get("containerStatuses") or ():
            since = ((one.get("state") or {}).get("running") or {}).get("startedAt")
            if one.get("name") == container and one.get("ready") and since:
                ready = [
                    c.get("lastTransitionTime") for c in status.get("conditions") or () if c.get("type") == "Ready"
                ]
                took = (_time(ready[0]) - _time(since)).total_seconds() if ready and ready[0] else None
                return pod["metadata"]["name"], took
    return None


def footprint(answer: str, start_seconds: float | None) -> Footprint:
    """From the answer to QUESTION. Raises ValueError."""
    lines = [line.split() for line in answer.splitlines()]
    gpus = tuple(int(line[0]) * 2**20 for line in lines if len(line) == 1 and line[0].isdecimal())
    host = sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in _PAGES)
    if not gpus:
        raise ValueError(f"nvidia-smi named no GPU: {answer.strip()[:200]!r}")
    return Footprint(gpus, host, start_seconds)


def expected(found: Footprint, backend: str, memory_limit: str) -> list[str]:
    """What to expect of this engine as a seat with this backend. ``memory_limit``: its container's; may be empty."""
    size, count = format_bytes(found.vram_bytes), len(found.gpu_bytes)
    host = format_bytes(found.host_bytes)
    notes = [f"measured now: {size} of VRAM on {count} GPU{'s' * (count > 1)}, {host} of host memory"]
    if backend in PINNING:
        low, high = (found.vram_bytes / speed for speed in reversed(COPY_SPEEDS))
        notes.append(
            f"a park and an activation: {low:.0f} to {high:.0f} s each at published speeds, if all of it were weights; "
            "its KV cache is not copied"
        )
        need = found.host_bytes + found.vram_bytes
        if memory_limit and parse_bytes(memory_limit) < need:
            most = f"the engine and its parked copy take up to {format_bytes(need)}"
            notes.append(f"memory limit {memory_limit}: {most}; raise it unless the weights are known to fit")
    elif found.start_seconds is not None:
        what = "an activation is a start" if backend == RESTART else "an activation loads the model again"
        notes.append(f"{what}: the last start took {found.start_seconds:.0f} s")
    return notes


def most_residue(size: int) -> int:
    """Bytes that a parked engine may keep on a GPU where it took ``size``."""
    return round(min(max(RESIDUE_SHARE * size, RESIDUE_BYTES), RESIDUE_MOST * size))
