"""Seats that somebody has, although the configuration no longer offers them: they stay until their pods are gone. Pure.

Kubelet chose a seat's ID for the life of its pod, replays the answer at each container start and takes an ID that
vanishes for a device that failed. So a new configuration may add seats at once, and takes seats away only when nobody
has them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kybernate.config import Profile
from kybernate.topology import Group, group_key

if TYPE_CHECKING:
    from kybernate.machine import Gpu

_MOST_COMBINATIONS = 20_000
"""A key is found again by trying groups of its size: 12 870 of 8 out of 16 GPUs, a tenth of a second."""


def keep(
    groups: Sequence[Group],
    held: Mapping[str, str],
    gpus: "Sequence[Gpu]",
    *,
    before: Iterable[Group] = (),
    members: Mapping[str, Sequence[str]] | None = None,
    gone: "Sequence[Gpu]" = (),
) -> tuple[tuple[Group, ...], frozenset[str]]:
    """The groups with all held seats in them, and which seats are there only because somebody has them.

    ``held``: resource by seat ID. ``before``: the groups of the last configuration. ``members``: by group key, UUIDs
    of the groups of seats that were given earlier; a key that neither knows is looked for among the GPUs. ``gone``:
    GPUs that were on this machine earlier, whose seats stay as well. A held seat of GPUs that nobody knows is left out:
    nothing can be said about it.
    """
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    strays = {seat: resource for seat, resource in held.items() if resources.get(seat) != resource}
    found = [_without(group, strays) for group in groups]
    kept: set[str] = set()
    for key, resource in sorted({(key_of(seat), resource) for seat, resource in strays.items()}):
        seats = tuple(sorted(seat for seat, of in strays.items() if (key_of(seat), of) == (key, resource)))
        same = next((n for n, g in enumerate(found) if g.key == key and g.profile.resource == resource), None)
        if same is not None:
            found[same] = replace(found[same], seat_ids=(*found[same].seat_ids, *seats))
            kept.update(seats)
            continue
        old = _old(key, resource, seats, [*before, *groups], (*gpus, *gone), (members or {}).get(key))
        if old is None:
            old = _searched(key, resource, seats, gpus) or _searched(key, resource, seats, (*gpus, *gone))
        if old is not None:
            taken = {group.name for group in found}
            name = old.name if old.name not in taken else f"{len(old.gpus)}x-{key}"
            name = name if name not in taken else f"{name}-{len(taken)}"
            found.append(replace(old, name=name))
            kept.update(seats)
    return tuple(found), frozenset(kept)


def _without(group: Group, strays: Mapping[str, str]) -> Group:
    """A seat that is held under the old name of its resource is not offered under the new one at the same time."""
    own = tuple(seat for seat in group.seat_ids if seat not in strays)
    return group if own == group.seat_ids else replace(group, seat_ids=own)


def _old(
    key: str,
    resource: str,
    seats: tuple[str, ...],
    known: Sequence[Group],
    gpus: "Sequence[Gpu]",
    members: Sequence[str] | None,
) -> Group | None:
    for group in known:
        if group.key == key and {gpu.uuid for gpu in group.gpus} <= {gpu.uuid for gpu in gpus}:
            profile = group.profile
            if profile.resource != resource:
                profile = profile.model_copy(update={"resource": resource})
            return replace(group, profile=profile, seat_ids=seats)
    here = {gpu.uuid: gpu for gpu in gpus}
    if members and all(uuid in here for uuid in members) and group_key(members, len(key)) == key:
        return _made(key, resource, seats, tuple(here[uuid] for uuid in members))
    return None


def _made(key: str, resource: str, seats: tuple[str, ...], own: "tuple[Gpu, ...]") -> Group | None:
    name = f"{len(own)}x-{key}"
    try:
        profile = Profile(name=name, resource=resource, group_size=len(own), seats_per_group=len(seats))
    except ValidationError:  # what was remembered is no resource: somebody else wrote it
        return None
    return Group(name=name, key=key, profile=profile, gpus=own, seat_ids=seats, slots=1)


def _searched(key: str, resource: str, seats: tuple[str, ...], gpus: "Sequence[Gpu]") -> Group | None:
    size = size_of(seats[0])
    if not 0 < size <= len(gpus) or comb(len(gpus), size) > _MOST_COMBINATIONS:
        return None
    ordered = sorted(gpus, key=lambda gpu: gpu.index)
    tried = (group for group in combinations(ordered, size) if group_key([gpu.uuid for gpu in group], len(key)) == key)
    own = next(tried, None)
    return None if own is None else _made(key, resource, seats, own)


def key_of(seat: str) -> str:
    """The group key in a seat's ID."""
    return seat.partition("-")[2].partition(".")[0]


def size_of(seat: str) -> int:
    """The group's size in a seat's ID; 0 when it is none."""
    size = seat.partition("x-")[0]
    return int(size) if size.isdecimal() else 0
