"""Machines that are sold, as data: which GPUs, where they sit, how they are linked, how MIG splits them. Pure."""

from dataclasses import dataclass

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
