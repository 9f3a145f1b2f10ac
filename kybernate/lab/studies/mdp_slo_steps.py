"""One step of value iteration of the small exact model with SLOs (see ``mdp_slo``), as operations on whole arrays.

Seats are independent but for the slot, so the expectation over a step's arrivals is taken seat by seat, along its axis.
"""

from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Array = TypeVar("Array", bound=NDArray[Any])


@dataclass(frozen=True)
class Patterns:
    """Who waits for a parked seat, as bits: bit k for a request that has waited k steps, the highest for anybody who
    has missed the SLO. *Aged* is a pattern a step later, before that step's arrival: one bit less.
    """

    slo_steps: int

    @property
    def count(self) -> int:
        """Of patterns."""
        return 2 << self.slo_steps

    @property
    def lost(self) -> int:
        """The bit of those who have missed it; also how many aged patterns there are."""
        return 1 << self.slo_steps

    @cached_property
    def aged(self) -> Ints:
        """By pattern."""
        every = np.arange(self.count)
        missed = (every & self.lost > 0) | (every & self.lost >> 1 > 0)
        return (every & (self.lost >> 1) - 1) | np.where(missed, self.lost >> 1, 0)

    @cached_property
    def follows(self) -> Ints:
        """The pattern by aged pattern, when nobody came; with bit 0, when somebody did."""
        aged = np.arange(self.lost)
        return ((aged & (self.lost >> 1) - 1) << 1) | np.where(aged & self.lost >> 1 > 0, self.lost, 0)

    @cached_property
    def saved(self) -> Ints:
        """By pattern: requests that meet their SLO if the seat is restored now."""
        return np.array([(pattern & self.lost - 1).bit_count() for pattern in range(self.count)])

    @cached_property
    def served(self) -> Ints:
        """By pattern: requests that are in flight when it is restored."""
        return self.saved + (np.arange(self.count) & self.lost > 0)

    def expected(self, values: Floats, axis: int, chance: float) -> Floats:
        """By aged pattern along this axis: the mean of values by pattern, over an arrival with this chance."""
        quiet = np.take(values, self.follows, axis)
        return quiet + np.float32(chance) * (np.take(values, self.follows | 1, axis) - quiet)

    def by_pattern(self, values: Array, axes: range) -> Array:
        """Values by aged pattern along these axes, as values by pattern."""
        for axis in axes:
            values = cast(Array, np.take(values, self.aged, axis))
        return values


@dataclass(frozen=True)
class Actions:
    """What is done in every state."""

    go: NDArray[np.int8]
    """[pattern of each seat], with the slot empty: -1 wait, else the seat to restore."""
    leave: tuple[NDArray[np.bool_], ...]
    """By seat that is active, [in flight, pattern of each other seat]: close admission (park, when nothing is)."""

    @classmethod
    def none(cls, patterns: Patterns, seats: int, in_flight: int) -> "Actions":
        """Everybody waits."""
        shape = (in_flight + 1,) + (patterns.count,) * (seats - 1)
        go = np.full((patterns.count,) * seats, -1, dtype=np.int8)
        return cls(go, tuple(np.zeros(shape, dtype=np.bool_) for _ in range(seats)))


@dataclass(frozen=True)
class Values:
    """Of every state; only differences mean anything."""

    empty: Floats
    """[pattern of each seat]: nobody holds the slot."""
    active: tuple[Floats, ...]
    """By seat, [in flight, pattern of each other seat]."""
    parks: Floats
    """[aged pattern of each seat]: some seat begins to park."""
    drains: tuple[Floats, ...]
    """By requests in flight, [aged pattern of each seat]: some seat has closed admission; of 0: as ``parks``."""


def start(patterns: Patterns, seats: int, in_flight: int) -> Values:
    """All zero."""
    active = (in_flight + 1,) + (patterns.count,) * (seats - 1)
    aged = np.zeros((patterns.lost,) * seats, dtype=np.float32)
    return Values(
        np.zeros((patterns.count,) * seats, dtype=np.float32),
        tuple(np.zeros(active, dtype=np.float32) for _ in range(seats)),
        aged,
        (aged,) * (in_flight + 1),
    )


def improve(
    patterns: Patterns, chances: tuple[float, ...], ends: float, old: Values, actions: Actions, choose: bool
) -> tuple[Values, float, float]:
    """Values with one more step to go, and the least and the largest growth. With ``choose`` the best action is taken
    and written into ``actions``, else they are obeyed.
    """
    seats, most = range(len(chances)), len(old.drains) - 1
    empty = old.empty
    for seat in seats:
        empty = patterns.expected(empty, seat, chances[seat])
    parks = empty  # parking takes a step, after which nobody holds the slot: as waiting with an empty slot
    drains = _drains(patterns, chances, ends, old)
    active, entered = [], []
    for seat in seats:
        after = old.active[seat]
        others = [other for other in seats if other != seat]
        for axis, other in enumerate(others, 1):
            after = patterns.expected(after, axis, chances[other])
        entered.append(_admits(after, chances[seat]))
        stays = np.stack([_thinned(entered[seat], count, ends) for count in range(most + 1)])
        own = tuple(0 if other == seat else slice(None) for other in seats)
        closes = np.stack([parks[own], *(drain[own] for drain in drains[1:])])
        if choose:
            actions.leave[seat][:] = patterns.by_pattern(closes > stays, range(1, len(chances)))
        stays, closes = (patterns.by_pattern(each, range(1, len(chances))) for each in (stays, closes))
        active.append(np.where(actions.leave[seat], closes, stays))
    best = _empty(patterns, empty, entered, actions, choose)
    return _settled(old, best, active, parks, drains)


def _admits(after: Floats, chance: float) -> Floats:
    """[in flight before a step's arrival, …]: values after it; who arrives is admitted and meets the SLO."""
    more: Floats = np.concatenate([after[1:], after[-1:]])
    return np.float32(chance) + after + np.float32(chance) * (more - after)


def _thinned(values: Floats, count: int, ends: float) -> Floats:
    """The mean of values by how many are in flight, when each of ``count`` ends with this chance."""
    shares = [comb(count, stay) * (1 - ends) ** stay * ends ** (count - stay) for stay in range(count + 1)]
    total: Floats = np.zeros_like(values[0])
    for share, value in zip(shares, values, strict=False):
        total += np.float32(share) * value
    return total


def _drains(patterns: Patterns, chances: tuple[float, ...], ends: float, old: Values) -> list[Floats]:
    """Values of draining seats, by requests in flight: a step later there are fewer, and of none the seat is parked."""
    later = []
    for values in (old.parks, *old.drains[1:]):
        for seat, chance in enumerate(chances):
            values = patterns.expected(np.take(values, patterns.aged, seat), seat, chance)
        later.append(values)
    stacked = np.stack(later)
    return [_thinned(stacked, count, ends) for count in range(len(later))]


def _empty(patterns: Patterns, waits: Floats, entered: list[Floats], actions: Actions, choose: bool) -> Floats:
    """Values of an empty slot: wait, or restore a seat, which serves everybody who waits for it."""
    seats = range(len(entered))
    best = patterns.by_pattern(waits, range(len(entered)))
    if choose:
        actions.go[...] = -1
    most = len(entered[0]) - 1
    for seat in seats:
        gained = entered[seat][np.minimum(patterns.served, most)]
        gained += patterns.saved.astype(np.float32).reshape((-1,) + (1,) * (len(entered) - 1))
        value = np.moveaxis(patterns.by_pattern(gained, range(1, len(entered))), 0, seat)
        taken = value > best if choose else actions.go == seat
        if choose:
            actions.go[taken] = seat
        best = np.where(taken, value, best)
    return best


def _settled(
    old: Values, empty: Floats, active: list[Floats], parks: Floats, drains: list[Floats]
) -> tuple[Values, float, float]:
    """The new values, kept small, and how much they have grown."""
    growth = [empty - old.empty, *(new - former for new, former in zip(active, old.active, strict=True))]
    low, high = min(float(each.min()) for each in growth), max(float(each.max()) for each in growth)
    base = empty.flat[0]
    return (
        Values(
            empty - base, tuple(each - base for each in active), parks - base, tuple(each - base for each in drains)
        ),
        low,
        high,
    )
