"""Search for the best cut of GPUs into disjoint groups of one size. Pure; numbers in, numbers out.

A cut partitions *atoms*: single GPUs, or sets that must stay together (smaller groups inside larger ones). The best cut
has as many groups as possible; among those, the largest sum of nearness over the pairs inside groups; among equal ones,
it is the first in the order of the atoms.

The exact search takes the first free atom, tries every group that contains it (and leaving it out, where GPUs must be
left over), and caches the best cut of every set of atoms. Two rules prune it: *twins*, atoms that are equally near to
everything else, are taken in order; and a branch ends where the nearest neighbours of every GPU bound it below the best
cut found. Regular machines need a handful of steps, irregular ones of up to 12 GPUs a few thousand. Past ``STEPS`` the
search is greedy: the best group that grows from any atom, repeatedly, then swaps between groups until no swap improves
the cut. The same input always gives the same cut; nothing depends on time.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

STEPS = 100_000
"""Limit of complete and partial groups that the exact search tries; about 0.2 s."""
_MORE_GROUPS = 1 << 120
"""Larger than any sum of nearness: one more group always outweighs nearness."""

Cut = list[tuple[int, ...]]
"""Groups as tuples of atom numbers, ascending, in the order of their first atoms."""


class _TooManyStepsError(Exception):
    pass


def best_cut(weights: Sequence[int], near: Sequence[Sequence[int]], size: int) -> Cut:
    """Return the best groups of exactly ``size`` GPUs. ``near[a][b]``: summed nearness of all pairs between two atoms
    (``near[a][a]``: of all pairs inside one); ``weights``: GPUs per atom.
    """
    exact = _Exact(weights, near, size)
    try:
        return exact.cut()
    except _TooManyStepsError:
        return _swapped(_grown(weights, near, size), weights, near)


class _Exact:
    """The exact search, memoized. A set of atoms is a bit mask; worth is twice the summed nearness."""

    def __init__(self, weights: Sequence[int], near: Sequence[Sequence[int]], size: int) -> None:
        self.weights, self.near, self.size = weights, near, size
        self.atoms = range(len(weights))
        self.single = all(weight == 1 for weight in weights)
        self.twins_before = [self._twins_before(atom) for atom in self.atoms]
        self.potential = [self._potential(atom) for atom in self.atoms]
        self.best: dict[int, tuple[int, int, bool]] = {0: (0, 0, False)}
        """By set of atoms: worth of its best cut, the atoms to remove first, whether these are a group."""
        self.steps = 0

    def cut(self) -> Cut:
        free = (1 << len(self.weights)) - 1
        self._worth(free)
        found: Cut = []
        while free:
            _, atoms, is_group = self.best[free]
            if is_group:
                found.append(tuple(atom for atom in self.atoms if atoms >> atom & 1))
            free &= ~atoms
        return found

    def _worth(self, free: int) -> int:
        """Return the worth of the best cut of these atoms."""
        if free in self.best:
            return self.best[free][0]
        bound = self._bound(free)
        lowest = free & -free
        best = (-1, 0, False)
        for group, worth in self._groups(lowest.bit_length() - 1, free):
            total = _MORE_GROUPS + worth + self._worth(free & ~group)
            if total > best[0]:
                best = (total, group, True)
            if best[0] >= bound:
                break
        if best[0] < bound and not (self.single and free.bit_count() % self.size == 0):
            self._step()
            total = self._worth(free & ~lowest)
            if total > best[0]:
                best = (total, lowest, False)
        self.best[free] = best
        return best[0]

    def _step(self) -> None:
        self.steps += 1
        if self.steps > STEPS:
            raise _TooManyStepsError

    def _groups(self, first: int, free: int) -> Iterator[tuple[int, int]]:
        """Yield every group with ``first`` as its first atom, up to twins, and its worth.

        Depth first, lower atoms first: among equal cuts, the one with consecutive GPUs is found first.
        """
        stack: list[tuple[tuple[int, ...], int, int, int]] = [
            ((first,), 1 << first, self.weights[first], 2 * self.near[first][first])
        ]
        while stack:
            members, group, weight, worth = stack.pop()
            self._step()
            if weight == self.size:
                yield group, worth
                continue
            for atom in reversed(self.atoms[members[-1] + 1 :]):
                passed_over = self.twins_before[atom] & free & ~group
                if free >> atom & 1 and not passed_over and weight + self.weights[atom] <= self.size:
                    row = self.near[atom]
                    gain = 2 * (row[atom] + sum(row[member] for member in members))
                    grown = (*members, atom), group | 1 << atom, weight + self.weights[atom], worth + gain
                    stack.append(grown)

    def _twins_before(self, atom: int) -> int:
        """Return the earlier atoms that are interchangeable with it: equally near to everything else."""
        found = 0
        for other in range(atom):
            alike = self.weights[other] == self.weights[atom] and self.near[other][other] == self.near[atom][atom]
            if alike and all(self.near[other][x] == self.near[atom][x] for x in self.atoms if x not in (other, atom)):
                found |= 1 << other
        return found

    def _potential(self, atom: int) -> int:
        """Bound what an atom adds to the worth of a group: its inside and the nearest neighbours that fit."""
        room = self.size - self.weights[atom]
        others = [other for other in self.atoms if other != atom and self.weights[other] <= room]
        others.sort(key=lambda other: Fraction(self.near[atom][other], self.weights[other]), reverse=True)
        total = 2 * self.near[atom][atom]
        for other in others:
            if room <= 0:
                break
            total += self.near[atom][other]
            room -= self.weights[other]
        return total

    def _bound(self, free: int) -> int:
        """Return an upper bound on the worth of any cut of these atoms."""
        atoms = [atom for atom in self.atoms if free >> atom & 1]
        weight = sum(self.weights[atom] for atom in atoms)
        values = sorted((self.potential[atom] for atom in atoms), reverse=True)
        if self.single:
            values = values[: weight - weight % self.size]
        return weight // self.size * _MORE_GROUPS + sum(values)


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
