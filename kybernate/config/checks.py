"""Checks over several fields of a configuration. Pure; ``topology`` checks it against the machine."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

from kybernate.config.model import NodeConfig, Profile
from kybernate.config_errors import ConfigError, Place, dotted, suggest


def check(config: NodeConfig) -> Iterator[ConfigError]:
    """Yield an error about each thing that does not fit together."""
    yield from _check_names(config)
    yield from _check_sizes(config)
    yield from _check_mig(config)
    for index, profile in enumerate(config.profiles):
        if profile.active_slots > profile.seats_per_group:
            what = f"more active slots than seats ({profile.seats_per_group})"
            remedy = "lower activeSlots or raise seatsPerGroup"
            yield config.error(("profiles", index, "activeSlots"), profile.active_slots, what, remedy)
        if profile.memory_reserve != Profile.model_fields["memory_reserve"].default and not profile.packs:
            remedy = "write packing: memory, or remove it"
            yield config.error(("profiles", index, "memoryReserve"), None, "counts with packing: memory alone", remedy)
    for claim in config.reserved:
        if claim.startswith("tier/") and claim.removeprefix("tier/") not in config.all_tiers:
            yield config.error(("reserved", claim), None, "is not a tier", suggest(claim[5:], config.all_tiers))
    yield from _check_groups(config)


def _check_names(config: NodeConfig) -> Iterator[ConfigError]:
    profiles, groups = config.profiles, config.gpu_topology.groups
    for what, top, values in (
        ("name", ("profiles",), [profile.name for profile in profiles]),
        ("resource", ("profiles",), [profile.resource for profile in profiles]),
        ("name", ("gpuTopology", "groups"), [group.name for group in groups]),
    ):
        place: Place = top
        for index, value, first in _repeated(values):
            used = f"is already the {what} of {dotted((*place, first))}"
            yield config.error((*place, index, what), value, used, f"give each its own {what}")


def _check_sizes(config: NodeConfig) -> Iterator[ConfigError]:
    kinds = [profile.mig_profile or profile.group_size for profile in config.profiles]
    for index, kind, first in _repeated(kinds):
        key = "migProfile" if isinstance(kind, str) else "groupSize"
        of = "instances" if isinstance(kind, str) else "groups of this size"
        what = f"profile {config.profiles[first].name} has {of} already"
        yield config.error(("profiles", index, key), kind, what, "two profiles cannot advertise the same groups")


def _check_mig(config: NodeConfig) -> Iterator[ConfigError]:
    for index, profile in enumerate(config.profiles):
        if profile.mig_profile is None:
            continue
        if config.mig_strategy != "mixed":
            what = f"MIG profiles need migStrategy: mixed, and it is {config.mig_strategy}"
            yield config.error(
                ("profiles", index, "migProfile"), profile.mig_profile, what, "write migStrategy: mixed or remove it"
            )
        if profile.group_size != 1:
            what = "MIG instances cannot be joined into larger groups"
            yield config.error(("profiles", index, "groupSize"), profile.group_size, what, "write groupSize: 1")
    if config.mig_strategy == "single" and all(profile.group_size != 1 for profile in config.profiles):
        what = "MIG instances are groups of one GPU and no profile has groupSize 1"
        yield config.error(("migStrategy",), "single", what, "add such a profile, or write none")


def _check_groups(config: NodeConfig) -> Iterator[ConfigError]:
    """Check groups by their names; two names of one GPU are found on the machine only."""
    sizes = {profile.group_size for profile in config.profiles if profile.mig_profile is None}
    sizes |= {1 for profile in config.profiles if profile.mig_profile is not None}
    yield from conflicts(config, dict(enumerate(group.gpus for group in config.gpu_topology.groups)))
    for index, lane in enumerate(config.lanes):
        for position, gpu, _ in _repeated(lane.gpus):
            yield config.error(("lanes", index, "gpus", position), gpu, "stands twice", "name each GPU once")
    for index, group in enumerate(config.gpu_topology.groups):
        place: Place = ("gpuTopology", "groups", index, "gpus")
        for position, gpu, _ in _repeated(group.gpus):
            yield config.error((*place, position), gpu, f"stands twice in group {group.name}", "name each GPU once")
        if len(group.gpus) not in sizes:
            what = f"group {group.name} has {len(group.gpus)} GPUs and no profile has this groupSize"
            have = ", ".join(str(size) for size in sorted(sizes))
            yield config.error(place, group.gpus, what, f"add such a profile, or give it {have} GPUs")


def conflicts(config: NodeConfig, groups: Mapping[int, Sequence[int | str]]) -> Iterator[ConfigError]:
    """Yield an error about each two listed groups that share GPUs and must not. ``groups``: the GPUs of each, by its
    position; of an index and a UUID nobody knows here whether they are the same GPU."""
    timeshare = config.gpu_topology.overlap == "timeshare"
    for (first, mine), (second, others) in itertools.combinations(groups.items(), 2):
        one, other = config.gpu_topology.groups[first], config.gpu_topology.groups[second]
        a, b = set(mine), set(others)
        place: Place = ("gpuTopology", "groups", second, "gpus")
        if timeshare and a == b:
            what = f"groups {one.name} and {other.name} are the same GPUs"
            yield config.error(place, other.gpus, what, "remove one of them")
            continue
        if not a & b or (timeshare and (a <= b or b <= a or len({type(gpu) for gpu in a | b}) > 1)):
            continue
        position = next(position for position, gpu in enumerate(others) if gpu in a)
        what = f"groups {one.name} and {other.name} share this GPU"
        remedy = "groups must be disjoint; take it out of one, or nest them and write overlap: timeshare"
        if timeshare:
            what += " and neither lies inside the other"
            remedy = "with overlap: timeshare groups are nested or disjoint (4 ⊃ 2 ⊃ 1); change one of them"
        yield config.error((*place, position), other.gpus[position], what, remedy)


def _repeated(values: "Sequence[int | str]") -> "Iterator[tuple[int, int | str, int]]":
    """Yield each repeated value: its index, itself, the index of the first."""
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value in first:
            yield index, value, first[value]
        first.setdefault(value, index)
