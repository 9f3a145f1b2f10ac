"""Allocated seats that the configuration no longer has: they stay offered until their pods are gone. Pure.

Kubelet chooses a seat's ID for the life of its pod, repeats the answer at each container start, and treats a missing
ID as a failed device. So a new configuration adds seats at once, but removes a seat only once it is free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from pydantic import ValidationError

from kybernate.config import Profile
from kybernate.machine import Gpu
from kybernate.topology.groups import Group, group_key, key_of, size_of

_MOST_COMBINATIONS = 20_000
"""Limit of the search for the GPUs of a group key: 12,870 groups of 8 out of 16 GPUs take a tenth of a second."""


@dataclass(frozen=True, slots=True)
class AllocatedSeat:
    """A seat that kubelet allocated to a pod."""

    id: str
    resource: str
    gpus: tuple[str, ...] = ()
    """UUIDs of its group, in the group's order; empty when unknown (a seat that only PodResources lists)."""
    reach: tuple[str, ...] = ()
    """UUIDs of all GPUs that its container has, also those of groups to which it may be moved; empty when unknown."""


def with_orphaned_seats(
    groups: Sequence[Group], allocated: Iterable[AllocatedSeat], gpus: Sequence[Gpu], *, former: Iterable[Group] = ()
) -> tuple[tuple[Group, ...], frozenset[str]]:
    """Add the allocated seats that ``groups`` lacks; return the groups, and the IDs of the orphaned seats.

    ``gpus``: all GPUs and MIG instances that are or were in this machine, present ones first; seats of removed GPUs
    stay as well. ``former``: the groups of the last configuration. An orphaned seat goes to (1) a present group of its
    GPUs and its resource, (2) its former group, (3) a group made of the GPUs that were recorded with it or whose hash
    is the key in its ID. An allocated seat for which none of these exists is left out.
    """
    allocated = tuple(allocated)
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    orphans = {one.id: one.resource for one in allocated if resources.get(one.id) != one.resource}
    members = {key_of(one.id): one.gpus for one in allocated if one.gpus}
    known = {gpu.uuid: gpu for gpu in gpus}
    earlier = [group for group in (*former, *groups) if known.keys() >= {*group.uuids}]
    # Without those that are allocated under another resource, such as the old name of a renamed one.
    found = [replace(one, seat_ids=tuple(seat for seat in one.seat_ids if seat not in orphans)) for one in groups]
    kept: set[str] = set()
    for key, resource in sorted({(key_of(seat), resource) for seat, resource in orphans.items()}):
        seats = tuple(sorted(seat for seat, of in orphans.items() if (key_of(seat), of) == (key, resource)))
        same = next((n for n, g in enumerate(found) if g.key == key and g.profile.resource == resource), None)
        if same is not None:  # (1)
            found[same] = replace(found[same], seat_ids=(*found[same].seat_ids, *seats))
        else:
            old = next((group for group in earlier if group.key == key), None)
            if old is not None:  # (2)
                old = replace(old, profile=old.profile.model_copy(update={"resource": resource}), seat_ids=seats)
            else:
                old = _rebuilt_group(key, resource, seats, members.get(key, ()), known)  # (3)
            if old is None:
                continue
            found.append(replace(old, name=_free_name(old, {group.name for group in found})))
        kept.update(seats)
    return tuple(found), frozenset(kept)


def _rebuilt_group(
    key: str, resource: str, seats: tuple[str, ...], recorded: Sequence[str], known: Mapping[str, Gpu]
) -> Group | None:
    usable = known.keys() >= set(recorded) and group_key(recorded, len(key)) == key
    members = recorded if usable else _members_of(key, size_of(seats[0]), known.values())
    if not members:
        return None
    gpus = tuple(known[uuid] for uuid in members)
    name = f"{len(gpus)}x-{key}"
    try:
        profile = Profile(name=name, resource=resource, group_size=len(gpus), seats_per_group=len(seats))
    except ValidationError:  # the recorded resource is not a resource name: the file was not written by the plugin
        return None
    return Group(name=name, key=key, profile=profile, gpus=gpus, seat_ids=seats, slots=1)


def _members_of(key: str, size: int, gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return the ``size`` GPUs with this key, found among as many of the first ``gpus`` as can be tried; else none."""
    tried = list(gpus)
    while comb(len(tried), size) > _MOST_COMBINATIONS:
        tried.pop()
    groups = (tuple(gpu.uuid for gpu in group) for group in combinations(sorted(tried, key=lambda g: g.index), size))
    return next((uuids for uuids in groups if uuids and group_key(uuids, len(key)) == key), ())


def _free_name(group: Group, taken: set[str]) -> str:
    if group.name not in taken:
        return group.name
    name = f"{len(group.gpus)}x-{group.key}"
    return name if name not in taken else f"{name}-{len(taken)}"
