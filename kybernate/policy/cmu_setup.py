"""c-mu with set-up times: the highest rate of requests served per second goes next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kybernate.policy.index import visit_seconds
from kybernate.policy.turns import FADE_SECONDS, contenders, demand, own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView, Stay


@dataclass(frozen=True, slots=True)
class CmuSetup:
    """Weighted requests that a visit would serve, per second that it would cost; ages count for nothing.

    A busy holder yields after ``min_visit_seconds`` to a seat whose rate exceeds its own by the factor
    ``hysteresis``. Source: the reward-rate rule of Duenyas and Van Oyen for queues with set-up times, with a visit
    that serves everybody who waits.
    """

    min_visit_seconds: float = 10.0
    hysteresis: float = 1.5

    def decide(self, view: GroupView) -> Decision:
        """Compare rates of reward."""
        answer = take_turns(view, _best, self._yields_in)
        if isinstance(answer, Stay) and answer.until is None and contenders(view):
            return replace(answer, until=FADE_SECONDS)
        return answer

    def _yields_in(self, holder: SeatView, comer: SeatView) -> float | None:
        if not own_load(holder):
            return 0.0
        own = holder.weight * own_load(holder) / max(holder.service_seconds, 0.001)
        if comer.pinned or _reward(comer, holder.park_seconds) > self.hysteresis * own:
            return self.min_visit_seconds - holder.active_seconds
        return None


def _reward(seat: SeatView, park_seconds: float = 0.0) -> float:
    setup = park_seconds + seat.activate_seconds
    served = demand(seat) + seat.rate_fast * setup
    return seat.weight * served / max(setup + visit_seconds(seat, round(served)), 0.001)


def _best(waiting: Iterable[SeatView]) -> SeatView:
    return min(waiting, key=lambda seat: (-_reward(seat), *seat.turn))
