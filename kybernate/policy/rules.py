"""The plain rules of llama-swap and nvshare, as policies; ``kybernate.lab.baselines`` has more to compare with. Pure.

Each takes the parked seat with the oldest wait next; they differ in when an active seat yields. A rule is one small
class; it serves as the example for a policy of your own (``docs/dev/policy.md``).
"""

from dataclasses import dataclass

from kybernate.policy.turns import oldest, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """The running model serves everything that arrives for it until it is idle.

    Source: llama-swap's FIFO scheduler, as a rule. A holder that never runs empty starves the others.
    """

    def decide(self, view: GroupView) -> Decision:
        """Wait for an idle holder."""
        return take_turns(view, oldest, idle_now)


@dataclass(frozen=True, slots=True)
class Quantum:
    """First come, first served; the holder yields after ``quantum_seconds``, or after ``idle_seconds`` without work.

    Source: nvshare's scheduler with its default quantum and early release, as a rule.
    """

    quantum_seconds: float = 30.0
    idle_seconds: float = 5.0

    def decide(self, view: GroupView) -> Decision:
        """Wait for the end of the quantum or for an idle holder."""
        return take_turns(view, oldest, self._yields_in)

    def _yields_in(self, holder: SeatView, incoming: SeatView) -> float:
        del incoming
        if holder.unclaimed:
            return 0.0
        over = self.quantum_seconds - holder.active_seconds
        return over if own_load(holder) else min(over, self.idle_seconds - holder.idle_seconds)


def idle_now(holder: SeatView, incoming: SeatView) -> float | None:
    """For ``take_turns``: an idle holder yields at once, a busy one only after an event."""
    del incoming
    return None if own_load(holder) else 0.0
