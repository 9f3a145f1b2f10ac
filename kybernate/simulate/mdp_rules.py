"""The plain rules that the exact optimum is compared with: longest queue first, in a few variants.

They are yardsticks, not choices for users; they look only at numbers of requests.
"""

from dataclasses import dataclass
from typing import Literal

from kybernate.policy.view import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """The longest queue goes next; ``gate`` says when a busy seat closes admission."""

    gate: Literal["never", "longer", "first"] = "never"
    """``never``: exhaustive; ``longer``: a queue is longer than what is in flight; ``first``: anybody waits."""
    idle: Literal["keep", "park", "newsvendor"] = "newsvendor"
    """What an idle seat does while nobody waits; newsvendor: park it if it is unlikely to be the next one wanted."""
    ties: Literal["colder", "hotter"] = "colder"
    """Which of equally long queues; the colder seat's visit is shorter."""

    def decide(self, view: GroupView) -> Decision:
        """One rule, no time in it."""
        holder = next(iter(view.holders()), None)
        others = [seat for seat in view.seats if seat.waiting and seat.state is SeatState.PARKED]
        sign = 1 if self.ties == "hotter" else -1
        winner = max(others, key=lambda seat: (seat.waiting, sign * seat.rate_slow), default=None)
        if holder is None:
            return Switch(winner.seat, None, "longest queue") if winner else Stay(None, "nobody waits")
        if winner is None:
            return self._alone(view, holder)
        if holder.in_flight == 0 or self._closes(holder, winner):
            return Switch(winner.seat, holder.seat, "longest queue")
        return Stay(None, "still serving")

    def _closes(self, holder: SeatView, winner: SeatView) -> bool:
        return self.gate == "first" or (self.gate == "longer" and winner.waiting > holder.in_flight)

    def _alone(self, view: GroupView, holder: SeatView) -> Decision:
        share = holder.rate_slow / sum(seat.rate_slow for seat in view.seats)
        unlikely = share < holder.park_seconds / (holder.park_seconds + holder.activate_seconds)
        if holder.in_flight == 0 and (self.idle == "park" or (self.idle == "newsvendor" and unlikely)):
            return Park(holder.seat, "idle")
        return Stay(None, "nobody waits")
