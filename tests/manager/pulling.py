"""Policies of tests, which do not depend on what the shipped ones weigh."""

from collections.abc import Callable
from dataclasses import dataclass

from kybernate.policy import Decision, GroupView, SeatView, Stay, Switch
from kybernate.seat import HOLDING, SeatState

LEAVING = (SeatState.DRAINING, SeatState.PARKING)


@dataclass(frozen=True)
class By:
    """Decides by this function."""

    decide: Callable[[GroupView], Decision]


@dataclass(frozen=True)
class Pulls:
    """Moves seats whenever it may: the longest wait goes next, seats of the group before those whose own is busy."""

    busy_seconds: float | None = None
    """A busy holder leaves after this, too; None: only idle ones do."""

    def decide(self, view: GroupView) -> Decision:
        own = [seat for seat in view.seats if seat.wait_seconds is not None and seat.ready]
        waiting = own or [seat for seat in view.elsewhere if seat.home_busy and seat.ready]
        if not waiting:
            return Stay(None, "no demand")
        incoming = min(waiting, key=lambda seat: seat.turn)
        why = f"{incoming.name} waits"
        if sum(seat.state in HOLDING and seat.state not in LEAVING for seat in view.seats) < view.slots:
            return Switch(incoming.seat, None, why)
        victim = next((seat for seat in view.holders() if not seat.pinned and self._leaves(seat)), None)
        return Stay(1.0, "all are busy") if victim is None else Switch(incoming.seat, victim.seat, why)

    def _leaves(self, holder: SeatView) -> bool:
        idle = not holder.waiting and not holder.in_flight
        return idle or (self.busy_seconds is not None and holder.active_seconds >= self.busy_seconds)
