"""Requests in flight that are frozen with their seat, where its pod has a stall budget; they go on when it does. Pure.

The policy decides that a victim leaves so. Routers keep the requests, and end them when the budget is used up.
"""

from dataclasses import replace

from kybernate.engines import DRIVER_BACKENDS
from kybernate.policy import SeatView
from kybernate.seat import SeatState
from services.gpu_manager.core import view
from services.gpu_manager.core.demand import ASSUMED_SERVICE_SECONDS
from services.gpu_manager.core.group_switch import GroupSwitch
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState, Rider, SeatChange
from services.gpu_manager.ledger import Freeze

S = SeatState

_STATES = (S.PARKING, S.PARKED, S.ACTIVATING, S.MIGRATING)
"""States in which a seat's frozen requests stay frozen."""


class Freezes(Rider):
    """Which seats leave with their requests, and when they have to be back."""

    def sees(self, node: NodeState, seat: ManagedSeat, seen: SeatView, now: Now) -> SeatView:
        """Frozen requests wait since they were frozen. A seat whose budget would not last another visit goes before all
        others."""
        if budget := _budget(seat):
            seen = replace(seen, stall_budget_seconds=budget)
        since = seat.durable.freeze.since
        if seat.state is not S.PARKED or not since or not seen.in_flight:
            return seen
        away = max(0.0, (float(now.unix) - since) * now.pace)
        return replace(
            seen,
            waiting=seen.waiting + seen.in_flight,
            ages=tuple(sorted((*seen.ages, (away, seen.in_flight)), reverse=True)),
            oldest_wait_seconds=max(seen.oldest_wait_seconds, away),
            pinned=seen.pinned or _must_return(node, seat, now),
        )

    def leaves(self, node: NodeState, switch: GroupSwitch, victim: ManagedSeat, now: Now) -> str:
        """Every router has closed the seat, and keeps what is in flight."""
        in_flight = view.demand(node, victim).in_flight if switch.drain.how == "freeze" else 0
        if not in_flight or not node.routers.quiet(victim.id, switch.epoch, now, frozen=True):
            return ""
        budget = _budget(victim)
        victim.durable.freeze = Freeze(float(now.unix), float(now.unix) + budget / now.pace)
        return f"{in_flight} requests in flight are frozen with it, for at most {budget:g} s"

    def after(self, node: NodeState, seat: ManagedSeat, change: SeatChange, now: Now) -> None:
        """They are frozen only with a budget, and by the driver: an engine that sleeps answers nothing. They go on, or
        are lost with their seat."""
        if change.switch is not None and seat.state is S.DRAINING and not _budget(seat):
            change.switch.drain.how = "drain"
        if seat.state not in _STATES:
            seat.durable.freeze = Freeze()

    def found(self, node: NodeState, seat: ManagedSeat, now: Now, *, remembered: bool) -> None:
        """A switch that goes on may have frozen them a moment ago."""
        self.after(node, seat, SeatChange(seat.state), now)


def _budget(seat: ManagedSeat) -> float:
    """Model seconds for which its requests in flight may be frozen; 0: they end before it leaves."""
    return seat.terms.tier.stall_budget_seconds if seat.backend in DRIVER_BACKENDS else 0.0


def _must_return(node: NodeState, seat: ManagedSeat, now: Now) -> bool:
    """True for a seat with frozen requests whose budget would not last another visit."""
    leave = 0.0
    for holder in view.holders(node, seat.group):
        learned = node.learning.of(holder.id, holder.model)
        serving = ASSUMED_SERVICE_SECONDS if learned is None else learned.service.value
        in_flight = view.demand(node, holder).in_flight
        leave = max(leave, holder.durable.costs.park_seconds + (serving if in_flight else 0.0))
    left = max(0.0, seat.durable.freeze.until - float(now.unix))
    return left * now.pace <= seat.durable.costs.activate_seconds + leave
