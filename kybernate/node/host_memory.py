"""The node's host memory, into which parked seats are copied: that of the kernel, or of the fake machine."""

from dataclasses import dataclass
from pathlib import Path

from kybernate.cgroups import PROC
from kybernate.extras import dev_part


@dataclass
class HostMemory:
    """That of this machine: free memory for new copies."""

    proc: Path = PROC

    async def free_bytes(self) -> int:
        """Free bytes, from /proc/meminfo. Raises OSError."""
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
        return HostMemory()
    found: HostMemory = dev_part("host_memory", "KYB_FAKE_DRIVER")(fake_driver)
    return found
