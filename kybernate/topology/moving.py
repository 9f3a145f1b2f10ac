"""Which groups may exchange seats: a seat parked on one of them can be restored on the GPUs of another. Pure.

The driver restores a process elsewhere only on the same chip, and only processes of one GPU survive it (NCCL keeps the
old PCI address); MIG cannot be checkpointed at all. The plugin gives containers the device nodes for it, the manager
decides about the moves: both ask here.
"""

from collections.abc import Sequence

from kybernate.topology.groups import Group


def peers(groups: Sequence[Group]) -> dict[str, tuple[Group, ...]]:
    """By group: the others of its profile to which its seats may move; none where the profile does not rebalance."""
    return {group.name: tuple(other for other in groups if _alike(group, other)) for group in groups}


def _alike(group: Group, other: Group) -> bool:
    if group.name == other.name or group.profile.name != other.profile.name or not group.profile.rebalances:
        return False
    if len(group.gpus) != 1 or len(other.gpus) != 1 or group.is_mig or other.is_mig:
        return False
    mine, theirs = group.gpus[0], other.gpus[0]
    return mine.uuid != theirs.uuid and (mine.name, mine.memory_bytes) == (theirs.name, theirs.memory_bytes)
