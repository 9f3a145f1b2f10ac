"""Search for the best cut of GPUs into disjoint groups of one size. Pure; numbers in, numbers out.

A cut partitions *atoms*: single GPUs, or sets that must stay together (smaller groups inside larger ones). The best cut
has as many groups as possible; among those, the largest sum of nearness over the pairs inside groups; among equal ones,
it is the first in the order of the atoms.

Up to ``EXACT`` atoms every cut is tried: the first free atom with every group that contains it, or left out, and the
best cut of every set of atoms is cached. Beyond, the search is greedy: the best group that grows from any atom,
repeatedly, then swaps between groups until no swap improves the cut. The same input always gives the same cut.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

EXACT = 12
"""Most atoms for which all cuts are tried, in at most about 0.2 s."""

Cut = list[tuple[int, ...]]
"""Groups as tuples of atom numbers, ascending, in the order of their first atoms."""
_Atoms = tuple[int, ...]


def best_cut(weights: Sequence[int], near: Sequence[Sequence[int]], size: int) -> Cut:
    """Return the best groups of exactly ``size`` GPUs. ``near[a][b]``: summed nearness of all pairs between two atoms
    (``near[a][a]``: of all pairs inside one); ``weights``: GPUs per atom.
    """
    if len(weights) <= EXACT:
        return _tried(weights, near, size)
    return _swapped(_grown(weights, near, size), weights, near)


def _tried(weights: Sequence[int], near: Sequence[Sequence[int]], size: int) -> Cut:
    """Try every cut."""

    @functools.cache
    def best(free: _Atoms) -> tuple[int, int, tuple[_Atoms, ...]]:
        """Number of groups, their nearness, and the groups; of equal ones the first."""
        if not free:
            return 0, 0, ()
        found: tuple[int, int, tuple[_Atoms, ...]] = (-1, 0, ())
        for group in _groups(free, weights, size):
            count, worth, others = best(tuple(atom for atom in free if atom not in group))
            if (count + 1, worth + _inside(group, near)) > found[:2]:
                found = count + 1, worth + _inside(group, near), (group, *others)
        left_out = best(free[1:])
        return left_out if left_out[:2] > found[:2] else found

    return list(best(tuple(range(len(weights))))[2])


def _groups(free: _Atoms, weights: Sequence[int], size: int) -> Iterator[_Atoms]:
    """Yield every group with the first free atom, in the order of the atoms."""

    def grown(members: _Atoms, rest: _Atoms, missing: int) -> Iterator[_Atoms]:
        if missing == 0:
            yield members
        for position, atom in enumerate(rest):
            if weights[atom] <= missing:
                yield from grown((*members, atom), rest[position + 1 :], missing - weights[atom])

    return grown(free[:1], free[1:], size - weights[free[0]])


def _grown(weights: Sequence[int], near: Sequence[Sequence[int]], size: int) -> Cut:
    """Repeat: grow a group from each free atom and take the nearest of them."""
    free = set(range(len(weights)))
    found: Cut = []
    while True:
        groups = [group for atom in sorted(free) if (group := _grow(atom, free, weights, near, size))]
        if not groups:
            return sorted(found)
        best = max(groups, key=lambda group: (_inside(group, near), [-atom for atom in group]))
        found.append(best)
        free -= set(best)


def _grow(
    seed: int, free: set[int], weights: Sequence[int], near: Sequence[Sequence[int]], size: int
) -> tuple[int, ...] | None:
    group = [seed]
    weight = weights[seed]
    while weight < size:
        fitting = [atom for atom in free if atom not in group and weight + weights[atom] <= size]
        if not fitting:
            return None
        # Per GPU, so that a heavy atom does not win by its weight alone.
        nearest = max(
            fitting, key=lambda atom: (sum(near[atom][other] for other in group) // weights[atom], weights[atom], -atom)
        )
        group.append(nearest)
        weight += weights[nearest]
    return tuple(sorted(group)) if weight == size else None


def _swapped(cut: Cut, weights: Sequence[int], near: Sequence[Sequence[int]]) -> Cut:
    """Swap atoms of equal weight between groups, or with unused atoms, while that increases nearness."""
    groups = [set(group) for group in cut]
    spare = set(range(len(weights))) - set().union(*groups)
    sides = [*groups, spare]
    better = True
    while better:
        better = False
        for first, second in itertools.combinations(range(len(sides)), 2):
            for a, b in itertools.product(sorted(sides[first]), sorted(sides[second])):
                if weights[a] != weights[b] or a not in sides[first] or b not in sides[second]:
                    continue
                gain = _swap_gain(sides[first], a, b, near)
                gain += _swap_gain(sides[second], b, a, near) if sides[second] is not spare else 0
                if gain > 0:
                    sides[first] ^= {a, b}
                    sides[second] ^= {a, b}
                    better = True
    return sorted(tuple(sorted(group)) for group in groups)


def _swap_gain(group: set[int], out: int, into: int, near: Sequence[Sequence[int]]) -> int:
    rest = group - {out}
    inside = near[into][into] - near[out][out]
    return inside + sum(near[into][other] - near[out][other] for other in rest)


def _inside(group: Sequence[int], near: Sequence[Sequence[int]]) -> int:
    own = sum(near[atom][atom] for atom in group)
    return own + sum(near[a][b] for a, b in itertools.combinations(group, 2))
