"""The processes that a bench measures, and the load beside them."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

SCHED = 2
"""The clock of a process that counts its run time (``CPUCLOCK_SCHED`` in linux/posix-timers.h)."""


def process_tree(pid: int) -> list[int]:
    """A process and its children, without those that have ended meanwhile."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, ended threads included. /proc counts in 10 ms, its clock in nanoseconds.

    Raises OSError if the process is gone.
    """
    return time.clock_gettime(~pid << 3 | SCHED)


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    total = 0.0
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            total += cpu_seconds(each)
    return total


@asynccontextmanager
async def every_core_busy(busy: bool = True) -> AsyncIterator[None]:
    """A loop that computes on each core, at the priority of this process."""
    burning = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
        for _ in range((os.cpu_count() or 1) * busy)
    ]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            await process.wait()
