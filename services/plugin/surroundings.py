"""How groups lie to each other: which share GPUs, which share NUMA nodes, how close the GPUs of each are. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from kybernate.machine import Link, distance
from kybernate.topology import Group

UNKNOWN = 99
"""A pair of GPUs that the machine says nothing about is farther than any that it names."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts about each group, by its name, that do not change while the groups do not."""

    order: Mapping[str, int]
    """Place in the configuration."""
    physical: Mapping[str, frozenset[str]]
    """UUIDs of its GPUs, and of those that its MIG instances are a part of."""
    overlapping: Mapping[str, tuple[str, ...]]
    """Other groups that share a GPU with it."""
    nearby: Mapping[str, tuple[str, ...]]
    """Groups that share a NUMA node with it, itself among them; all of them where the machine does not say."""
    numa_nodes: Mapping[str, tuple[int, ...]]
    """NUMA nodes of its GPUs; empty where the machine does not say."""
    distance: Mapping[str, tuple[int, ...]]
    """How far its GPUs are from each other: less is closer."""

    @classmethod
    def of(cls, groups: Iterable[Group], links: Iterable[Link]) -> "Surroundings":
        """Look at all pairs once."""
        known = {frozenset((link.a, link.b)): link for link in links}
        every = tuple(groups)
        physical = {group.name: group.physical for group in every}
        # Two MIG instances of one GPU share its faults, and nothing else.
        members = {group.name: frozenset(gpu.uuid for gpu in group.gpus) for group in every}
        nodes = {group.name: _numa_nodes(group) for group in every}
        return cls(
            order={group.name: number for number, group in enumerate(every)},
            physical=physical,
            overlapping={
                a.name: tuple(b.name for b in every if b is not a and members[a.name] & members[b.name]) for a in every
            },
            nearby={
                a.name: tuple(b.name for b in every if b is a or _near(nodes[a.name], nodes[b.name])) for a in every
            },
            numa_nodes=nodes,
            distance={group.name: apart([gpu.uuid for gpu in group.gpus], known) for group in every},
        )


def apart(uuids: Iterable[str], links: Mapping[frozenset[str], Link]) -> tuple[int, int]:
    """How far GPUs are from each other: by the worst pair, over NVLink before PCIe, more links before fewer."""
    pairs = [_pair(links.get(frozenset(pair))) for pair in combinations(tuple(uuids), 2)]
    return max(pairs, default=(0, 0))


def _pair(link: Link | None) -> tuple[int, int]:
    if link is None:
        return UNKNOWN, 0
    return (0, -link.nvlinks) if link.nvlinks else (1 + distance(link.level), 0)


def _near(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return not a or not b or not set(a).isdisjoint(b)


def _numa_nodes(group: Group) -> tuple[int, ...]:
    return tuple(sorted({gpu.numa_node for gpu in group.gpus if gpu.numa_node is not None}))
