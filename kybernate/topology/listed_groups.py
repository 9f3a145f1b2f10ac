"""Resolve the groups that a configuration lists to the GPUs of a machine. Pure."""

from collections.abc import Iterator, Sequence

from kybernate.config import NodeConfig, Profile
from kybernate.config.checks import conflicts
from kybernate.config_errors import Place
from kybernate.machine import Gpu
from kybernate.sizes import count
from kybernate.topology.groups import IncompleteGroup, Members
from kybernate.topology.mig import mig_profile


def resolve(
    config: NodeConfig, gpus: Sequence[Gpu], instances: Sequence[Gpu], *, lenient: bool = False
) -> tuple[tuple[tuple[Profile, Members], ...], tuple[IncompleteGroup, ...]]:
    """Return every listed group with its profile and GPUs, and the incomplete groups. Raises ConfigError.

    ``lenient``: groups that name missing GPUs are returned as incomplete; otherwise they are an error.
    """
    by_name: dict[int | str, Gpu] = {gpu.uuid: gpu for gpu in (*gpus, *instances)}
    by_name |= {gpu.index: gpu for gpu in gpus}
    groups: dict[int, Members] = {}
    incomplete = []
    for number, spec in enumerate(config.gpu_topology.groups):
        missing = tuple(name for name in spec.gpus if name not in by_name) if lenient else ()
        members = tuple(_members(config, gpus, by_name, number, without=missing))
        if missing:
            incomplete.append(IncompleteGroup(spec.name, len(spec.gpus), members, missing))
        else:
            groups[number] = spec.name, members
    for error in conflicts(config, {number: [gpu.uuid for gpu in gpus] for number, (_, gpus) in groups.items()}):
        raise error
    for number, lane in enumerate(config.lanes if not lenient else ()):
        for position, name in enumerate(lane.gpus):
            if name not in by_name:
                what = f"this machine has no such GPU; it has {count(len(gpus), 'GPU')}"
                raise config.error(("lanes", number, "gpus", position), name, what, "name one of these or take it out")
    return tuple((_profile_of(config, number, group[1]), group) for number, group in groups.items()), tuple(incomplete)


def candidate_profiles(config: NodeConfig, group: IncompleteGroup) -> tuple[str, ...]:
    """Return the profiles that an incomplete group may belong to; the MIG profile of a missing instance is unknown."""
    mig = config.mig_strategy == "mixed" and any(str(name).startswith("MIG-") for name in group.missing)
    return tuple(
        profile.name
        for profile in config.profiles
        if profile.group_size == group.size and (profile.mig_profile is not None) == mig
    )


def _members(
    config: NodeConfig,
    gpus: Sequence[Gpu],
    by_name: dict[int | str, Gpu],
    number: int,
    *,
    without: tuple[int | str, ...] = (),
) -> Iterator[Gpu]:
    spec = config.gpu_topology.groups[number]
    seen: set[str] = set()
    for position, wanted in enumerate(spec.gpus):
        if wanted in without:
            continue
        place: Place = ("gpuTopology", "groups", number, "gpus", position)
        gpu = by_name.get(wanted)
        if gpu is None:
            have = f"{count(len(gpus), 'GPU')} ({', '.join(str(gpu.index) for gpu in gpus) or 'none'})"
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


def _profile_of(config: NodeConfig, number: int, gpus: tuple[Gpu, ...]) -> Profile:
    """Return the profile whose size and MIG profile fit the group. Raises ConfigError."""
    kind = mig_profile(gpus[0]) if config.mig_strategy == "mixed" else None
    for profile in config.profiles:
        if profile.group_size == len(gpus) and profile.mig_profile == kind:
            return profile
    name = config.gpu_topology.groups[number].name
    held = f"a MIG instance of {kind}" if kind else count(len(gpus), "GPU")
    what = f"group {name} is {held} and no profile advertises that"
    remedy = f"add one with groupSize: {len(gpus)}{f' and migProfile: {kind}' if kind else ''}, or remove the group"
    raise config.error(("gpuTopology", "groups", number, "gpus"), None, what, remedy)
