"""Groups, their keys and seat IDs, and how groups relate: overlapping, exchanging seats. Pure."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kybernate.config import Profile
from kybernate.machine import Gpu

KEY_DIGITS = 6
LONG_KEY_DIGITS = 12
"""Length of both keys when two groups of one size on a node have the same short key (1 in 16 million)."""
SEAT_ID = re.compile(rf"\d+x-[0-9a-f]{{{KEY_DIGITS}}}([0-9a-f]{{{LONG_KEY_DIGITS - KEY_DIGITS}}})?\.s\d{{2,}}")
"""Matches the results of ``seat_id``; tells our device IDs from those of other plugins."""

Members = tuple[str, tuple[Gpu, ...]]
"""A group's name and GPUs, before the group has a key and seats."""


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of GPUs, and its seats."""

    name: str
    """As listed, or ``G`` and the indices (``G01``) when discovered."""
    key: str
    """Six hex digits that stay the same when GPUs are renumbered."""
    profile: Profile
    gpus: tuple[Gpu, ...]
    """Whole GPUs, or one MIG instance. As listed, or in the order of their PCI addresses."""
    seat_ids: tuple[str, ...]
    slots: int
    """How many of its seats may hold VRAM at the same time."""
    why: str = ""
    """The reason for this choice of GPUs: one sentence, shown to users."""
    overlaps: tuple[str, ...] = ()
    """Names of the groups that share a GPU with it (``overlap: timeshare``), in the order of the groups."""

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of its GPUs, in their order."""
        return tuple(gpu.uuid for gpu in self.gpus)

    @property
    def memory_bytes(self) -> int:
        """Memory of all its GPUs together."""
        return sum(gpu.memory_bytes for gpu in self.gpus)

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance."""
        return any(gpu.mig is not None for gpu in self.gpus)

    @property
    def physical(self) -> frozenset[str]:
        """UUIDs whose fault is a fault of this group: its GPUs, and the parent GPU of a MIG instance."""
        return frozenset(uuid for gpu in self.gpus for uuid in (gpu.uuid, gpu.physical))

    @property
    def why_bound(self) -> str:
        """Why none of its seats may move, by its profile; empty: they may, where another group is alike."""
        profile = self.profile
        if profile.rebalance is False:
            return f"profile {profile.name} has rebalance: false, so its containers see only their own group"
        if profile.rebalance is None and self.is_mig:
            return f"profile {profile.name} has no rebalance: true, so its containers see only their own MIG instance"
        return ""


@dataclass(frozen=True, slots=True)
class IncompleteGroup:
    """A listed group of which GPUs are missing: it is not offered."""

    name: str
    size: int
    """How many GPUs it has when complete."""
    gpus: tuple[Gpu, ...]
    """The GPUs that are present. They stay reserved for it; otherwise groups would move when the others return."""
    missing: tuple[int | str, ...]
    """The missing GPUs as listed: by index or UUID."""

    @property
    def why(self) -> str:
        """The reason and the remedy, for users."""
        gpus = ", ".join(f"GPU {name}" if isinstance(name, int) else name for name in self.missing)
        return (
            f"group {self.name} is not offered: it names {gpus}, which this machine does not show; "
            f"look for XID events in the kernel log and reset or replace it, or take it out of the configuration; "
            f"the group is offered again once it is there"
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """All groups of a machine, and the warnings to show to users."""

    groups: tuple[Group, ...]
    """In the order of the profiles."""
    warnings: tuple[str, ...]
    """Profiles without seats, unused GPUs: each with the reason and the remedy."""
    incomplete: tuple[IncompleteGroup, ...] = ()
    """Listed groups that are not offered because GPUs are missing. Each also has a warning."""


# --- keys and IDs ---------------------------------------------------------------------------------------------------


def group_key(uuids: Sequence[str], digits: int = KEY_DIGITS) -> str:
    """Return the group's key: the first hex digits of the SHA-256 of its sorted UUIDs, joined by commas."""
    return hashlib.sha256(",".join(sorted(uuids)).encode()).hexdigest()[:digits]


def seat_id(size: int, key: str, number: int) -> str:
    """Return ``<size>x-<group key>.s<nn>``, e.g. ``2x-7f3a9c.s03``; at most 20 characters."""
    return f"{size}x-{key}.s{number:02d}"


def key_of(seat: str) -> str:
    """Return the group key in a seat's ID."""
    return seat.partition("-")[2].partition(".")[0]


def size_of(seat: str) -> int:
    """Return the group's size in a seat's ID; 0 when the ID has none."""
    size = seat.partition("x-")[0]
    return int(size) if size.isdecimal() else 0


# --- relations between groups ---------------------------------------------------------------------------------------


def overlaps(groups: Sequence[Members]) -> tuple[tuple[str, ...], ...]:
    """Return for each group the names of the groups that share a GPU with it."""
    sets = [{gpu.uuid for gpu in gpus} for _, gpus in groups]
    return tuple(
        tuple(name for other, (name, _) in enumerate(groups) if other != own and sets[own] & sets[other])
        for own in range(len(groups))
    )


def peers(groups: Sequence[Group]) -> dict[str, tuple[Group, ...]]:
    """Return by group name the groups to which its seats may move; none where its profile binds them.

    Alike groups of one profile, of any size, or MIG instances: what runs on one can run on the other. The plugin gives
    containers the device nodes for moves, the manager decides on them: both use this.
    """
    return {group.name: tuple(other for other in groups if _exchanges(group, other)) for group in groups}


def _exchanges(group: Group, other: Group) -> bool:
    if group.profile.name != other.profile.name or group.why_bound or not {*group.uuids}.isdisjoint(other.uuids):
        return False
    mine, theirs = (
        [(gpu.name, gpu.memory_bytes, gpu.mig and gpu.mig.profile) for gpu in one.gpus] for one in (group, other)
    )
    return mine == theirs


# --- GPUs in texts for users ----------------------------------------------------------------------------------------


def numbered(gpus: Sequence[Gpu]) -> str:
    """``GPU 0`` or ``GPUs 0, 2``, by index."""
    indices = ", ".join(str(index) for index in sorted({gpu.index for gpu in gpus}))
    return f"GPU {indices}" if "," not in indices else f"GPUs {indices}"


def numbered_are(gpus: Sequence[Gpu]) -> str:
    """``GPU 0 is`` or ``GPUs 0, 2 are``."""
    return f"{numbered(gpus)} {'are' if len({gpu.index for gpu in gpus}) > 1 else 'is'}"
