"""Reading a view: seats with demand, holders, possible victims; and the frame of the simple policies. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from kybernate.policy.view import Decision, GroupView, SeatView, Stay, Switch
from kybernate.seat import HOLDING, SeatState
from kybernate.sizes import count

FADE_SECONDS = 15.0
"""A decision that follows from rates is renewed after this time: rates fade without any event."""
GRACE_SECONDS = 2.0
"""Grace period after an activation until the request that caused it must appear in flight."""

_MOST_COMBINED = 8
"""Holders of which every combination is tried as victims; beyond, only the cheapest ones."""

LEAVING = (SeatState.DRAINING, SeatState.PARKING)
"""States of a victim: a policy that decides while it leaves decides about the slot that becomes free."""


def contenders(view: GroupView) -> list[SeatView]:
    """Return the seats of this group with demand that are ready; only the pinned ones while any of those is."""
    waiting = [seat for seat in view.seats if seat.wait_seconds is not None and seat.ready]
    return [seat for seat in waiting if seat.pinned] or waiting


def guests(view: GroupView) -> list[SeatView]:
    """Return ready seats of other groups with demand whose own group has no slot for them, or that prefer this one."""
    asking = [seat for seat in view.elsewhere if seat.wait_seconds is not None and seat.ready]
    return [seat for seat in asking if seat.home_busy or seat.prefers]


def free_slots(view: GroupView) -> int:
    """How many more seats may hold the group; 0 or negative: a holder has to leave first."""
    return view.slots - sum(seat.state in HOLDING and seat.state not in LEAVING for seat in view.seats)


def fits(view: GroupView, seat: SeatView, without: Sequence[SeatView] = ()) -> bool:
    """True when there is a slot and memory for one more seat once these holders have left. Holders beyond the slots
    leave one by one."""
    if free_slots(view) <= 0 and not without:
        return False
    return view.free_bytes is None or view.free_bytes + sum(one.vram_bytes for one in without) >= seat.vram_bytes


def cheapest_victims(
    view: GroupView, incoming: SeatView, holders: Sequence[SeatView], loss: Callable[[SeatView], float]
) -> tuple[SeatView, ...]:
    """Return the holders with the least summed loss that make room for a seat when they leave; empty: none do."""
    ranked = sorted(holders, key=lambda seat: (loss(seat), seat.seat))
    if not fits(view, incoming, ranked):
        return ()
    if fits(view, incoming, ranked[:1]):
        return tuple(ranked[:1])
    best = list(ranked)
    for seat in reversed(ranked):
        rest = [one for one in best if one is not seat]
        best = rest if fits(view, incoming, rest) else best
    costs, near = {seat.seat: loss(seat) for seat in ranked}, ranked[:_MOST_COMBINED]
    chosen = (set_ for count in range(1, len(near) + 1) for set_ in combinations(near, count))
    found = [tuple(best), *(set_ for set_ in chosen if fits(view, incoming, set_))]
    return min(found, key=lambda set_: (sum(costs[seat.seat] for seat in set_), len(set_)))


def movable(view: GroupView) -> list[SeatView]:
    """Return the holders that a decision may name as victim."""
    return [seat for seat in view.seats if (seat.yields or seat.state is SeatState.ACTIVE) and not seat.pinned]


def own_load(seat: SeatView) -> int:
    """Unfinished requests of a holder that it can finish."""
    return 0 if seat.yields else seat.waiting + seat.in_flight


def demand(seat: SeatView) -> int:
    """Requests that wait for a seat; an operator's request and a container at the start gate count as one each."""
    return seat.waiting + (seat.wanted_seconds is not None) + (seat.state is SeatState.WAITING)


def asks(seat: SeatView) -> str:
    """What waits for a seat, for people: a command or a container at the start gate is no request."""
    if seat.waiting:
        return count(seat.waiting, "request")
    return "an operator's command" if seat.wanted_seconds is not None else "the start of its container"


def settles_in(holder: SeatView) -> float:
    """Rest of a holder's grace period; 0: it has served its first request, or the period is over."""
    if holder.unclaimed or holder.yields:
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

    A seat of another group is incoming only where no seat of this group has demand.
    ``yields_in(holder, incoming)`` is 0 or less for now and None where only an event can make the holder yield.
    """
    waiting = contenders(view) or guests(view)
    if not waiting:
        return Stay(None, "no demand")
    incoming = choose(waiting)
    what = f"{incoming.name} has {asks(incoming)} waiting, {incoming.wait_seconds or 0.0:.1f} s the longest"
    if fits(view, incoming):
        return Switch(incoming.seat, None, f"slot free; {what}")
    holders = movable(view)
    if not holders:
        return blocked(view)
    times = [(yields_in(holder, incoming), holder) for holder in holders]
    due = [(max(wait, settles_in(holder)), holder) for wait, holder in times if wait is not None]
    if not due:
        return Stay(None, f"no holder is idle; {what}")
    alone = {one.seat: fits(view, incoming, (one,)) for _, one in due}
    wait, holder = min(
        due, key=lambda one: (one[0], not alone[one[1].seat], own_load(one[1]), -one[1].active_seconds, one[1].seat)
    )
    if wait > 0:
        return Stay(wait, f"{holder.name} keeps the group for {wait:.1f} s more; {what}", settles=True)
    how = f"has {holder.in_flight} in flight" if own_load(holder) else f"is idle for {holder.idle_seconds:.1f} s"
    return Switch(incoming.seat, holder.seat, f"{what}; {holder.name} {how}")
