"""Nobody waits: does an idle holder stay, and does a free slot get a seat before anybody asks? Pure.

Keep or park is the newsvendor's question: staying saves an activation if the next request is the holder's own, and
costs a park on the way of that request if it is not.
"""

from kybernate.policy.index import rate
from kybernate.policy.turns import FADE_SECONDS, LEAVING, free_slots, movable, own_load
from kybernate.policy.view import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState

_UNUSED_SECONDS = 60.0
"""How long a seat stays that came for a wish or a guess and has not served anything since."""


def nobody_waits(view: GroupView, idle_seconds: float, keep_ratio: float, prefetch: bool) -> Decision:
    """Rule 4: park an idle holder whose share of the expected requests is below break-even, else stay."""
    parked = [seat for seat in view.seats if seat.state is SeatState.PARKED]
    coming = sum(rate(seat) for seat in parked)
    if coming <= 0:
        return Stay(None, "nobody waits")
    if free_slots(view) > 0:
        return _ahead(view, parked, keep_ratio) if prefetch else Stay(None, "nobody waits; a slot is free")
    activate = sum(rate(seat) * seat.activate_seconds for seat in parked) / coming
    idle = [seat for seat in movable(view) if not own_load(seat)]
    if not idle or not keep_ratio:
        return Stay(None, "nobody waits")
    holder = min(idle, key=lambda seat: (rate(seat), seat.seat))
    share = rate(holder) / (rate(holder) + coming)
    even = keep_ratio * _break_even(holder.park_seconds, activate)
    numbers = f"{holder.seat} gets {share:.0%} of the requests, break-even {even:.0%}"
    if share >= even:
        return Stay(FADE_SECONDS, f"nobody waits; {numbers}")
    stays = _unused(holder) if _unused(holder) > 0 else idle_seconds - holder.idle_seconds
    if stays > 0:
        return Stay(max(0.01, stays), f"nobody waits; {numbers}")
    return Park(holder.seat, f"idle for {holder.idle_seconds:.1f} s; {numbers}")


def _unused(holder: SeatView) -> float:
    """Seconds for which a holder that an operator or a guess brought is still kept for its first request."""
    came_for_nothing = holder.idle_seconds >= holder.active_seconds and not holder.unclaimed
    return _UNUSED_SECONDS - holder.active_seconds if came_for_nothing else 0.0


def _ahead(view: GroupView, parked: list[SeatView], keep_ratio: float) -> Decision:
    """Activate the likeliest seat if guesses hit often enough to pay, and if it would not be parked again at once.

    A seat that is being parked while this is asked counts as one that may be next, but does not come back from there.
    """
    guess = max(parked, key=lambda seat: (rate(seat), seat.seat))
    others = [seat for seat in view.seats if seat is not guess and (seat in parked or seat.state in LEAVING)]
    their_rate = sum(map(rate, others))
    activate = sum(rate(seat) * seat.activate_seconds for seat in others)
    next_activate = activate / their_rate if their_rate > 0 else guess.activate_seconds
    share, hits = rate(guess) / (rate(guess) + their_rate), view.hit_share or 0.0
    even = max(1.0, keep_ratio) * _break_even(guess.park_seconds, min(guess.activate_seconds, next_activate))
    numbers = f"{guess.seat} comes next with {share:.0%}, guesses hit {hits:.0%}, break-even {even:.0%}"
    if min(share, hits) <= even or even <= 0:
        return Stay(FADE_SECONDS, f"nobody waits; {numbers}")
    return Switch(guess.seat, None, f"ahead of its request: {numbers}")


def _break_even(park: float, activate: float) -> float:
    """The share of the next requests above which staying pays: P / (P + R)."""
    return park / (park + activate) if park + activate > 0 else 0.0
