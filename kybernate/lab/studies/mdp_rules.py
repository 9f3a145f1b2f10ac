"""The plain rules that the exact optimum is compared with: longest queue first, in a few variants.

They are yardsticks, not choices for users; they look only at numbers of requests. ``Optimal`` plays what ``mdp.solve``
found, so that the simulator can be held against the exact model.
"""

from dataclasses import dataclass
from typing import Literal

from kybernate.lab.studies import mdp_view
from kybernate.lab.studies.mdp import Solution
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


@dataclass(frozen=True, slots=True)
class Optimal:
    """The best causal policy of a case; queues beyond its limit count as the limit."""

    solution: Solution

    def decide(self, view: GroupView) -> Decision:
        """What the solution does in this state."""
        case = self.solution.case
        seats = [next(seat for seat in view.seats if seat.seat == mdp_view.name(i)) for i in range(case.seats)]
        waiting = tuple(0 if seat.state is SeatState.ACTIVE else min(seat.waiting, case.limit) for seat in seats)
        active = next((i for i, seat in enumerate(seats) if seat.state is SeatState.ACTIVE), None)
        if active is None:
            restored = self.solution.restores(waiting)
            return Stay(None, "optimal") if restored is None else Switch(mdp_view.name(restored), None, "optimal")
        if self.solution.leaves(active, min(seats[active].in_flight, case.in_flight), waiting):
            return Park(mdp_view.name(active), "optimal")
        return Stay(None, "optimal")
