"""Which group gets the next seat: six strategies over the same few facts about each group. Pure.

Kubelet and the scheduler count seats; which *group* a seat is on, they leave to the plugin. A seat is a claim to wait:
every group with a free seat can take the next one, and what differs is how long it will wait there and what is left
for others. Before any strategy has a say, three rules hold:

* a group without a free seat, or with a faulty GPU, is no candidate (the caller leaves the latter out),
* a pending wish for a group is granted when that group is a candidate,
* groups whose GPUs other groups' seats use already come after groups whose GPUs nobody else uses: the seats of
  overlapping groups never run together.

Then, with ties always broken by the order of the configuration:

=============== ====================================================================================================
first-fit       the first group of the configuration
best-fit        the group that has the fewest free seats left: fills a group before it begins another
worst-fit       the group that has the most free seats left
bin-pack        the busiest neighbourhood (NUMA node) first, in it the group with the fewest free seats: keeps whole
                neighbourhoods empty, for groups that need many GPUs and for nodes that can be given back
spread          the fewest seats in use per slot, then the quietest neighbourhood: the shortest queue for the GPUs, and
                the least lost with one neighbourhood
topology-aware  a group with an idle slot before one without; then the closest GPUs (NVLink, PCIe level), then the
                fewest NUMA nodes, then as spread: the best links that need not be waited for
=============== ====================================================================================================
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Strategy(StrEnum):
    """How a profile's seats are placed; the names that configurations use."""

    FIRST_FIT = "first-fit"
    BEST_FIT = "best-fit"
    WORST_FIT = "worst-fit"
    BIN_PACK = "bin-pack"
    SPREAD = "spread"
    TOPOLOGY_AWARE = "topology-aware"


@dataclass(frozen=True, slots=True)
class Place:
    """A group as placement sees it, at one instant."""

    name: str
    order: int
    """Its place in the configuration; decides ties."""
    seats: int
    """All its seats, in use or not."""
    free: int
    """Seats that may be given now."""
    slots: int = 1
    """How many of its seats may run at the same time."""
    overlapping_in_use: int = 0
    """Seats in use of other groups that share a GPU with it."""
    nearby_in_use: int = 0
    """Seats in use, of whatever group, on the NUMA nodes of its GPUs; its own are among them."""
    distance: tuple[int, ...] = ()
    """How far its GPUs are from each other: less is closer."""
    numa_nodes: int = 1
    """On how many NUMA nodes its GPUs are."""

    def with_one_less(self) -> "Place":
        """The same group after it gave a seat."""
        return replace(self, free=self.free - 1, nearby_in_use=self.nearby_in_use + 1)

    @property
    def in_use(self) -> int:
        """Seats that somebody has."""
        return self.seats - self.free

    @property
    def load(self) -> float:
        """Seats in use per slot: above 1, seats wait for each other."""
        return self.in_use / self.slots


Key = tuple[object, ...]

_KEYS: dict[Strategy, Callable[[Place], Key]] = {
    Strategy.FIRST_FIT: lambda place: (place.order,),
    Strategy.BEST_FIT: lambda place: (place.free,),
    Strategy.WORST_FIT: lambda place: (-place.free,),
    Strategy.BIN_PACK: lambda place: (-place.nearby_in_use, place.free),
    Strategy.SPREAD: lambda place: (place.load, place.nearby_in_use),
    Strategy.TOPOLOGY_AWARE: lambda place: (
        place.in_use >= place.slots,
        place.distance,
        place.numa_nodes,
        place.load,
        place.nearby_in_use,
    ),
}


def rank(strategy: Strategy, places: Iterable[Place], wish: str = "") -> list[Place]:
    """Groups that can take a seat, best first. ``wish``: the name of a group that goes before all others."""
    return sorted((place for place in places if place.free > 0), key=_key(strategy, wish))


def best(strategy: Strategy, places: Iterable[Place], wish: str = "") -> Place | None:
    """The first of ``rank``; None when no group can take a seat."""
    return min((place for place in places if place.free > 0), key=_key(strategy, wish), default=None)


def _key(strategy: Strategy, wish: str) -> Callable[[Place], Key]:
    own = _KEYS[strategy]

    def key(place: Place) -> Key:
        return (place.name != wish, place.overlapping_in_use > 0, *own(place), place.order)

    return key
