"""Wishes for a group, written by the node's GPU manager: the next seat of a resource should be on this group. Pure.

A wish is granted once, to the next pod that can have it; which pod asks, kubelet does not tell. It lapses by itself.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from kybernate.wishes import Wish


@dataclass
class Wishes:
    """Wishes that are still open."""

    open: tuple[Wish, ...] = ()
    _granted: set[str] = field(default_factory=set)

    def read(self, wishes: Collection[Wish]) -> None:
        """Take what the file holds now. What was granted stays so for as long as the file names it."""
        self._granted &= {wish.id for wish in wishes}
        self.open = tuple(sorted(wishes, key=lambda wish: (wish.until, wish.id)))

    def fitting(self, resource: str, groups: Collection[str], unix: float) -> Wish | None:
        """The open wish that lapses first, among those for one of these groups."""
        return next(
            (
                wish
                for wish in self.open
                if wish.id not in self._granted
                and wish.until > unix
                and wish.group in groups
                and wish.resource in ("", resource)
            ),
            None,
        )

    def grant(self, wish: Wish) -> None:
        """It was fulfilled."""
        self._granted.add(wish.id)
