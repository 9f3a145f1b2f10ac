"""States of the small exact model as the views that live policies decide on.

The model knows how many wait and how many are in flight, not since when. Times in the views are expectations:

* **ages**: of n waiting requests the k-th youngest has waited k / (rate + 1 / absence) seconds. That is its expected
  age given n, when arrivals are Poisson and the seat has been closed for an exponential time with mean ``absence``.
  A request meets an absence in its middle, so twice the mean wait is the natural choice.
* **dwell**: an active seat has been so for one mean service time times the logarithm of what is in flight, plus one
  (the expected age of a batch that has shrunk to one request is such a sum).
* **idle**: as long as it takes, on average, until any request arrives.
* **rates, service, costs**: the true ones; both half-lives have learned the same.

``Stay(until)`` counts as Stay: in a state without memory there is no later look.
"""

import math
from typing import TYPE_CHECKING

from kybernate.policy.view import GroupView, Park, Policy, SeatView, Switch
from kybernate.seat import SeatState

if TYPE_CHECKING:
    from kybernate.lab.studies.mdp import Case

GROUP = "G0"


def name(seat: int) -> str:
    """Of a seat of the model."""
    return f"s{seat}"


class Stationary:
    """Asks a policy what it does in a state."""

    def __init__(self, case: "Case", absence: float, slo_seconds: float = 20.0) -> None:
        self._case = case
        self._slo = slo_seconds
        most = case.limit
        self._ages = [[k / (rate + 1 / absence) for k in range(most, 0, -1)] for rate in case.rates]
        """Oldest first, of the longest queue; shorter ones are their ends."""

    def restores(self, policy: Policy, waiting: tuple[int, ...]) -> int:
        """Whom the policy restores while nobody holds the slot; -1: nobody."""
        decision = policy.decide(self._view(waiting, None, 0))
        return int(decision.activate[1:]) if isinstance(decision, Switch) else -1

    def leaves(self, policy: Policy, seat: int, in_flight: int, waiting: tuple[int, ...]) -> bool:
        """Whether the active seat closes admission (parks, when nothing is in flight)."""
        decision = policy.decide(self._view(waiting, seat, in_flight))
        return isinstance(decision, Park) or (isinstance(decision, Switch) and decision.evict == name(seat))

    def _view(self, waiting: tuple[int, ...], active: int | None, in_flight: int) -> GroupView:
        seats = tuple(
            self._seat(seat, count, in_flight if seat == active else None) for seat, count in enumerate(waiting)
        )
        return GroupView(GROUP, 1, seats, now=1e6)

    def _seat(self, seat: int, waiting: int, in_flight: int | None) -> SeatView:
        case = self._case
        ages = tuple((age, 1) for age in self._ages[seat][case.limit - waiting :])
        running = in_flight is not None
        unused = 1 / case.arrivals if waiting == 0 and not in_flight else 0.0
        return SeatView(
            name(seat),
            SeatState.ACTIVE if running else SeatState.PARKED,
            GROUP,
            waiting=waiting,
            ages=ages,
            oldest_wait_seconds=ages[0][0] if ages else 0.0,
            in_flight=in_flight or 0,
            active_seconds=case.service * (1 + math.log(max(in_flight or 0, 1))) + unused if running else 0.0,
            idle_seconds=unused,
            park_seconds=case.park,
            activate_seconds=case.restore,
            slo_seconds=self._slo,
            service_seconds=case.service,
            rate_fast=case.rates[seat],
            rate_slow=case.rates[seat],
        )
