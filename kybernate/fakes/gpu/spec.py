"""The made-up machine: its GPUs, links, speeds and presets. Pure."""

import itertools
import uuid
from dataclasses import dataclass

GIB = 2**30
_NAMESPACE = uuid.UUID("6b796265-726e-4174-a567-707566616b65")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One made-up GPU. The UUID depends on the seed and the index only, so it survives restarts of the daemon."""

    index: int
    uuid: str
    minor: int
    pci_bus_id: str
    name: str
    memory_bytes: int
    numa_node: int


@dataclass(frozen=True, slots=True)
class Link:
    """Two GPUs that reach each other without the CPU."""

    kind: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What the daemon pretends to be."""

    gpus: tuple[GpuSpec, ...]
    links: tuple[Link, ...] = ()
    bandwidth: float = 48e9
    """Bytes per model second of one process' checkpoint or restore."""
    overhead_seconds: float = 0.2
    """Model seconds that a checkpoint or restore takes without any byte."""
    slots: int = 1
    """Seats that may have memory on one GPU; more is a violation."""
    host_memory_bytes: int = 0
    """Room for the copies of parked processes; a checkpoint without room gets its process killed."""
    speed: float = 1.0
    """Model seconds per wall second."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named machine."""

    count: int
    memory_bytes: int
    links: str
    name: str


PRESETS = {
    "default": Preset(4, 80 * GIB, "nvlink:0-1,2-3", "Fake H100 PCIe"),
    "single-24gb": Preset(1, 24 * GIB, "none", "Fake RTX 4090"),
    "4xA100": Preset(4, 80 * GIB, "nvlink:all", "Fake A100-SXM4-80GB"),
    "8xH100-nvswitch": Preset(8, 80 * GIB, "nvswitch:all", "Fake H100 80GB HBM3"),
}


def build_gpus(count: int, memory_bytes: int, name: str, seed: str = "0") -> tuple[GpuSpec, ...]:
    """``count`` equal GPUs, split between two NUMA nodes from four GPUs on."""
    if not 1 <= count <= 64:
        raise ValueError(f"{count} GPUs; give 1 to 64")
    nodes = 2 if count >= 4 else 1
    return tuple(
        GpuSpec(
            index=index,
            uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{seed}/{index}')}",
            minor=index,
            pci_bus_id=f"{index // 16:08X}:{(index % 16) * 16 + 1:02X}:00.0",
            name=name,
            memory_bytes=memory_bytes,
            numa_node=index * nodes // count,
        )
        for index in range(count)
    )


def parse_links(text: str, gpus: tuple[GpuSpec, ...]) -> tuple[Link, ...]:
    """Links from ``nvlink:0-1,2-3``, ``nvswitch:all`` or ``none``. Raises ValueError naming the wrong part."""
    if text in ("", "none"):
        return ()
    kind, colon, pairs = text.partition(":")
    if not colon:
        raise ValueError(f"links {text!r}; write none, kind:all or kind:0-1,2-3")
    if pairs == "all":
        return tuple(Link(kind, a.uuid, b.uuid) for a, b in itertools.combinations(gpus, 2))
    links = []
    for pair in pairs.split(","):
        a, _, b = pair.partition("-")
        if not (a.isdigit() and b.isdigit() and int(a) != int(b) and max(int(a), int(b)) < len(gpus)):
            raise ValueError(f"link {pair!r} in {text!r}; write two of the GPUs 0 to {len(gpus) - 1}, e.g. 0-1")
        links.append(Link(kind, gpus[int(a)].uuid, gpus[int(b)].uuid))
    return tuple(links)
