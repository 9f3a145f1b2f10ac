"""One turn of the router's decisions: when it is, and what is to be done about it. Pure."""

from dataclasses import dataclass, field

from services.router import happenings as h
from services.router.lanes import Lane


@dataclass(slots=True)
class Turn:
    """Shared by all who decide; each happening begins a new one."""

    now: float = 0.0
    """Wall seconds of CLOCK_MONOTONIC."""
    effects: list[h.Effect] = field(default_factory=list)
    """In order."""

    def begin(self, now: float) -> None:
        """Something happened."""
        self.now, self.effects = now, []

    def say(self, effect: h.Effect | None) -> None:
        """Have this done, if anything."""
        if effect is not None:
            self.effects.append(effect)

    def touch(self, model: str, lane: Lane | None, *, edge: bool) -> None:
        """The level of (model, seat) changed; ``edge``: from or to zero."""
        self.effects.append(h.LevelChanged(model, lane.key if lane else None, edge))
