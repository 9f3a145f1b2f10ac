"""Groups of seats that somebody has, although the configuration no longer offers them. Pure.

The plugin keeps offering such seats (``kybernate.topology.orphaned_seats``); the manager must keep managing
them. Its ledger has every owned seat with its GPUs.
"""

from dataclasses import replace

from kybernate.node.known_gpus import KnownGpus
from kybernate.topology import AllocatedSeat, Group, group_key, size_of, with_orphaned_seats
from services.gpu_manager.ledger import Ledger

UNKNOWN = "kyb.ai/kept"
"""The resource of a kept seat when no profile of its size is left; only for people."""


def with_owned(groups: tuple[Group, ...], ledger: Ledger, known: KnownGpus) -> tuple[Group, ...]:
    """The configured groups, and those of the owned seats that are in none of them."""
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    by_size = {len(group.gpus): group.profile.resource for group in groups}
    allocated = [
        AllocatedSeat(one.seat, resources.get(one.seat) or by_size.get(size_of(one.seat), UNKNOWN), one.gpus)
        for one in ledger.seats
    ]
    kept, _ = with_orphaned_seats(groups, allocated, known.all)
    return (*kept, *_shelters(kept, ledger, known))


def _shelters(groups: tuple[Group, ...], ledger: Ledger, known: KnownGpus) -> tuple[Group, ...]:
    """For each seat that has moved to GPUs which are no group any more: these GPUs, as a group without own seats.

    What it holds there must be known to whoever shares the GPUs. Parked, it goes home as soon as there is a slot.
    """
    gpus = {gpu.uuid: gpu for gpu in known.all}
    homes = {seat: group for group in groups for seat in group.seat_ids}
    there = {frozenset(gpu.uuid for gpu in group.gpus) for group in groups}
    found: dict[frozenset[str], Group] = {}
    for one in ledger.seats:
        on, home = frozenset(one.on), homes.get(one.seat)
        if home is None or not on or on in there or on in found or not on <= gpus.keys():
            continue
        key = group_key(one.on)
        found[on] = replace(
            home,
            name=f"{len(on)}x-{key}",
            key=key,
            gpus=tuple(gpus[uuid] for uuid in one.on),
            seat_ids=(),
            why=f"seat {one.seat} moved there before the configuration changed",
            overlaps=(),
        )
    return tuple(found.values())
