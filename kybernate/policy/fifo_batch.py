"""The first policy: whoever waits longest goes next, and a visit serves a batch.

1. A free slot goes to the seat that waits longest.
2. A holder that has nothing to do yields once it has been active for ``min_active_seconds``; at once when it was
   only started to warm up and nobody has used it since.
3. A busy holder yields when its visit has lasted ``max_visit_seconds``, or when somebody has waited longer than
   ``starvation_seconds``; never before ``min_active_seconds``.
4. A holder that nobody competes with stays, or is parked after ``idle_park_seconds`` without traffic.

A pinned holder never yields. Operators' wishes wait like requests. Containers at the start gate wait for a free slot
or an idle holder, and starve no longer than requests do.
"""

from dataclasses import dataclass

from kybernate.policy.view import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState


@dataclass(frozen=True, slots=True)
class FifoBatch:
    """Oldest waiting first, with a minimum visit, a batch bound and a starvation bound (model seconds)."""

    min_active_seconds: float = 2.0
    max_visit_seconds: float = 30.0
    starvation_seconds: float = 60.0
    idle_park_seconds: float | None = None

    def decide(self, view: GroupView) -> Decision:
        """Rules 1 to 4 of the module's text, in order."""
        waiting = sorted((seat for seat in view.seats if seat.wait_seconds is not None), key=lambda seat: seat.turn)
        holders = view.holders()
        if not waiting:
            return self._nobody_waits(holders)
        first = waiting[0]
        age = first.wait_seconds or 0.0
        if sum(seat.state is not SeatState.PARKED and _holds(seat) for seat in view.seats) < view.slots:
            return Switch(first.seat, None, f"slot free; {first.seat} waits longest ({age:.1f} s)")
        candidates = [seat for seat in holders if not seat.pinned]
        if not candidates:
            return Stay(None, "every holder is pinned" if holders else "no holder can yield now")
        yielding = [(self._yields_in(holder, age), holder.active_seconds, holder) for holder in candidates]
        wait, _, holder = min(yielding, key=lambda entry: (entry[0], -entry[1], entry[2].seat))
        if wait <= 0:
            why = "idle" if not _busy(holder) else f"visit of {holder.active_seconds:.1f} s is over"
            return Switch(first.seat, holder.seat, f"{first.seat} waits {age:.1f} s; {holder.seat} {why}")
        return Stay(wait, f"{holder.seat} keeps the group for {wait:.1f} s more; {first.seat} waits {age:.1f} s")

    def _yields_in(self, holder: SeatView, oldest: float) -> float:
        """Seconds until this holder must yield to somebody who has waited ``oldest``; 0 or less: now."""
        settled = 0.0 if holder.unclaimed else self.min_active_seconds - holder.active_seconds
        if not _busy(holder):
            return settled
        visit_over = self.max_visit_seconds - holder.active_seconds
        starving = self.starvation_seconds - oldest
        return max(settled, min(visit_over, starving))

    def _nobody_waits(self, holders: tuple[SeatView, ...]) -> Decision:
        if self.idle_park_seconds is None:
            return Stay(None, "nobody waits")
        idle = [seat for seat in holders if not seat.pinned and not _busy(seat)]
        for seat in idle:
            if seat.idle_seconds >= self.idle_park_seconds:
                return Park(seat.seat, f"{seat.seat} idle for {seat.idle_seconds:.1f} s")
        soonest = min((self.idle_park_seconds - seat.idle_seconds for seat in idle), default=None)
        return Stay(soonest, "nobody waits")


def _busy(seat: SeatView) -> bool:
    return seat.waiting > 0 or seat.in_flight > 0


def _holds(seat: SeatView) -> bool:
    return seat.state in (SeatState.ACTIVE, SeatState.STARTING, SeatState.QUARANTINED, SeatState.LOST)
