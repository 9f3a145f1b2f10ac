"""The autoscalers' rule: a seat goes once nothing has come for it for a while."""

from dataclasses import dataclass

from kybernate.policy.turns import oldest, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Whoever waits longest goes next, once the holder has been idle for ``idle_seconds``."""

    idle_seconds: float = 10.0

    def decide(self, view: GroupView) -> Decision:
        """Wait for a holder that has been idle long enough."""
        return take_turns(view, oldest, self._yields_in)

    def _yields_in(self, holder: SeatView, comer: SeatView) -> float | None:
        del comer
        if holder.unclaimed:
            return 0.0
        return None if own_load(holder) else self.idle_seconds - holder.idle_seconds
