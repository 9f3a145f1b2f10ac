"""Who waits, who holds, who may leave: what every policy here shares. Pure."""

from collections.abc import Callable, Iterable

from kybernate.policy.view import Decision, GroupView, SeatView, Stay, Switch
from kybernate.seat import HOLDING, SeatState

FADE_SECONDS = 15.0
"""How soon an answer that follows from rates is looked at again: they fade without any event."""
GRACE_SECONDS = 2.0
"""A seat that came for somebody has this long until that somebody's request must be seen in flight."""

LEAVING = (SeatState.DRAINING, SeatState.PARKING)
"""Seats of a switch that is under way: asked again meanwhile, a policy decides about the slot that they leave."""


def contenders(view: GroupView) -> list[SeatView]:
    """Seats of this group that somebody waits for; only the pinned ones while any of them waits."""
    waiting = [seat for seat in view.seats if seat.wait_seconds is not None]
    return [seat for seat in waiting if seat.pinned] or waiting


def guests(view: GroupView) -> list[SeatView]:
    """Parked seats of other groups that somebody waits for, and whose own group has no slot for them."""
    parked = (seat for seat in view.elsewhere if seat.home_busy and seat.state is SeatState.PARKED)
    return [seat for seat in parked if seat.wait_seconds is not None]


def free_slots(view: GroupView) -> int:
    """How many more seats may hold the group; negative or 0: somebody has to leave first."""
    return view.slots - sum(seat.state in HOLDING and seat.state not in LEAVING for seat in view.seats)


def movable(view: GroupView) -> list[SeatView]:
    """Holders that a decision may name as victim."""
    return [seat for seat in view.holders() if not seat.pinned]


def own_load(seat: SeatView) -> int:
    """Requests of a holder that are not finished."""
    return seat.waiting + seat.in_flight


def demand(seat: SeatView) -> int:
    """Requests that wait for a seat; an operator's wish and a container at the start gate count as one each."""
    return seat.waiting + (seat.wanted_seconds is not None) + (seat.state is SeatState.WAITING)


def settles_in(holder: SeatView) -> float:
    """Seconds that a holder which has not served yet is given until those it came for are in flight; 0: it has."""
    if holder.unclaimed:
        return 0.0
    came_for_nothing = not own_load(holder) and holder.idle_seconds >= holder.active_seconds
    if holder.waiting or came_for_nothing:
        return max(0.0, GRACE_SECONDS - holder.active_seconds)
    return 0.0


def oldest(waiting: Iterable[SeatView]) -> SeatView:
    """Whoever waits longest."""
    return min(waiting, key=lambda seat: seat.turn)


def nobody_leaves(view: GroupView) -> Stay:
    """Somebody waits and no holder may be named: only an event can change that."""
    return Stay(None, "every holder is pinned" if view.holders() else "no holder can yield now")


def take_turns(
    view: GroupView,
    choose: Callable[[list[SeatView]], SeatView],
    yields_in: Callable[[SeatView, SeatView], float | None],
) -> Decision:
    """The frame of the simple policies: who goes next, and after how many seconds a holder yields to it.

    ``yields_in(holder, next)`` is 0 or less for now and None where only an event can make the holder yield.
    """
    waiting = contenders(view)
    if not waiting:
        return Stay(None, "nobody waits")
    comer = choose(waiting)
    what = f"{comer.seat} has {demand(comer)} waiting, {comer.wait_seconds or 0.0:.1f} s the longest"
    if free_slots(view) > 0:
        return Switch(comer.seat, None, f"slot free; {what}")
    holders = movable(view)
    if not holders:
        return nobody_leaves(view)
    times = [(_later(yields_in(holder, comer), settles_in(holder)), holder) for holder in holders]
    due = [(wait, holder) for wait, holder in times if wait is not None]
    if not due:
        return Stay(None, f"no holder is idle; {what}")
    wait, holder = min(due, key=lambda one: (one[0], own_load(one[1]), -one[1].active_seconds, one[1].seat))
    if wait > 0:
        return Stay(wait, f"{holder.seat} keeps the group for {wait:.1f} s more; {what}")
    how = f"{holder.in_flight} in flight" if own_load(holder) else f"idle for {holder.idle_seconds:.1f} s"
    return Switch(comer.seat, holder.seat, f"{what}; {holder.seat} {how}")


def _later(wait: float | None, settle: float) -> float | None:
    return None if wait is None else max(wait, settle)
