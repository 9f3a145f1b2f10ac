"""How near GPUs are to each other: the links of a machine as numbers and as text. Pure."""

import itertools
import re
from collections.abc import Iterable, Sequence

from kybernate.machine import Gpu, Link, PcieLevel

LEVELS = tuple(reversed(PcieLevel))
"""Far to near."""
_LEVEL_TEXTS = {
    "PIX": "same PCIe switch (PIX)",
    "PXB": "PCIe switches below one host bridge (PXB)",
    "PHB": "same PCIe host bridge (PHB)",
}
_FIELD_BITS = 20
"""64 GPUs make 2016 pairs; 36 NVLinks each are the largest sum, below 2**17."""
_PAIRS_SHOWN = 4


def in_order(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Sort GPUs by PCI address, which (unlike the index) is stable; MIG instances of one GPU follow each other."""
    return sorted(gpus, key=_place)


class Wiring:
    """The links of a machine, by pair. For a pair without a link, the NUMA nodes decide."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._links = {frozenset((link.a, link.b)): link for link in links}

    def level(self, a: Gpu, b: Gpu) -> PcieLevel | None:
        """Return the PCIe level of a pair; None where neither links nor NUMA nodes are known."""
        link = self._links.get(frozenset((a.uuid, b.uuid)))
        if link is not None:
            return link.level
        if a.numa_node is None or b.numa_node is None:
            return None
        return PcieLevel.NODE if a.numa_node == b.numa_node else PcieLevel.SYS

    def nvlinks(self, a: Gpu, b: Gpu) -> int:
        """Return the number of NVLinks between two GPUs."""
        link = self._links.get(frozenset((a.uuid, b.uuid)))
        return 0 if link is None else link.nvlinks

    def nearness(self, a: Gpu, b: Gpu) -> int:
        """Return a number to sum over the pairs of a group: equal GPUs first, then NVLinks, PCIe level, peer access.

        Each of the four criteria has separate bits, so that no sum of a lesser criterion outweighs a greater one.
        """
        link = self._links.get(frozenset((a.uuid, b.uuid)))
        level = self.level(a, b)
        equal = a.name == b.name and a.memory_bytes == b.memory_bytes
        score = 0
        for field in (
            int(equal),
            self.nvlinks(a, b),
            0 if level is None else LEVELS.index(level),
            int(link is not None and link.p2p),
        ):
            score = (score << _FIELD_BITS) | field
        return score

    def describe(self, gpus: Sequence[Gpu]) -> str:
        """Describe in one phrase how these GPUs are connected, for users."""
        if len(gpus) == 1:
            return f"a single GPU{f' on NUMA node{_node(gpus)}' if _node(gpus) else ''}"
        pairs = list(itertools.combinations(gpus, 2))
        linked = [(a, b) for a, b in pairs if self.nvlinks(a, b)]
        if len(linked) == len(pairs):
            return self._describe_nvlink(gpus, linked) + _shared(gpus)
        if linked and len(linked) <= _PAIRS_SHOWN:
            ways = " and ".join(f"NVLink ×{self.nvlinks(a, b)} between {a.index} and {b.index}" for a, b in linked)
        elif linked:
            ways = f"NVLink between {len(linked)} of {len(pairs)} pairs"
        rest = self._describe_pcie(gpus, pairs)
        return f"{ways}, else {rest}" if linked else rest

    def _describe_nvlink(self, gpus: Sequence[Gpu], pairs: list[tuple[Gpu, Gpu]]) -> str:
        counts = sorted({self.nvlinks(a, b) for a, b in pairs})
        wide = "×" + " to ×".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        who = f"{gpus[0].index} and {gpus[1].index}" if len(gpus) == 2 else f"all {len(gpus)}"
        switched = all(self._links[frozenset((a.uuid, b.uuid))].switched for a, b in pairs)
        return f"NVLink {wide} between {who}{' through NVSwitch' if switched else ''}"

    def _describe_pcie(self, gpus: Sequence[Gpu], pairs: list[tuple[Gpu, Gpu]]) -> str:
        levels = [self.level(a, b) for a, b in pairs]
        if None in levels:
            return "in PCI order: the machine does not report how they are connected"
        farthest = min((level for level in levels if level is not None), key=LEVELS.index)
        if farthest in _LEVEL_TEXTS:
            return _LEVEL_TEXTS[farthest] + _shared(gpus)
        if farthest == "NODE":
            return f"same NUMA node{_node(gpus)} (NODE)"
        nodes = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
        across = f" {' and '.join(str(node) for node in nodes)}" if len(nodes) > 1 else ""
        return f"across NUMA nodes{across} (SYS)"


def _place(gpu: Gpu) -> tuple[list[int], int, int, str]:
    parts = re.split("[:.]", gpu.pci_bus_id)
    try:
        address = [int(part, 16) for part in parts]
    except ValueError:
        address = [0]
    mig = gpu.mig
    return address, mig.gpu_instance if mig else -1, mig.compute_instance if mig else -1, gpu.uuid


def _node(gpus: Sequence[Gpu]) -> str:
    nodes = {gpu.numa_node for gpu in gpus}
    return f" {gpus[0].numa_node}" if len(nodes) == 1 and None not in nodes else ""


def _shared(gpus: Sequence[Gpu]) -> str:
    """Describe the NUMA nodes of GPUs that NVLinks connect."""
    if _node(gpus):
        return f"; {'both' if len(gpus) == 2 else f'all {len(gpus)}'} share NUMA node{_node(gpus)}"
    nodes = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    return f"; they are on NUMA nodes {' and '.join(str(node) for node in nodes)}" if len(nodes) > 1 else ""
