"""nvshare's rule: a time quantum, given back early by an idle holder."""

from dataclasses import dataclass

from kybernate.policy.turns import oldest, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class Quantum:
    """First come, first served; the holder yields after ``quantum_seconds``, or ``idle_seconds`` without work.

    Source: nvshare's scheduler with its default quantum and early release, as a rule.
    """

    quantum_seconds: float = 30.0
    idle_seconds: float = 5.0

    def decide(self, view: GroupView) -> Decision:
        """Wait for the end of the quantum or for an idle holder."""
        return take_turns(view, oldest, self._yields_in)

    def _yields_in(self, holder: SeatView, comer: SeatView) -> float:
        del comer
        if holder.unclaimed:
            return 0.0
        over = self.quantum_seconds - holder.active_seconds
        return over if own_load(holder) else min(over, self.idle_seconds - holder.idle_seconds)
