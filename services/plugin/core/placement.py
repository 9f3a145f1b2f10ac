"""Which group gets the next seat: six strategies over the same few facts about each group, and wishes. Pure.

Kubelet and the scheduler count seats; the choice of the *group* is the plugin's. An allocated seat may wait: every
group with a free seat can take the next one, and strategies differ in how long it will wait there and in what is left
for other seats. Three rules hold for every strategy:

* a group without a free seat, or with a faulty GPU, is no candidate (the caller leaves the latter out),
* a pending wish for a group is granted when that group is a candidate,
* groups that share GPUs with allocated seats of other groups come last: the seats of overlapping groups never run
  together.

Then, with ties always broken by the order of the configuration:

=============== ====================================================================================================
first-fit       the first group of the configuration
best-fit        the group with the fewest free seats: fills a group before the next one
worst-fit       the group with the most free seats
bin-pack        the NUMA node with the most allocated seats, in it the group with the fewest free seats: keeps whole
                NUMA nodes empty, for groups that need many GPUs and for nodes that can be removed
spread          the fewest allocated seats per slot, then the NUMA node with the fewest: the shortest queue for the
                GPUs, and the fewest seats lost with one NUMA node
topology-aware  a group with an idle slot before one without; then the closest GPUs (NVLink, PCIe level), then the
                fewest NUMA nodes, then as spread: the best links that are free at once
=============== ====================================================================================================
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from kybernate.machine import Link, PcieLevel
from kybernate.node.run_files import Wish
from kybernate.topology import Group

UNKNOWN = 99
"""Distance of a pair of GPUs without a known link: farther than any known one."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The allocated and free seats of a group at one instant, with what the strategies compare."""

    name: str
    order: int
    """Position in the configuration; breaks ties."""
    seats: int
    """All its seats, allocated or not."""
    free: int
    """Seats that can be allocated now."""
    slots: int = 1
    """How many of its seats may run at the same time."""
    overlapping_allocated: int = 0
    """Allocated seats of other groups that share a GPU with it."""
    nearby_allocated: int = 0
    """Allocated seats of all groups on the NUMA nodes of its GPUs, including its seats."""
    distance: tuple[int, ...] = ()
    """Distance between its GPUs, as in ``GroupRelations``."""
    numa_nodes: int = 1
    """Number of NUMA nodes of its GPUs."""

    @property
    def allocated(self) -> int:
        """Allocated seats."""
        return self.seats - self.free

    @property
    def per_slot(self) -> float:
        """Allocated seats per slot: above 1, seats wait for each other."""
        return self.allocated / self.slots


Key = tuple[object, ...]

_KEYS: dict[str, Callable[[GroupLoad], Key]] = {
    "first-fit": lambda load: (load.order,),
    "best-fit": lambda load: (load.free,),
    "worst-fit": lambda load: (-load.free,),
    "bin-pack": lambda load: (-load.nearby_allocated, load.free),
    "spread": lambda load: (load.per_slot, load.nearby_allocated),
    "topology-aware": lambda load: (
        load.allocated >= load.slots,
        load.distance,
        load.numa_nodes,
        load.per_slot,
        load.nearby_allocated,
    ),
}


def best(strategy: str, loads: Iterable[GroupLoad], wish: str = "") -> GroupLoad | None:
    """Return the group that takes the next seat; None when none can. The group named ``wish`` comes before all others.

    ``strategy`` is one of ``kybernate.config.fields.PLACEMENTS``.
    """
    own = _KEYS[strategy]

    def key(load: GroupLoad) -> Key:
        return (load.name != wish, load.overlapping_allocated > 0, *own(load), load.order)

    return min((load for load in loads if load.free > 0), key=key, default=None)


@dataclass(frozen=True, slots=True)
class GroupRelations:
    """How groups relate to each other and to NUMA nodes, by group name; constant while the groups are."""

    overlapping: Mapping[str, tuple[str, ...]]
    """Other groups that share a GPU with it."""
    nearby: Mapping[str, tuple[str, ...]]
    """Groups that share a NUMA node with it, including itself; all groups where NUMA nodes are unknown."""
    numa_nodes: Mapping[str, tuple[int, ...]]
    """NUMA nodes of its GPUs; empty where unknown."""
    distance: Mapping[str, tuple[int, ...]]
    """Distance between its GPUs, by the worst pair; smaller is closer."""

    @classmethod
    def of(cls, groups: Iterable[Group], links: Iterable[Link]) -> "GroupRelations":
        """Compute the relations of all pairs."""
        known = {frozenset((link.a, link.b)): link for link in links}
        every = tuple(groups)
        # Two MIG instances of one GPU share its faults, and do not overlap.
        members = {group.name: frozenset(group.uuids) for group in every}
        nodes = {
            group.name: tuple(sorted({gpu.numa_node for gpu in group.gpus if gpu.numa_node is not None}))
            for group in every
        }
        return cls(
            overlapping={
                a.name: tuple(b.name for b in every if b is not a and members[a.name] & members[b.name]) for a in every
            },
            nearby={
                a.name: tuple(b.name for b in every if b is a or _near(nodes[a.name], nodes[b.name])) for a in every
            },
            numa_nodes=nodes,
            distance={group.name: group_distance(group.uuids, known) for group in every},
        )


def group_distance(uuids: Iterable[str], links: Mapping[frozenset[str], Link]) -> tuple[int, int]:
    """Return the distance of the worst pair: NVLink is closer than PCIe, more links closer than fewer."""
    pairs = [_pair_distance(links.get(frozenset(pair))) for pair in combinations(tuple(uuids), 2)]
    return max(pairs, default=(0, 0))


def _pair_distance(link: Link | None) -> tuple[int, int]:
    if link is None:
        return UNKNOWN, 0
    return (0, -link.nvlinks) if link.nvlinks else (1 + tuple(PcieLevel).index(link.level), 0)


def _near(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return not a or not b or not set(a).isdisjoint(b)


@dataclass
class OpenWishes:
    """Wishes of the node's GPU manager: the next seat of a resource should be on a certain group.

    A wish is granted once, to the next pod that can have it (kubelet does not name the pod). It expires by itself.
    """

    open: tuple[Wish, ...] = ()
    _granted: set[str] = field(default_factory=set)

    def update(self, wishes: Collection[Wish]) -> None:
        """Take over the content of the file. A granted wish stays granted while the file has it."""
        self._granted &= {wish.id for wish in wishes}
        self.open = tuple(sorted(wishes, key=lambda wish: (wish.until, wish.id)))

    def matching(self, resource: str, groups: Collection[str], unix: float) -> Wish | None:
        """Return the open wish for one of these groups that expires first."""
        return next(
            (
                wish
                for wish in self.open
                if wish.id not in self._granted
                and wish.until > unix
                and wish.group in groups
                and wish.resource in ("", resource)
            ),
            None,
        )

    def grant(self, wish: Wish) -> None:
        """Record that a seat was allocated on the wished group."""
        self._granted.add(wish.id)
