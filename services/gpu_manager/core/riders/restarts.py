"""A move by a restart: a parked seat drops its copy, its engine ends, and starts on the other group. Pure.

From the decision on the seat has a place there (``ManagedSeat.heads_to``), until it has started. Where that fails it
starts at home, as after any failed start.
"""

from kybernate.seat import SeatState
from services.gpu_manager.core import view
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.obstacles import first, of_group
from services.gpu_manager.core.state import NodeState, Rider

S = SeatState


class Restarts(Rider):
    """What becomes of seats that head to another group."""

    def step(self, node: NodeState, now: Now) -> None:
        """(1) It has arrived, or its start there has failed: it stays at home for a while. (2) A seat that does not
        come, that nothing asks for any more, or whose place only a person can free, gives it back."""
        for seat in node.seats.values():
            if not seat.heads_to or seat.state is S.STARTING:
                continue
            if not seat.heads_until:  # (1)
                if seat.state is not S.ACTIVE:
                    seat.stay(now)
                seat.heads_to = ""
                continue
            gone = seat.state is S.WAITING and not view.wanted(node, seat, now)
            shut = first(of_group(node, node.groups[seat.heads_to].group, now), "stop") is not None
            late = now.wall > seat.heads_until or seat.state not in (S.PARKED, S.BACKOFF, S.WAITING)
            if gone or shut or late:  # (2)
                seat.heads_to = ""
