"""Types of a machine's GPUs: identity, MIG instances, links, processes and events. Pure.

``kybernate.gpus`` (NVML or the fake driver) produces them; ``kybernate.topology`` and the services consume them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Mig:
    """The GPU and the part of it that a MIG instance is."""

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
    """NVML's index; may change with a reboot, unlike the UUID. For an instance: its GPU's."""
    uuid: str
    """``GPU-…``, or ``MIG-…`` for an instance."""
    minor: int
    """N of /dev/nvidiaN; neither the index nor in the order of the PCI addresses. For an instance: its GPU's."""
    pci_bus_id: str
    """As sysfs names it: ``0000:3b:00.0``. For an instance: its GPU's."""
    name: str
    memory_bytes: int
    """Total memory, in use or not."""
    numa_node: int | None
    """Nearest NUMA node; None where unknown."""
    mig: Mig | None = None
    """Set on a MIG instance."""
    mig_enabled: bool = False
    """A GPU in MIG mode: only its instances can be used, never its memory as a whole."""

    @property
    def physical(self) -> str:
        """UUID of the physical GPU: its own, for an instance its GPU's."""
        return self.uuid if self.mig is None else self.mig.parent

    def fault(self, reasons: Mapping[str, str]) -> str:
        """Why it is faulty, by the reasons of UUIDs: its own, or its GPU's. Empty: it is not."""
        return reasons.get(self.uuid) or reasons.get(self.physical, "")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. One entry for each of its GPUs; parked processes do not appear."""

    pid: int
    gpu: str
    """UUID; of the MIG instance, if it uses one."""
    bytes: int
    """Its memory there; may be 0."""
    exact: bool = True
    """False where the driver does not report it (NVML_VALUE_NOT_AVAILABLE): ``bytes`` is all memory in use there."""


@dataclass(frozen=True, slots=True)
class GpuSensors:
    """What a GPU measures of itself; None where it or its driver does not report it (a GPU in MIG mode)."""

    gpu: str
    """UUID."""
    celsius: int | None
    watts: float | None
    utilization: float | None
    """Share of the last sample period in which it computed, 0 to 1."""


class PcieLevel(StrEnum):
    """The distance of two GPUs over PCIe, near to far, as ``nvidia-smi topo -m`` names it."""

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


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two GPUs."""

    a: str
    """UUID."""
    b: str
    level: PcieLevel
    """The level of the PCIe connection, which exists beside any NVLink."""
    nvlinks: int = 0
    """Number of NVLinks between the two, which work as one."""
    switched: bool = False
    """The NVLinks go through NVSwitches: each GPU reaches every other one with all of its links."""
    p2p: bool = True
    """The driver allows peer access to memory."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """The driver reported an error of a GPU (XID; the numbers are in NVIDIA's XID catalogue)."""

    gpu: str | None
    """UUID; of the MIG instance, if the driver names one. None: unknown, take it as any of them."""
    xid: int
