"""What a group is, and what it is called: keys and seat IDs that survive renumbered GPUs. Pure."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.config import Profile

if TYPE_CHECKING:
    from kybernate.machine import Gpu

KEY_DIGITS = 6
LONG_KEY_DIGITS = 12
"""For the one case in 16 million that two groups of a node have the same short key."""
SEAT_ID = re.compile(rf"\d+x-[0-9a-f]{{{KEY_DIGITS}}}([0-9a-f]{{{LONG_KEY_DIGITS - KEY_DIGITS}}})?\.s\d{{2,}}")
"""What ``seat_id`` gives, to tell our devices from others."""


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of GPUs, and its seats."""

    name: str
    """As listed, or ``G`` and the indices (``G01``) when discovered."""
    key: str
    """Six hex digits that stay the same when GPUs are renumbered."""
    profile: Profile
    gpus: "tuple[Gpu, ...]"
    """Whole GPUs, or one MIG instance. As listed, or in the order of their PCI addresses."""
    seat_ids: tuple[str, ...]
    slots: int
    """How many of its seats may hold VRAM at the same time."""
    why: str = ""
    """Why these GPUs: one sentence for people."""
    overlaps: tuple[str, ...] = ()
    """Names of the groups that share a GPU with it (``overlap: timeshare``), in the order of the groups."""

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
        """UUIDs of everything whose fault is its fault: its GPUs, and for a MIG instance the GPU that it is part of."""
        parents = {gpu.mig.parent for gpu in self.gpus if gpu.mig is not None}
        return frozenset({gpu.uuid for gpu in self.gpus} | parents)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A listed group of which GPUs are missing: it is not offered."""

    name: str
    size: int
    """How many GPUs it would have."""
    gpus: "tuple[Gpu, ...]"
    """Those that are there. They stay free for it, or groups would move when the others come back."""
    missing: tuple[int | str, ...]
    """Those that are not, as listed: by index or UUID."""

    @property
    def why(self) -> str:
        """The reason and the remedy, for people."""
        gpus = ", ".join(f"GPU {name}" if isinstance(name, int) else name for name in self.missing)
        return (
            f"group {self.name} is not offered: it names {gpus}, which this machine does not show; "
            f"look for XID events in the kernel log and reset or replace it, or take it out of the configuration; "
            f"the group is offered again once it is there"
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """All groups of a machine, and what a person should know about them."""

    groups: tuple[Group, ...]
    """In the order of the profiles."""
    warnings: tuple[str, ...]
    """Profiles without seats, GPUs that nothing uses: each with the reason and the remedy."""
    incomplete: tuple[Incomplete, ...] = ()
    """Listed groups that are not offered, since GPUs are missing. Each is among the warnings, too."""


def group_key(uuids: Sequence[str], digits: int = KEY_DIGITS) -> str:
    """The group's key: the first hex digits of the SHA-256 of its sorted UUIDs, joined by commas."""
    return hashlib.sha256(",".join(sorted(uuids)).encode()).hexdigest()[:digits]


def seat_id(size: int, key: str, number: int) -> str:
    """``<size>x-<group key>.s<nn>``, e.g. ``2x-7f3a9c.s03``; at most 20 characters."""
    return f"{size}x-{key}.s{number:02d}"


def counted(number: int) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return "1 GPU" if number == 1 else f"{number} GPUs"


def numbered(gpus: "Sequence[Gpu]") -> str:
    """``GPU 0`` or ``GPUs 0, 2``: indices, for people."""
    indices = ", ".join(str(index) for index in sorted({gpu.index for gpu in gpus}))
    return f"GPU {indices}" if "," not in indices else f"GPUs {indices}"


def numbered_are(gpus: "Sequence[Gpu]") -> str:
    """``GPU 0 is`` or ``GPUs 0, 2 are``."""
    return f"{numbered(gpus)} {'are' if len({gpu.index for gpu in gpus}) > 1 else 'is'}"
