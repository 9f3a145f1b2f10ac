"""How a machine's GPUs are connected, as the table that ``nvidia-smi topo -m`` prints. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kybernate.topology.wiring import Wiring

if TYPE_CHECKING:
    from kybernate.machine import Gpu, Link

LEGEND = {
    "X": "itself",
    "SYS": "over PCIe and the link between NUMA nodes",
    "NODE": "over PCIe and several host bridges of one NUMA node",
    "PHB": "over PCIe and one host bridge",
    "PXB": "over several PCIe bridges, without a host bridge",
    "PIX": "over at most one PCIe bridge",
    "NV#": "over # NVLinks, which work as one",
    "?": "the machine does not tell",
}


def matrix(gpus: "Sequence[Gpu]", links: "Sequence[Link]") -> tuple[tuple[str, ...], ...]:
    """Header and one row per GPU: the way to each other GPU, then its NUMA node (N/A: unknown)."""
    wiring = Wiring(links)
    names = [f"GPU{gpu.index}" for gpu in gpus]
    rows = [
        (name, *(way(wiring, gpu, other) for other in gpus), "N/A" if gpu.numa_node is None else str(gpu.numa_node))
        for name, gpu in zip(names, gpus, strict=True)
    ]
    return (("", *names, "NUMA Affinity"), *rows)


def way(wiring: Wiring, a: "Gpu", b: "Gpu") -> str:
    """One cell."""
    if a.uuid == b.uuid:
        return "X"
    nvlinks = wiring.nvlinks(a, b)
    return f"NV{nvlinks}" if nvlinks else wiring.level(a, b) or "?"


def legend(table: Sequence[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """The words that a table uses, and what they mean."""
    used = {"NV#" if cell.startswith("NV") else cell for row in table[1:] for cell in row[1:-1]}
    return tuple((word, meaning) for word, meaning in LEGEND.items() if word in used)
