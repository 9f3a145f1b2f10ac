"""Plan the groups of a machine from its configuration. Pure.

Plugin and manager build the same groups from the same input; there is no other agreement on which seats exist.
"""

from collections import Counter
from collections.abc import Sequence

from kybernate.config import NodeConfig, Profile
from kybernate.machine import Gpu, Link
from kybernate.sizes import count, format_bytes
from kybernate.topology.groups import (
    KEY_DIGITS,
    LONG_KEY_DIGITS,
    Group,
    IncompleteGroup,
    Members,
    Topology,
    group_key,
    numbered_are,
    overlaps,
    seat_id,
)
from kybernate.topology.listed_groups import candidate_profiles, resolve
from kybernate.topology.mig import GpuStock, instance_name, take_stock
from kybernate.topology.search import best_cut
from kybernate.topology.wiring import Wiring


def plan(
    config: NodeConfig,
    gpus: Sequence[Gpu],
    links: Sequence[Link] = (),
    instances: Sequence[Gpu] = (),
    *,
    lenient: bool = False,
) -> Topology:
    """Return the listed groups, and for profiles without listed groups the nearest GPUs, found by ``best_cut``.

    Disjoint groups: profiles are served in the order of the file. ``overlap: timeshare``: larger sizes are placed
    first, and smaller groups lie inside them. A profile for which no GPUs are left gets no seats and a warning.
    ``links`` has every pair once, ``instances`` the MIG instances. Raises ConfigError when the configuration does not
    fit the machine: listed GPUs that it lacks, groups that cross, a ``migStrategy`` that does not match its MIG mode.

    ``lenient``: for a service, whose machine may have lost a GPU since the configuration was written. A group that
    names missing GPUs is left out, a profile larger than the machine has no groups: warnings instead of errors.
    """
    stock = take_stock(config, gpus, instances)
    resolved, incomplete = resolve(config, gpus, instances, lenient=lenient)
    draft = _Draft(config, stock, Wiring(links), incomplete)
    for profile, group in resolved:
        draft.add(profile, *group, f"listed; {draft.describe(group[1])}")
    waiting = {name for group in incomplete for name in candidate_profiles(config, group)}
    listed = {profile.name for profile in config.profiles if draft.groups[profile.name]} | waiting
    disjoint = config.gpu_topology.overlap == "none"
    for profile in config.profiles if disjoint else sorted(config.profiles, key=lambda profile: -profile.group_size):
        if profile.name in listed:
            continue
        if profile.group_size > len(gpus) and not lenient:
            place = ("profiles", config.profiles.index(profile), "groupSize")
            what = f"this machine has only {count(len(gpus), 'GPU')}"
            raise config.error(place, profile.group_size, what, "lower groupSize or remove the profile")
        draft.discover(profile)
    smallest = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0)
    for number, profile in enumerate(config.profiles):
        if profile.packing == "memory" and 0 < smallest <= profile.memory_reserve and not lenient:
            what = f"no memory is left for seats: GPUs here have {format_bytes(smallest)}"
            place = ("profiles", number, "memoryReserve")
            raise config.error(place, format_bytes(profile.memory_reserve), what, "lower it")
    groups = draft.finished()
    empty = [profile for profile in config.profiles if not draft.groups[profile.name] and profile.name not in waiting]
    idle = [_no_seats(config, profile, stock, len(gpus)) for profile in empty]
    unfit = [group.why for group in incomplete]
    return Topology(groups, (*unfit, *stock.warnings, *idle, *_unused(stock, groups, incomplete)), incomplete)


class _Draft:
    """The groups planned so far."""

    def __init__(
        self, config: NodeConfig, stock: GpuStock, wiring: Wiring, incomplete: tuple[IncompleteGroup, ...]
    ) -> None:
        self.config, self.stock, self.wiring, self.incomplete = config, stock, wiring, incomplete
        self.groups: dict[str, list[tuple[Members, str]]] = {profile.name: [] for profile in config.profiles}
        """By profile: the group's name and GPUs, and the reason."""
        self.names: set[str] = {spec.name for spec in config.gpu_topology.groups}

    def add(self, profile: Profile, name: str, gpus: tuple[Gpu, ...], why: str) -> None:
        self.names.add(name)
        self.groups[profile.name].append(((name, gpus), why))

    def describe(self, gpus: tuple[Gpu, ...]) -> str:
        if (mig := gpus[0].mig) is not None:
            return f"MIG instance {mig.profile} of GPU {gpus[0].index}; instances are groups of one"
        return self.wiring.describe(gpus)

    def discover(self, profile: Profile) -> None:
        """Find the groups of a profile that has none listed."""
        for gpus in self._found(profile):
            name = instance_name(gpus[0]) if gpus[0].mig is not None else _group_name(gpus)
            if name in self.names:  # a listed group of other GPUs has this name
                name = f"{profile.group_size}x-{_key(gpus, LONG_KEY_DIGITS)}"
            self.add(profile, name, gpus, self.describe(gpus))

    def _found(self, profile: Profile) -> list[tuple[Gpu, ...]]:
        size = profile.group_size
        family = [gpus for groups in self.groups.values() for (_, gpus), _ in groups]
        free = self.stock.of(profile, self.config.mig_strategy)
        if self.config.gpu_topology.overlap == "none":
            taken = {gpu.uuid for gpus in family for gpu in gpus}
            free, family = tuple(gpu for gpu in free if gpu.uuid not in taken), []
        regions = self._regions(size, free)
        if size == 1:
            return [(gpu,) for gpu in free if any(gpu in region for region in regions)]
        found: list[tuple[Gpu, ...]] = []
        for atoms in (atoms for region in regions for atoms in _regions_and_atoms(size, region, family)):
            near = [[self._near(a, b) for b in atoms] for a in atoms]
            cut = best_cut([len(atom) for atom in atoms], near, size)
            # GPUs in the machine's order, also where atoms interleave.
            found += [tuple(gpu for gpu in free if any(gpu in atoms[number] for number in group)) for group in cut]
        return sorted(found, key=lambda gpus: free.index(gpus[0]))

    def _regions(self, size: int, free: Sequence[Gpu]) -> list[list[Gpu]]:
        """Return the sets of GPUs within which groups of ``size`` need not move once the listed groups are complete.

        GPUs of an incomplete group stay reserved for it; with timeshare smaller groups may lie inside it.
        """
        regions: dict[str, list[Gpu]] = {}
        for gpu in free:
            around = [group for group in self.incomplete if gpu in group.gpus]
            if any(group.size <= size for group in around) or (around and self.config.gpu_topology.overlap == "none"):
                continue
            inner = min(around, key=lambda group: group.size, default=None)
            regions.setdefault("" if inner is None else inner.name, []).append(gpu)
        return list(regions.values())

    def _near(self, atom: tuple[Gpu, ...], other: tuple[Gpu, ...]) -> int:
        """Return the summed nearness between two atoms, or of the pairs inside one."""
        if atom is other:
            return sum(self.wiring.nearness(a, b) for place, a in enumerate(atom) for b in atom[:place])
        return sum(self.wiring.nearness(a, b) for a in atom for b in other)

    def finished(self) -> tuple[Group, ...]:
        """Return all groups in the order of the profiles, with keys, seats and overlaps."""
        entries = [(profile, *entry) for profile in self.config.profiles for entry in self.groups[profile.name]]
        short = Counter((len(gpus), _key(gpus)) for _, (_, gpus), _ in entries)
        shared = overlaps([members for _, members, _ in entries])
        groups = []
        for (profile, (name, gpus), why), others in zip(entries, shared, strict=True):
            key = _key(gpus) if short[len(gpus), _key(gpus)] == 1 else _key(gpus, LONG_KEY_DIGITS)
            seats = tuple(seat_id(profile.group_size, key, number) for number in range(profile.seats_per_group))
            groups.append(Group(name, key, profile, gpus, seats, profile.slots, why, others))
        return tuple(groups)


def _regions_and_atoms(
    size: int, gpus: Sequence[Gpu], family: Sequence[Sequence[Gpu]]
) -> tuple[tuple[tuple[Gpu, ...], ...], ...]:
    """Divide GPUs into regions and atoms: groups made of one region's atoms keep the family nested or disjoint.

    A region is the smallest larger group that contains the GPUs (or none). Inside it, each of the largest smaller
    groups is one atom, and so is every other GPU. The atoms of a region are in the order of ``gpus``.
    """
    larger = sorted((group for group in family if len(group) > size), key=len)
    smaller = sorted((group for group in family if len(group) < size), key=len, reverse=True)
    regions: dict[int, dict[int, list[Gpu]]] = {}
    for gpu in gpus:
        region = next((number for number, group in enumerate(larger) if gpu in group), -1)
        atom = next((number for number, group in enumerate(smaller) if gpu in group), len(smaller) + gpus.index(gpu))
        regions.setdefault(region, {}).setdefault(atom, []).append(gpu)
    return tuple(tuple(tuple(atom) for atom in atoms.values()) for atoms in regions.values())


def _key(gpus: tuple[Gpu, ...], digits: int = KEY_DIGITS) -> str:
    return group_key([gpu.uuid for gpu in gpus], digits)


def _group_name(gpus: tuple[Gpu, ...]) -> str:
    """``G01``; from index 10 on with dashes: ``G9-10``."""
    indices = [str(index) for index in sorted(gpu.index for gpu in gpus)]
    name = "G" + ("-" if any(len(index) > 1 for index in indices) else "").join(indices)
    return name if len(name) <= 63 else f"{len(gpus)}x-{_key(gpus, LONG_KEY_DIGITS)}"


def _no_seats(config: NodeConfig, profile: Profile, stock: GpuStock, gpus: int) -> str:
    """Return the warning for a profile without groups: the reason and the remedy."""
    head = f"profile {profile.name} ({profile.resource}) has no seats here: "
    size = profile.group_size
    if profile.mig_profile is not None:
        kind = profile.mig_profile
        return head + f"no GPU has a MIG instance of {kind}; create some (nvidia-smi mig -cgi {kind} -C)"
    if config.mig_strategy == "single" and stock.in_mig_mode:
        if size == 1:
            return head + "no GPU has a MIG instance; create some (nvidia-smi mig -lgip shows which are possible)"
        return head + "its GPUs are MIG instances, which cannot be joined into groups; turn MIG off on this node"
    if gpus < size:
        return head + f"this machine shows only {count(gpus, 'GPU')}; see nvidia-smi, or lower groupSize"
    if len(stock.whole) < size:
        have = f"only {count(len(stock.whole), 'GPU')} of this machine" if stock.whole else "no GPU of this machine"
        return head + f"{have} can be used as a whole, the others are in MIG mode; turn MIG off there"
    if config.gpu_topology.overlap == "none":
        return head + (
            f"every group of {count(size, 'GPU')} would overlap another group; "
            f"list groups of this size, or write overlap: timeshare, to change that"
        )
    return head + (
        f"no {count(size, 'GPU')} hold the other groups whole or lie inside one; "
        "list groups of this size to change that"
    )


def _unused(stock: GpuStock, groups: tuple[Group, ...], incomplete: tuple[IncompleteGroup, ...]) -> tuple[str, ...]:
    used = {gpu.uuid for gpus in (*(g.gpus for g in groups), *(g.gpus for g in incomplete)) for gpu in gpus}
    spare = [gpu for gpu in stock.whole if gpu.uuid not in used]
    if not spare:
        return ()
    remedy = "add a profile of groupSize 1, or list groups"
    return (f"{numbered_are(spare)} in no group, so nothing is offered there; {remedy}",)
