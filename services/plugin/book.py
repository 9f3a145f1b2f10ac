"""Which seats somebody has, as far as the plugin knows: its own answers, and what PodResources lists. Pure.

Kubelet tells neither when a seat is freed nor, when it asks about one resource, what of the others is in use.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FORGET_AFTER = 3
"""A seat that PodResources lists this often in a row without an owner is free. An admission takes a moment to show."""


@dataclass(frozen=True, slots=True)
class Held:
    """A seat that kubelet gave to somebody."""

    seat: str
    resource: str
    gpus: tuple[str, ...] = ()
    """UUIDs of its group, in the group's order; empty: only PodResources told of it."""


@dataclass
class Book:
    """Seats in use, by ID."""

    held: dict[str, Held] = field(default_factory=dict)
    _misses: dict[str, int] = field(default_factory=dict)

    def allocate(self, held: Held) -> bool:
        """Kubelet was answered; returns whether that is news."""
        self._misses.pop(held.seat, None)
        if self.held.get(held.seat) == held:
            return False
        self.held[held.seat] = held
        return True

    def see(self, listed: Mapping[str, str]) -> bool:
        """Take what PodResources lists now: resources by seat. Returns whether it changed anything."""
        before = dict(self.held)
        for seat, resource in listed.items():
            self._misses.pop(seat, None)
            self.held.setdefault(seat, Held(seat, resource))
        for seat in self.held.keys() - listed.keys():
            misses = self._misses[seat] = self._misses.get(seat, 0) + 1
            if misses >= FORGET_AFTER:
                del self.held[seat], self._misses[seat]
        return self.held != before

    def of(self, seats: Iterable[str]) -> frozenset[str]:
        """Those of these seats that somebody has."""
        return frozenset(seats) & self.held.keys()
