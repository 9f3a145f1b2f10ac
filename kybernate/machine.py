"""What a machine's GPUs are, how near they are to each other, and what happens to them: the words for it. Pure.

Read by ``kybernate.gpus`` (NVML or the fake driver), decided upon by ``kybernate.topology`` and the services.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Mig:
    """Which part of which GPU a MIG instance is."""

    parent: str
    """UUID of the GPU."""
    profile: str
    """NVIDIA's name: compute slices and memory, ``3g.40gb``; ``1c.3g.40gb`` for a part of its compute slices."""
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU, or one MIG instance of a GPU."""

    index: int
    """NVML's index; may change with a reboot, unlike the UUID. Of an instance: its GPU's."""
    uuid: str
    """``GPU-…``, or ``MIG-…`` for an instance."""
    minor: int
    """N of /dev/nvidiaN; neither the index nor in the order of the PCI addresses. Of an instance: its GPU's."""
    pci_bus_id: str
    """As sysfs names it: ``0000:3b:00.0``. Of an instance: its GPU's."""
    name: str
    memory_bytes: int
    """All of its memory, in use or not."""
    numa_node: int | None
    """Nearest NUMA node; None where the machine does not say."""
    mig: Mig | None = None
    """Set on a MIG instance."""
    mig_enabled: bool = False
    """A GPU in MIG mode: only its instances can be used, never its memory as a whole."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. One entry for each of its GPUs; parked processes do not appear."""

    pid: int
    gpu: str
    """UUID; of the MIG instance, if it uses one."""
    bytes: int
    """Its memory there; may be 0. Where the driver does not tell, all that is used on the GPU."""


class Level(StrEnum):
    """How far two GPUs are from each other over PCIe, near to far, in the words of ``nvidia-smi topo -m``."""

    PIX = "PIX"
    """At most one PCIe bridge between them."""
    PXB = "PXB"
    """Several PCIe bridges, no host bridge."""
    PHB = "PHB"
    """One PCIe host bridge."""
    NODE = "NODE"
    """Several host bridges of one NUMA node."""
    SYS = "SYS"
    """The link between NUMA nodes."""


def distance(level: Level) -> int:
    """0 for the nearest (PIX) to 4 for the farthest (SYS)."""
    return tuple(Level).index(level)


@dataclass(frozen=True, slots=True)
class Link:
    """How two GPUs reach each other."""

    a: str
    """UUID."""
    b: str
    level: Level
    """The way over PCIe, which is there beside any NVLink."""
    nvlinks: int = 0
    """NVLinks between the two, which work as one; 0 = none."""
    switched: bool = False
    """The NVLinks go through NVSwitches: each GPU of the fabric reaches each other one with all of its links."""
    p2p: bool = True
    """The driver lets one read the other's memory."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """The driver reported an error of a GPU (XID; the numbers are in NVIDIA's XID catalogue)."""

    gpu: str | None
    """UUID; of the MIG instance, if the driver names one. None: unknown, take it as any of them."""
    xid: int
