"""What a seat or a switch waits for, or does: how long it has gone on, how long it usually takes, when it ends at the
latest. Pure data."""

from dataclasses import dataclass, field
from typing import Any

from kybernate.deadlines import age_text, is_late, span
from services.gpu_manager.core.inputs import Now, WallTime


@dataclass(frozen=True, slots=True)
class Clock:
    """Of a phase or a wait."""

    since: WallTime | None = None
    """It began; None: not known."""
    usual: float = 0.0
    """Wall seconds that it takes; 0: not measured yet."""
    deadline: WallTime | None = None
    """It ends by then, or what it is part of fails; None: nothing bounds it."""
    ends: str = ""
    """What happens at the deadline; without one, why there is none."""

    def late(self, now: Now) -> bool:
        """True past its deadline, or far beyond what is usual."""
        if self.since is None:
            return self.deadline is not None and now.wall > self.deadline
        return is_late(now.wall - self.since, self.usual, self._most)

    @property
    def _most(self) -> float | None:
        return None if self.deadline is None or self.since is None else self.deadline - self.since

    def text(self, now: Now) -> str:
        """To be added to what goes on: ``, for 12 s (usually 4 s; cut at 60 s)``, else when it ends: `` in 4 s``."""
        if self.since is None:
            return "" if self.deadline is None else f" in {span(self.deadline - now.wall)}"
        return f", {age_text(now.wall - self.since, self.usual, self._most, self.ends)}"

    def as_json(self, now: Now) -> dict[str, Any]:
        """Unix seconds; null: not known."""
        wall = float(now.unix) - float(now.wall)
        return {
            "since": None if self.since is None else wall + float(self.since),
            "usual_seconds": self.usual or None,
            "deadline_at": None if self.deadline is None else wall + float(self.deadline),
            "late": self.late(now),
            "ends": self.ends,
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
