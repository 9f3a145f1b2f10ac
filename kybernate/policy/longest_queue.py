"""The longest queue goes next; hysteresis keeps a busy holder."""

from collections.abc import Iterable
from dataclasses import dataclass

from kybernate.policy.turns import demand, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class LongestQueue:
    """Most requests waiting goes next.

    A busy holder yields after ``min_visit_seconds`` to a queue of more than ``hysteresis`` times its own load.
    """

    min_visit_seconds: float = 10.0
    hysteresis: float = 1.5

    def decide(self, view: GroupView) -> Decision:
        """Compare queues."""
        return take_turns(view, _longest, self._yields_in)

    def _yields_in(self, holder: SeatView, comer: SeatView) -> float | None:
        if not own_load(holder):
            return 0.0
        if comer.pinned or demand(comer) > self.hysteresis * own_load(holder):
            return self.min_visit_seconds - holder.active_seconds
        return None


def _longest(waiting: Iterable[SeatView]) -> SeatView:
    return min(waiting, key=lambda seat: (-demand(seat), *seat.turn))
