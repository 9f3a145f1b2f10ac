"""The node's host memory, into which parked seats are copied: that of the kernel, or of the fake machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kybernate.cgroups import PROC
from kybernate.extras import dev_part


class HostMemory(Protocol):
    """Free memory for new copies."""

    async def free_bytes(self) -> int:
        """Free bytes. Raises OSError."""


@dataclass(frozen=True)
class KernelMemory:
    """That of this machine."""

    proc: Path = PROC

    async def free_bytes(self) -> int:
        """From /proc/meminfo. Raises OSError."""
        return available_bytes(self.proc)


def available_bytes(proc: Path = PROC) -> int:
    """MemAvailable of /proc/meminfo: free memory and what the kernel can reclaim. Raises OSError."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError) as error:
        raise OSError(f"{proc}/meminfo has no MemAvailable: {error}") from error


def open_host_memory(fake_driver: Path | None) -> HostMemory:
    """Host memory of this machine, or of the fake one whose driver is at this socket. Raises ExtraMissingError."""
    if fake_driver is None:
        return KernelMemory()
    found: HostMemory = dev_part("host_memory", "KYB_FAKE_DRIVER")(fake_driver)
    return found
