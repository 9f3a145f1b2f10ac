"""How long something has gone on, how long it usually takes, and when it ends at the latest. Pure.

A phase is a state of a seat that ends by itself (``demand.PHASES``). What it usually takes is the median of its last
nine durations of the seat, else of all seats of the node with the same backend.
"""

from dataclasses import dataclass
from typing import Any

from kybernate.seat import SeatState
from services.gpu_manager.core.demand import PHASES
from services.gpu_manager.core.group_switch import CUT_GRACE_SECONDS, SwitchPhase
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import START_DEADLINE_SECONDS, ManagedSeat
from services.gpu_manager.core.state import NodeState

S = SeatState

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


def clock(node: NodeState, seat: ManagedSeat, now: Now) -> Clock:
    """The clock of a seat's present state; of one that does not end by itself: only since when."""
    if seat.state not in PHASES:
        return Clock(seat.entered_wall)
    deadline, switch = None, node.switch_leaving(seat)
    if seat.state is S.STARTING and not seat.facts.alive:
        deadline = seat.entered_wall + START_DEADLINE_SECONDS
    elif seat.state is S.DRAINING and switch is not None and switch.drain.announced:
        deadline = now.wall + (switch.drain.deadline - now.model) / now.pace
        if switch.phase is SwitchPhase.CUTTING:
            deadline = switch.drain.cut + CUT_GRACE_SECONDS
    return Clock(seat.entered_wall, node.learning.usual(seat.id, seat.backend, seat.state), deadline)
