"""llama-swap's rule: the running model serves all that comes for it until it is idle."""

from dataclasses import dataclass

from kybernate.policy.turns import oldest, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Whoever waits longest goes next, once the holder has nothing in flight.

    Source: llama-swap's FIFO scheduler, as a rule. A holder that never runs empty starves the others.
    """

    def decide(self, view: GroupView) -> Decision:
        """Wait for an idle holder."""
        return take_turns(view, oldest, _when_idle)


def _when_idle(holder: SeatView, comer: SeatView) -> float | None:
    del comer
    return None if own_load(holder) else 0.0
