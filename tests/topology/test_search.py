"""The cut into groups: as good as trying everything where everything can be tried, and never wrong elsewhere."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kybernate.topology import search
from kybernate.topology.search import Cut, best_cut

Near = list[list[int]]


def worth(cut: Cut, near: Sequence[Sequence[int]]) -> int:
    return sum(near[a][b] for group in cut for a, b in itertools.combinations(group, 2)) + sum(
        near[a][a] for group in cut for a in group
    )


def tried(weights: Sequence[int], near: Near, size: int) -> tuple[int, int]:
    """Most groups, and the best worth with so many, by trying all cuts."""

    def cuts(free: frozenset[int]) -> set[tuple[int, int]]:
        if not free:
            return {(0, 0)}
        first = min(free)
        found = cuts(free - {first})
        for count in range(len(free)):
            for others in itertools.combinations(sorted(free - {first}), count):
                group = (first, *others)
                if sum(weights[atom] for atom in group) == size:
                    found |= {(n + 1, w + worth([group], near)) for n, w in cuts(free - set(group))}
        return found

    return max(cuts(frozenset(range(len(weights)))))


def symmetric(values: list[int], atoms: int) -> Near:
    pairs = itertools.combinations_with_replacement(range(atoms), 2)
    table = {frozenset(pair): value for pair, value in zip(pairs, itertools.cycle(values), strict=False)}
    return [[table[frozenset((a, b))] for b in range(atoms)] for a in range(atoms)]


def without_insides(near: Near) -> Near:
    return [[0 if a == b else value for b, value in enumerate(row)] for a, row in enumerate(near)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=28), st.integers(1, 7), st.integers(2, 4))
def test_no_cut_of_single_gpus_is_better(values: list[int], atoms: int, size: int) -> None:
    near = without_insides(symmetric(values, atoms))
    cut = best_cut([1] * atoms, near, size)
    assert (len(cut), worth(cut, near)) == tried([1] * atoms, near, size)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=28),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(2, 6),
)
def test_no_cut_of_atoms_is_better(values: list[int], weights: list[int], size: int) -> None:
    weights = [min(weight, size - 1) for weight in weights]  # larger ones are no atoms of this size
    near = symmetric(values, len(weights))
    cut = best_cut(weights, near, size)
    assert (len(cut), worth(cut, near)) == tried(weights, near, size)


@given(st.lists(st.integers(0, 9), min_size=20, max_size=400), st.integers(17, 24), st.integers(2, 8))
@settings(max_examples=15)
def test_irregular_machines_of_many_gpus_get_disjoint_groups_too(values: list[int], atoms: int, size: int) -> None:
    near = without_insides(symmetric(values, atoms))
    cut = best_cut([1] * atoms, near, size)
    members = [atom for group in cut for atom in group]
    assert len(cut) == atoms // size
    assert len(set(members)) == len(members) == size * len(cut)
    assert cut == best_cut([1] * atoms, near, size)


def hierarchy(gpus: int, *levels: int) -> Near:
    """``hierarchy(64, 4, 16)``: switches of 4 in sockets of 16."""
    return [
        [sum(a // level == b // level for level in levels) if a != b else 0 for b in range(gpus)] for a in range(gpus)
    ]


@pytest.mark.parametrize(("gpus", "levels"), [(16, (8,)), (16, (2, 4, 8)), (32, (2, 8, 16)), (64, (2, 8, 32))])
def test_large_machines_are_cut_along_their_hierarchy(gpus: int, levels: tuple[int, ...]) -> None:
    near = hierarchy(gpus, *levels)
    for size in (2, 4, 8, 16):
        assert best_cut([1] * gpus, near, size) == [tuple(range(at, at + size)) for at in range(0, gpus, size)]


def test_where_not_all_cuts_are_tried_swaps_bring_the_hierarchy_out() -> None:
    """GPUs whose order on the bus says nothing about where they are."""
    order = sorted(range(24), key=lambda number: number * 7 % 24)
    tidy = hierarchy(24, 2, 6, 12)
    near = [[tidy[a][b] for b in order] for a in order]
    for size in (2, 3, 6, 12):
        grown = search._swapped(search._grown([1] * 24, near, size), [1] * 24, near)
        best = [tuple(range(start, start + size)) for start in range(0, 24, size)]
        assert worth(grown, near) >= 0.9 * worth(best, tidy)


def test_a_machine_too_irregular_for_trying_everything_is_still_cut() -> None:
    near = [[0 if a == b else (a * 37 + b * 37 + a * b * 11) % 101 for b in range(32)] for a in range(32)]
    cut = best_cut([1] * 32, near, 4)
    assert len(cut) == 8
    assert worth(cut, near) > worth([tuple(range(start, start + 4)) for start in range(0, 32, 4)], near)


def test_equal_cuts_are_decided_by_order() -> None:
    assert best_cut([1] * 5, [[0] * 5] * 5, 2) == [(0, 1), (2, 3)]
    assert best_cut([1, 1, 2, 1, 1], [[0] * 5] * 5, 3) == [(0, 1, 3), (2, 4)]
