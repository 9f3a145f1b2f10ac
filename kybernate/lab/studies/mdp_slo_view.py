"""States of the small exact model with SLOs as the views that live policies decide on.

Ages of those who can still meet their SLO are exact. Everybody who has missed it counts as one request that has waited
twice as long. An active seat has been so for a while and idle for a step; rates, service and costs are the true ones.
"""

from kybernate.policy.view import GroupView, Park, Policy, SeatView, Switch
from kybernate.seat import SeatState

GROUP = "G0"
_ROUNDING = 1e-6
"""So that who is admitted at the last step is seen as within the SLO."""


def name(seat: int) -> str:
    """Of a seat of the model."""
    return f"s{seat}"


class Steps:
    """Asks a policy what it does in a state. ``rates`` per second, ``service`` and ``step`` in seconds."""

    def __init__(self, rates: tuple[float, ...], service: float, step: float, slo_steps: int) -> None:
        self._rates, self._service, self._step, self._slo_steps = rates, service, step, slo_steps
        self._ages = [self._waiting(pattern) for pattern in range(2 << slo_steps)]

    def restores(self, policy: Policy, waiting: tuple[int, ...]) -> int:
        """Whom the policy restores while nobody holds the slot; -1: nobody."""
        decision = policy.decide(self._view(waiting, None, 0))
        return int(decision.activate[1:]) if isinstance(decision, Switch) else -1

    def leaves(self, policy: Policy, seat: int, in_flight: int, others: tuple[int, ...]) -> bool:
        """Whether the active seat closes admission (parks, when nothing is in flight)."""
        waiting = (*others[:seat], 0, *others[seat:])
        return isinstance(policy.decide(self._view(waiting, seat, in_flight)), Switch | Park)

    def _waiting(self, pattern: int) -> tuple[tuple[float, int], ...]:
        """(age, count), oldest first."""
        ages = [(age * self._step, 1) for age in range(self._slo_steps) if pattern >> age & 1]
        if pattern >> self._slo_steps & 1:
            ages.append((2 * self._slo_steps * self._step, 1))
        return tuple(reversed(ages))

    def _view(self, waiting: tuple[int, ...], active: int | None, in_flight: int) -> GroupView:
        seats = tuple(
            self._seat(seat, pattern, in_flight if seat == active else None) for seat, pattern in enumerate(waiting)
        )
        return GroupView(GROUP, 1, seats, now=1e6)

    def _seat(self, seat: int, pattern: int, in_flight: int | None) -> SeatView:
        ages = self._ages[pattern]
        running, idle = in_flight is not None, 0.0 if in_flight else self._step
        return SeatView(
            name(seat),
            SeatState.ACTIVE if running else SeatState.PARKED,
            GROUP,
            waiting=len(ages),
            ages=ages,
            oldest_wait_seconds=ages[0][0] if ages else 0.0,
            in_flight=in_flight or 0,
            active_seconds=self._service + idle if running else 0.0,
            idle_seconds=idle if running else 0.0,
            park_seconds=self._step,
            activate_seconds=self._step,
            slo_seconds=self._slo_steps * self._step * (1 + _ROUNDING),
            service_seconds=self._service,
            rate_fast=self._rates[seat],
            rate_slow=self._rates[seat],
        )
