"""The made-up machine: presets as they are sold, its GPUs, MIG instances, links and speeds. No I/O.

``hardware("8xL40S")`` gives GPUs, links and instances of a preset without any daemon.
"""

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kybernate.machine import Gpu, Link, Mig, PcieLevel

GIB = 2**30
_A100 = "Fake A100-SXM4-80GB"
_A100_PCIE = "Fake A100 80GB PCIe"
_PAIRS_OF_A_SOCKET = ("0/0/0/0", "0/0/0/0", "1/0/0/0", "1/0/0/0")


@dataclass(frozen=True, slots=True)
class Preset:
    """A named machine."""

    name: str
    """Of each GPU."""
    memory_bytes: int
    """Of each GPU."""
    places: tuple[str, ...]
    """Where each GPU sits: ``NUMA node/host bridge/upper PCIe switch/PCIe switch``; how much two of them share from
    the left says how near they are (PIX when all is equal, SYS when nothing is)."""
    links: str = "none"
    """``none``, ``nvlink:all``, ``nvlink:0-1,2-3`` or ``nvswitch:all``."""
    nvlinks: int = 0
    """Links of each linked pair; behind NVSwitch: links of each GPU."""
    minors: tuple[int, ...] = ()
    """N of /dev/nvidiaN by index; empty: the index."""
    slots: tuple[int, ...] = ()
    """Rank of each GPU in the order of PCI addresses; empty: the index."""
    partitions: tuple[tuple[str, ...], ...] = ()
    """MIG profiles of each GPU's instances; none for a GPU: not in MIG mode."""
    p2p_across_nodes: bool = True
    """Whether GPUs of different NUMA nodes can read each other's memory without NVLink."""

    @property
    def count(self) -> int:
        """How many GPUs."""
        return len(self.places)


PRESETS = {
    "default": Preset("Fake H100 PCIe", 80 * GIB, _PAIRS_OF_A_SOCKET, "nvlink:0-1,2-3", 12),
    "single-24gb": Preset("Fake RTX 4090", 24 * GIB, ("0/0/0/0",)),
    "4xA100": Preset(_A100, 80 * GIB, ("0/0/0/0", "0/1/0/0", "1/0/0/0", "1/1/0/0"), "nvlink:all", 4),
    "4xA100-pcie": Preset(_A100_PCIE, 80 * GIB, ("0/0/0/0", "0/0/0/0", "0/1/0/0", "0/1/0/0")),
    "4xA100-nvlink-pairs": Preset(_A100_PCIE, 80 * GIB, _PAIRS_OF_A_SOCKET, "nvlink:0-1,2-3", 12),
    "4xA100-shuffled": Preset(
        _A100_PCIE,
        80 * GIB,
        ("1/0/0/0", "0/0/0/0", "1/0/0/0", "0/0/0/0"),
        "nvlink:0-2,1-3",
        12,
        minors=(2, 3, 0, 1),
        slots=(3, 1, 2, 0),
    ),
    "8xA100-nvswitch": Preset(
        _A100,
        80 * GIB,
        ("0/0/0/0", "0/0/0/1", "0/1/0/0", "0/1/0/1", "1/0/0/0", "1/0/0/1", "1/1/0/0", "1/1/0/1"),
        "nvswitch:all",
        12,
    ),
    "8xH100-nvswitch": Preset(
        "Fake H100 80GB HBM3",
        80 * GIB,
        ("0/0/0/0", "0/1/0/0", "0/2/0/0", "0/3/0/0", "1/0/0/0", "1/1/0/0", "1/2/0/0", "1/3/0/0"),
        "nvswitch:all",
        18,
    ),
    "8xL40S": Preset(
        "Fake L40S",
        48 * GIB,
        ("0/0/0/0", "0/0/0/0", "0/0/0/1", "0/1/0/0", "1/0/0/0", "1/0/0/0", "1/0/0/1", "1/1/0/0"),
        p2p_across_nodes=False,
    ),
    "A100-mig-mixed": Preset(_A100_PCIE, 80 * GIB, ("0/0/0/0",), partitions=(("3g.40gb", "2g.20gb", "2g.20gb"),)),
    "A100-mig-1g": Preset(_A100_PCIE, 80 * GIB, ("0/0/0/0",), partitions=(("1g.10gb",) * 7,)),
    "2xA100-mig-3g": Preset(
        _A100_PCIE, 80 * GIB, ("0/0/0/0", "1/0/0/0"), partitions=(("3g.40gb",) * 2, ("3g.40gb",) * 2)
    ),
    "2xA100-half-mig": Preset(
        _A100_PCIE, 80 * GIB, ("0/0/0/0", "1/0/0/0"), partitions=((), ("3g.40gb", "2g.20gb", "2g.20gb"))
    ),
}


def places_of(count: int) -> tuple[str, ...]:
    """Where GPUs sit that no preset describes: two NUMA nodes from four GPUs on, pairs behind one switch."""
    nodes = 2 if count >= 4 else 1
    return tuple(f"{index * nodes // count}/{index // 2}/0/0" for index in range(count))


_NAMESPACE = uuid.UUID("6b796265-726e-4174-a567-707566616b65")
_MIG_MIB = {"1g.10gb": 9728, "1g.20gb": 19968, "2g.20gb": 19968, "3g.40gb": 40192, "4g.40gb": 40192, "7g.80gb": 81152}
"""Memory of an instance of an 80 GB GPU, which is a little less than its share."""
_USUAL_NVLINKS = 12
"""Between two cards with a bridge, and of an A100 behind NVSwitch."""
MOVE_SECONDS = 3.0
"""What a move costs beyond the same restore at home. An assumption, since no measurement is published; the
manager counts with the same until it has seen a move."""
_LEVELS = (PcieLevel.SYS, PcieLevel.NODE, PcieLevel.PHB, PcieLevel.PXB, PcieLevel.PIX)


class Hardware(NamedTuple):
    """What is in a machine, as ``kybernate.topology.plan`` takes it."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    """Every pair once."""
    instances: tuple[Gpu, ...]
    """MIG instances of the GPUs in MIG mode."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What the daemon pretends to be."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    instances: tuple[Gpu, ...] = ()
    bandwidth: float = 48e9
    """Bytes per model second of one process' checkpoint or restore."""
    overhead_seconds: float = 0.2
    """Model seconds that a checkpoint or restore takes without any byte."""
    lanes: int = 0
    """Transfers that the link to the host carries at full speed; more share it. 0: any number."""
    move_seconds: float = MOVE_SECONDS
    """Model seconds that a restore takes longer when it brings memory to another GPU than it was parked on."""
    slots: int = 1
    """Seats that may have memory on one GPU; more is a violation."""
    host_memory_bytes: int = 0
    """Room for the copies of parked processes; a checkpoint without room gets its process killed."""
    speed: float = 1.0
    """Model seconds per wall second."""


def hardware(preset: str, seed: str = "0") -> Hardware:
    """A preset's machine, as the daemon shows it. Raises ValueError for an unknown name, naming those there are."""
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; presets are {', '.join(sorted(PRESETS))}")
    return build(PRESETS[preset], seed)


def changed(
    name: str, gpus: int | None = None, memory_bytes: int | None = None, links: str | None = None, gpu_name: str = ""
) -> Preset:
    """A preset with the GPUs and links that are given; another number of GPUs is another board. Raises ValueError."""
    preset = PRESETS[name]
    if memory_bytes is not None and memory_bytes < GIB:  # 80 is meant as GiB, and would be 80 bytes
        raise ValueError(f"{memory_bytes} bytes are less than a GPU has; write a unit: 80GiB")
    if gpus is not None and gpus != preset.count:
        if any(preset.partitions):
            raise ValueError(f"--gpus {gpus}: preset {name} has {preset.count}, split by MIG; omit it")
        kept = preset.links if preset.links.endswith(":all") else "none"
        preset = Preset(preset.name, preset.memory_bytes, places_of(gpus), kept, preset.nvlinks)
    if memory_bytes is not None and memory_bytes != preset.memory_bytes:
        if any(preset.partitions):
            raise ValueError(f"--memory: preset {name} is split by MIG, which fits its memory only; omit it")
        preset = replace(preset, memory_bytes=memory_bytes)
    if links is not None:
        preset = replace(preset, links=links, nvlinks=preset.nvlinks or _USUAL_NVLINKS)
    return replace(preset, name=gpu_name or preset.name)


def build(preset: Preset, seed: str = "0") -> Hardware:
    """The machine that a preset describes. Raises ValueError when it cannot be."""
    count = preset.count
    if not 1 <= count <= 64:
        raise ValueError(f"{count} GPUs; give 1 to 64")
    partitions = preset.partitions or ((),) * count
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{seed}/{index}')}",
            minor=preset.minors[index] if preset.minors else index,
            pci_bus_id=_bus_id(preset.slots[index] if preset.slots else index),
            name=preset.name,
            memory_bytes=preset.memory_bytes,
            numa_node=int(place.split("/")[0]),
            mig_enabled=bool(partitions[index]),
        )
        for index, place in enumerate(preset.places)
    )
    instances = tuple(
        _instance(gpu, number, profile, seed) for gpu in gpus for number, profile in enumerate(partitions[gpu.index])
    )
    return Hardware(gpus, _links(preset, gpus), instances)


def build_gpus(count: int, memory_bytes: int, name: str, seed: str = "0") -> tuple[Gpu, ...]:
    """``count`` equal GPUs, split between two NUMA nodes from four GPUs on.

    A UUID depends on the seed and the index only, so it survives restarts of the daemon.
    """
    return build(Preset(name, memory_bytes, places_of(count)), seed).gpus


def parse_links(text: str, count: int) -> tuple[bool, frozenset[tuple[int, int]]]:
    """``nvlink:0-1,2-3``, ``nvlink:all``, ``nvswitch:all`` or ``none`` → (through switches?, pairs of indices).

    Raises ValueError naming the wrong part.
    """
    if text in ("", "none"):
        return False, frozenset()
    kind, colon, pairs = text.partition(":")
    if not colon or kind not in ("nvlink", "nvswitch") or (kind == "nvswitch" and pairs != "all"):
        raise ValueError(f"links {text!r}; write none, nvlink:0-1,2-3, nvlink:all or nvswitch:all")
    if pairs == "all":
        return kind == "nvswitch", frozenset(itertools.combinations(range(count), 2))
    found = set()
    for pair in pairs.split(","):
        a, _, b = pair.partition("-")
        if not (a.isdigit() and b.isdigit() and int(a) != int(b) and max(int(a), int(b)) < count):
            raise ValueError(f"link {pair!r} in {text!r}; write two of the GPUs 0 to {count - 1}, e.g. 0-1")
        found.add((min(int(a), int(b)), max(int(a), int(b))))
    return False, frozenset(found)


def _links(preset: Preset, gpus: Sequence[Gpu]) -> tuple[Link, ...]:
    switched, pairs = parse_links(preset.links, len(gpus))
    found = []
    for a, b in itertools.combinations(gpus, 2):
        level = _level(preset.places[a.index], preset.places[b.index])
        linked = (a.index, b.index) in pairs
        p2p = linked or preset.p2p_across_nodes or level is not PcieLevel.SYS
        found.append(Link(a.uuid, b.uuid, level, preset.nvlinks if linked else 0, switched and linked, p2p))
    return tuple(found)


def _level(a: str, b: str) -> PcieLevel:
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("/"), b.split("/"), strict=True))
    return _LEVELS[len(tuple(shared))]


def _bus_id(slot: int) -> str:
    return f"{slot // 15:04x}:{(slot % 15) * 16 + 17:02x}:00.0"


def _instance(gpu: Gpu, number: int, profile: str, seed: str) -> Gpu:
    return Gpu(
        index=gpu.index,
        uuid=f"MIG-{uuid.uuid5(_NAMESPACE, f'{seed}/{gpu.index}/{number}')}",
        minor=gpu.minor,
        pci_bus_id=gpu.pci_bus_id,
        name=f"{gpu.name} MIG {profile}",
        memory_bytes=_MIG_MIB[profile] << 20,
        numa_node=gpu.numa_node,
        mig=Mig(gpu.uuid, profile, gpu_instance=number + 1, compute_instance=0),
    )
