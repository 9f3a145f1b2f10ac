"""Groups of GPUs and the seats on them, from configuration and the machine's GPUs. Pure.

Plugin and manager build the same groups from the same input; nothing else tells them which seats exist.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.config import NodeConfig, Profile

if TYPE_CHECKING:
    from kybernate.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of GPUs, and its seats."""

    name: str
    """As listed, or ``G`` and the indices (``G01``) when discovered."""
    key: str
    """Six hex digits that stay the same when GPUs are renumbered."""
    profile: Profile
    gpus: "tuple[Gpu, ...]"
    seat_ids: tuple[str, ...]
    slots: int
    """How many of its seats may hold VRAM at the same time."""

    @property
    def memory_bytes(self) -> int:
        """Memory of all its GPUs together."""
        return sum(gpu.memory_bytes for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class Topology:
    """All groups of a machine, and what a person should know about them."""

    groups: tuple[Group, ...]
    warnings: tuple[str, ...]
    """Profiles that get no seats here, each with the reason and the remedy."""


def group_key(uuids: Sequence[str]) -> str:
    """The group's key: the first six hex digits of the SHA-256 of its sorted UUIDs, joined by commas."""
    return hashlib.sha256(",".join(sorted(uuids)).encode()).hexdigest()[:6]


def seat_id(size: int, key: str, number: int) -> str:
    """``<size>x-<group key>.s<nn>``, e.g. ``2x-7f3a9c.s03``."""
    return f"{size}x-{key}.s{number:02d}"


def build_groups(config: NodeConfig, gpus: "Sequence[Gpu]") -> tuple[Group, ...]:
    """The groups of ``plan``. Raises ConfigError when the configuration does not fit these GPUs."""
    return plan(config, gpus).groups


def plan(config: NodeConfig, gpus: "Sequence[Gpu]") -> Topology:
    """Listed groups as they are; profiles of other sizes get the first free GPUs in index order.

    Profiles take their turn in the order of the file. One that finds no free GPUs gets no seats and a warning.
    Raises ConfigError for a listed GPU that the machine lacks, and for groups that share a GPU.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.index)
    listed = _listed(config, ordered)
    taken = {gpu.uuid for _, members in listed for gpu in members}
    names = {name for name, _ in listed}
    groups: list[Group] = []
    warnings: list[str] = []
    for index, profile in enumerate(config.profiles):
        own = [(name, members) for name, members in listed if len(members) == profile.group_size]
        if not own:
            if profile.group_size > len(ordered):
                raise config.error(
                    ("profiles", index, "groupSize"),
                    profile.group_size,
                    f"this machine has only {_counted(len(ordered))}",
                    "lower groupSize or remove the profile",
                )
            own = _discovered(profile.group_size, [gpu for gpu in ordered if gpu.uuid not in taken], names)
            taken |= {gpu.uuid for _, members in own for gpu in members}
            names |= {name for name, _ in own}
        if not own:
            warnings.append(
                f"profile {profile.name} ({profile.resource}) has no seats here: every group of "
                f"{_counted(profile.group_size)} would overlap another group; list groups of this size to change that"
            )
        groups += [_group(name, profile, members) for name, members in own]
    return Topology(tuple(groups), tuple(warnings))


def _listed(config: NodeConfig, gpus: "list[Gpu]") -> "list[tuple[str, tuple[Gpu, ...]]]":
    by_name: dict[int | str, Gpu] = {gpu.index: gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    have = f"{_counted(len(gpus))} ({', '.join(str(gpu.index) for gpu in gpus) or 'none'})"
    owners: dict[str, str] = {}
    found = []
    for number, spec in enumerate(config.topology.groups):
        members = []
        for position, wanted in enumerate(spec.gpus):
            place = ("gpuTopology", "groups", number, "gpus", position)
            if wanted not in by_name:
                what = f"group {spec.name} names a GPU that this machine lacks; it has {have}"
                raise config.error(place, wanted, what, "name one of these or take it out")
            gpu = by_name[wanted]
            if gpu.uuid in owners:  # one by index, one by UUID
                what = f"GPU {gpu.index} is in group {owners[gpu.uuid]} already"
                raise config.error(place, wanted, what, "groups must be disjoint; take it out of one")
            owners[gpu.uuid] = spec.name
            members.append(gpu)
        found.append((spec.name, tuple(members)))
    return found


def _discovered(size: int, free: "list[Gpu]", names: set[str]) -> "list[tuple[str, tuple[Gpu, ...]]]":
    """The first disjoint groups of ``size``, in index order."""
    found = []
    for start in range(0, len(free) - size + 1, size):
        members = tuple(free[start : start + size])
        indices = [str(gpu.index) for gpu in members]
        name = "G" + ("-" if any(len(index) > 1 for index in indices) else "").join(indices)
        if name in names:  # a listed group of other GPUs took it
            name = f"{size}x-{group_key([gpu.uuid for gpu in members])}"
        found.append((name, members))
    return found


def _group(name: str, profile: Profile, members: "tuple[Gpu, ...]") -> Group:
    key = group_key([gpu.uuid for gpu in members])
    seats = tuple(seat_id(profile.group_size, key, number) for number in range(profile.seats_per_group))
    return Group(name, key, profile, members, seats, profile.active_slots)


def _counted(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
