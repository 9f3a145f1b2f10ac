"""What a seat or a switch waits for, or does: how long it has gone on, how long it usually takes, when it ends at the
latest. Pure data."""

from dataclasses import dataclass, field
from typing import Any

from services.gpu_manager.core.inputs import Now, WallTime

LEAST_LATE_SECONDS = 5.0
"""Wall: beyond what is usual, and twice what is usual where that is more, a phase is late."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Of a phase or a wait."""

    since: WallTime | None = None
    """It began; None: not known."""
    usual: float = 0.0
    """Wall seconds that it takes; 0: not measured yet."""
    deadline: WallTime | None = None
    """It ends by then, or what it is part of fails; None: nothing bounds it."""

    def late(self, now: Now) -> bool:
        """True past its deadline, or far beyond what is usual."""
        if self.deadline is not None and now.wall > self.deadline:
            return True
        longest = self.usual + max(LEAST_LATE_SECONDS, 2 * self.usual)
        return self.since is not None and self.usual > 0 and now.wall - self.since > longest

    def text(self, now: Now) -> str:
        """To be added to what goes on: ``, for 12 s (usually 4 s, 60 s at most)``, else when it ends: `` in 4 s``."""
        if self.since is None:
            return "" if self.deadline is None else f" in {max(0.0, self.deadline - now.wall):.0f} s"
        known = [f"usually {self.usual:.{int(self.usual < 10)}f} s"] if self.usual else []
        known += [f"{self.deadline - self.since:.0f} s at most"] if self.deadline is not None else []
        return f", for {now.wall - self.since:.0f} s" + (f" ({', '.join(known)})" if known else "")

    def as_json(self, now: Now) -> dict[str, Any]:
        """Unix seconds; null: not known."""
        wall = float(now.unix) - float(now.wall)
        return {
            "since": None if self.since is None else wall + float(self.since),
            "usual_seconds": self.usual or None,
            "deadline_at": None if self.deadline is None else wall + float(self.deadline),
            "late": self.late(now),
        }


NO_CLOCK = Clock()


@dataclass(frozen=True, slots=True)
class Stage:
    """What a seat waits for, or does. Times in ``data`` are wall seconds from now; ``text`` has none that pass."""

    stage: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    clock: Clock = NO_CLOCK

    def as_json(self, now: Now) -> dict[str, Any]:
        """Plain data, with the clock as of now."""
        text = self.text + self.clock.text(now)
        return {"stage": self.stage, "text": text, "data": self.data, "clock": self.clock.as_json(now)}
