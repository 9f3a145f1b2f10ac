"""The groups that a configuration lists, on a machine. Pure."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kybernate.config import NodeConfig, Profile
from kybernate.config_errors import Place
from kybernate.topology.family import Members, crossing
from kybernate.topology.groups import Incomplete, counted
from kybernate.topology.mig import mig_profile

if TYPE_CHECKING:
    from kybernate.machine import Gpu


def resolve(
    config: NodeConfig, gpus: "Sequence[Gpu]", instances: "Sequence[Gpu]", *, lenient: bool = False
) -> "tuple[tuple[tuple[Profile, Members], ...], tuple[Incomplete, ...]]":
    """Every listed group with its GPUs, and the profile that sells it. Raises ConfigError for what cannot be.

    ``lenient``: groups that name GPUs which are not there come apart from the others, instead of an error.
    """
    by_name: dict[int | str, Gpu] = {gpu.uuid: gpu for gpu in (*gpus, *instances)}
    by_name |= {gpu.index: gpu for gpu in gpus}
    groups: dict[int, Members] = {}
    incomplete = []
    for number, spec in enumerate(config.topology.groups):
        missing = tuple(name for name in spec.gpus if name not in by_name) if lenient else ()
        members = tuple(_members(config, gpus, by_name, number, without=missing))
        if missing:
            incomplete.append(Incomplete(spec.name, len(spec.gpus), members, missing))
        else:
            groups[number] = spec.name, members
    _check_shared(config, groups)
    return tuple((_seller(config, number, group[1]), group) for number, group in groups.items()), tuple(incomplete)


def sellers(config: NodeConfig, group: Incomplete) -> tuple[str, ...]:
    """Profiles that may be the one of a group of which GPUs are missing; of a missing MIG instance nobody knows."""
    mig = config.mig_strategy == "mixed" and any(str(name).startswith("MIG-") for name in group.missing)
    return tuple(
        profile.name
        for profile in config.profiles
        if profile.group_size == group.size and (profile.mig_profile is not None) == mig
    )


def _members(
    config: NodeConfig,
    gpus: "Sequence[Gpu]",
    by_name: "dict[int | str, Gpu]",
    number: int,
    *,
    without: tuple[int | str, ...] = (),
) -> "Iterator[Gpu]":
    spec = config.topology.groups[number]
    seen: set[str] = set()
    for position, wanted in enumerate(spec.gpus):
        if wanted in without:
            continue
        place: Place = ("gpuTopology", "groups", number, "gpus", position)
        gpu = by_name.get(wanted)
        if gpu is None:
            have = f"{counted(len(gpus))} ({', '.join(str(gpu.index) for gpu in gpus) or 'none'})"
            what = f"group {spec.name} names a GPU that this machine lacks; it has {have}"
            raise config.error(place, wanted, what, "name one of these or take it out")
        if gpu.mig_enabled:
            what = f"group {spec.name} names GPU {gpu.index}, which is in MIG mode and cannot be used as a whole"
            remedy = f"turn MIG off there (nvidia-smi -i {gpu.index} -mig 0), or take it out"
            raise config.error(place, wanted, what, remedy)
        if gpu.mig is not None and config.mig_strategy == "none":
            what = f"group {spec.name} names a MIG instance and migStrategy is none"
            raise config.error(place, wanted, what, "write migStrategy: single or mixed, or take it out")
        if gpu.mig is not None and len(spec.gpus) > 1:
            what = f"group {spec.name} joins a MIG instance with others"
            raise config.error(place, wanted, what, "MIG instances are groups of one; take it out")
        if gpu.uuid in seen:  # once by index, once by UUID
            what = f"GPU {gpu.index} stands twice in group {spec.name}"
            raise config.error(place, wanted, what, "name each GPU once")
        seen.add(gpu.uuid)
        yield gpu


def _check_shared(config: NodeConfig, groups: "dict[int, Members]") -> None:
    """Disjoint, or with ``overlap: timeshare`` nested."""
    if config.topology.overlap == "none":
        owners: dict[str, str] = {}
        for number, (name, gpus) in groups.items():
            for position, gpu in enumerate(gpus):
                if gpu.uuid in owners:
                    place: Place = ("gpuTopology", "groups", number, "gpus", position)
                    what = f"GPU {gpu.index} is in group {owners[gpu.uuid]} already"
                    remedy = "groups must be disjoint; take it out of one, or nest them and write overlap: timeshare"
                    raise config.error(place, config.topology.groups[number].gpus[position], what, remedy)
                owners[gpu.uuid] = name
        return
    for (name, gpus), (other, others), shared in crossing(tuple(groups.values())):
        number = next(number for number, group in groups.items() if group[0] == other)
        place = ("gpuTopology", "groups", number, "gpus", others.index(shared))
        if {gpu.uuid for gpu in gpus} == {gpu.uuid for gpu in others}:
            what, remedy = f"groups {name} and {other} are the same GPUs", "remove one of them"
        else:
            what = f"groups {name} and {other} share GPU {shared.index} and neither lies inside the other"
            remedy = "with overlap: timeshare groups are nested or disjoint (4 ⊃ 2 ⊃ 1); change one of them"
        raise config.error(place, config.topology.groups[number].gpus[others.index(shared)], what, remedy)


def _seller(config: NodeConfig, number: int, gpus: "tuple[Gpu, ...]") -> Profile:
    """The profile of these groups."""
    kind = mig_profile(gpus[0]) if config.mig_strategy == "mixed" else None
    for profile in config.profiles:
        if profile.group_size == len(gpus) and profile.mig_profile == kind:
            return profile
    name = config.topology.groups[number].name
    what = f"group {name} is {'a MIG instance of ' + kind if kind else counted(len(gpus))} and no profile sells that"
    remedy = f"add one with groupSize: {len(gpus)}{f' and migProfile: {kind}' if kind else ''}, or remove the group"
    raise config.error(("gpuTopology", "groups", number, "gpus"), None, what, remedy)
