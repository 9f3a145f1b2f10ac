"""Families of groups that may share GPUs: nested or disjoint, never crossing. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kybernate.machine import Gpu

Members = tuple[str, "tuple[Gpu, ...]"]
"""A group's name and GPUs."""


def crossing(groups: "Sequence[Members]") -> "Iterator[tuple[Members, Members, Gpu]]":
    """Pairs of groups that share a GPU without one lying inside the other, each with the first such GPU.

    Two groups of the same GPUs count: they would be one group with two names.
    """
    for (name, gpus), (other, others) in itertools.combinations(groups, 2):
        mine, theirs = {gpu.uuid for gpu in gpus}, {gpu.uuid for gpu in others}
        shared = mine & theirs
        if shared and (mine == theirs or shared not in (mine, theirs)):
            yield (name, gpus), (other, others), next(gpu for gpu in others if gpu.uuid in shared)


def overlaps(groups: "Sequence[Members]") -> tuple[tuple[str, ...], ...]:
    """For each group the names of those that share a GPU with it."""
    sets = [{gpu.uuid for gpu in gpus} for _, gpus in groups]
    return tuple(
        tuple(name for other, (name, _) in enumerate(groups) if other != own and sets[own] & sets[other])
        for own in range(len(groups))
    )


def places_for(
    size: int, gpus: "Sequence[Gpu]", family: "Sequence[Sequence[Gpu]]"
) -> "tuple[tuple[tuple[Gpu, ...], ...], ...]":
    """Where groups of ``size`` may lie so that the family stays nested or disjoint.

    GPUs are divided by the smallest larger group that they are in (or none); inside each such region the largest
    smaller groups stay together, and every other GPU stands for itself. The atoms of a region are in the order of
    ``gpus``.
    """
    larger = sorted((group for group in family if len(group) > size), key=len)
    smaller = sorted((group for group in family if len(group) < size), key=len, reverse=True)
    regions: dict[int, dict[int, list[Gpu]]] = {}
    for gpu in gpus:
        region = next((number for number, group in enumerate(larger) if gpu in group), -1)
        atom = next((number for number, group in enumerate(smaller) if gpu in group), len(smaller) + gpus.index(gpu))
        regions.setdefault(region, {}).setdefault(atom, []).append(gpu)
    return tuple(tuple(tuple(atom) for atom in atoms.values()) for atoms in regions.values())
