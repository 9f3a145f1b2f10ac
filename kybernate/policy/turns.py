"""Reading a view: seats with demand, holders, possible victims; and the frame of the simple policies. Pure."""

from collections.abc import Callable, Iterable

from kybernate.policy.view import Decision, GroupView, SeatView, Stay, Switch
from kybernate.seat import HOLDING, SeatState

FADE_SECONDS = 15.0
"""A decision that follows from rates is renewed after this time: rates fade without any event."""
GRACE_SECONDS = 2.0
"""Grace period after an activation until the request that caused it must appear in flight."""

LEAVING = (SeatState.DRAINING, SeatState.PARKING)
"""States of a victim: a policy that decides while it leaves decides about the slot that becomes free."""


def contenders(view: GroupView) -> list[SeatView]:
    """Return the seats of this group with demand; only the pinned ones while any of those has demand."""
    waiting = [seat for seat in view.seats if seat.wait_seconds is not None]
    return [seat for seat in waiting if seat.pinned] or waiting


def guests(view: GroupView) -> list[SeatView]:
    """Return parked seats of other groups with demand whose own group has no slot for them."""
    parked = (seat for seat in view.elsewhere if seat.home_busy and seat.state is SeatState.PARKED)
    return [seat for seat in parked if seat.wait_seconds is not None]


def free_slots(view: GroupView) -> int:
    """How many more seats may hold the group; 0 or negative: a holder has to leave first."""
    return view.slots - sum(seat.state in HOLDING and seat.state not in LEAVING for seat in view.seats)


def movable(view: GroupView) -> list[SeatView]:
    """Return the holders that a decision may name as victim."""
    return [seat for seat in view.holders() if not seat.pinned]


def own_load(seat: SeatView) -> int:
    """Unfinished requests of a holder."""
    return seat.waiting + seat.in_flight


def demand(seat: SeatView) -> int:
    """Requests that wait for a seat; an operator's request and a container at the start gate count as one each."""
    return seat.waiting + (seat.wanted_seconds is not None) + (seat.state is SeatState.WAITING)


def settles_in(holder: SeatView) -> float:
    """Rest of a holder's grace period; 0: it has served its first request, or the period is over."""
    if holder.unclaimed:
        return 0.0
    unused = not own_load(holder) and holder.idle_seconds >= holder.active_seconds
    if holder.waiting or unused:
        return max(0.0, GRACE_SECONDS - holder.active_seconds)
    return 0.0


def oldest(waiting: Iterable[SeatView]) -> SeatView:
    """Return the seat with the longest wait; pinned seats go first."""
    return min(waiting, key=lambda seat: seat.turn)


def blocked(view: GroupView) -> Stay:
    """The decision where a seat has demand and no holder may be named as victim: only an event can change that."""
    return Stay(None, "every holder is pinned" if view.holders() else "no holder can yield now")


def take_turns(
    view: GroupView,
    choose: Callable[[list[SeatView]], SeatView],
    yields_in: Callable[[SeatView, SeatView], float | None],
) -> Decision:
    """Decide by a choice of the incoming seat and a rule that says after how many seconds a holder yields to it.

    ``yields_in(holder, incoming)`` is 0 or less for now and None where only an event can make the holder yield.
    """
    waiting = contenders(view)
    if not waiting:
        return Stay(None, "no demand")
    incoming = choose(waiting)
    what = f"{incoming.seat} has {demand(incoming)} waiting, {incoming.wait_seconds or 0.0:.1f} s the longest"
    if free_slots(view) > 0:
        return Switch(incoming.seat, None, f"slot free; {what}")
    holders = movable(view)
    if not holders:
        return blocked(view)
    times = [(_later(yields_in(holder, incoming), settles_in(holder)), holder) for holder in holders]
    due = [(wait, holder) for wait, holder in times if wait is not None]
    if not due:
        return Stay(None, f"no holder is idle; {what}")
    wait, holder = min(due, key=lambda one: (one[0], own_load(one[1]), -one[1].active_seconds, one[1].seat))
    if wait > 0:
        return Stay(wait, f"{holder.seat} keeps the group for {wait:.1f} s more; {what}")
    how = f"{holder.in_flight} in flight" if own_load(holder) else f"idle for {holder.idle_seconds:.1f} s"
    return Switch(incoming.seat, holder.seat, f"{what}; {holder.seat} {how}")


def _later(wait: float | None, settle: float) -> float | None:
    return None if wait is None else max(wait, settle)
