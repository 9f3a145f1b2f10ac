"""The KYB policies: the seat with the highest index goes next, and a busy holder closes only when that pays. Pure.

1. A free slot goes to the seat with the highest index.
   A seat of another group comes only where moving costs it no more than parking the idle holder of that group would.
2. An idle holder leaves at once when another seat has demand.
3. A busy holder admits its own arrivals until prolonging its visit by later arrivals would cost the waiting seats more
   than those later arrivals would lose by waiting for the holder's next visit.
4. Without demand, an idle holder stays if its share of the expected requests is high enough. Keep or park is the
   newsvendor's question, asked of the whole pool: staying saves an activation if the next request is the holder's own;
   if it is for a parked seat, leaving saves the park that this one would wait for, or the move to another free group.
5. A seat that has waited for ``cap_slos`` times its SLO goes next, whatever the index says, and closes a busy holder.
"""

from dataclasses import dataclass
from math import exp, inf, isfinite

from kybernate.policy.index import Bid, Urgency, bid, drain_seconds, rate, step_seconds, waiting_ages
from kybernate.policy.turns import (
    FADE_SECONDS,
    GRACE_SECONDS,
    asks,
    blocked,
    cheapest_victims,
    contenders,
    demand,
    fits,
    free_slots,
    guests,
    movable,
    own_load,
    settles_in,
)
from kybernate.policy.view import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState

_UNUSED_SECONDS = 60.0
"""How long a seat stays that was activated by an operator, and has not served since."""


@dataclass(frozen=True, slots=True)
class Kyb:
    """The rules and constants that all modes share. Seconds are model seconds."""

    min_visit_seconds: float = 2.0
    """A busy holder closes no earlier in its visit."""
    close_ratio: float = 1.2
    """It closes when the waiting that this saves exceeds so many times the waiting that it causes; 0: never."""
    length_power: float = 0.7
    """The index is urgency divided by this power of the visit's whole length."""
    cap_slos: float = 12.0
    """Beyond this many SLOs of waiting, age alone decides."""
    idle_seconds: float = 0.5
    """Without demand, an idle holder is parked no earlier."""
    keep_ratio: float = 1.0
    """Times the break-even share of requests below which an idle holder is parked; 0: it always stays."""
    guest_ratio: float = 2.0
    """A seat of another group goes before those of this one only if its index is this many times as high."""

    def urgency(self) -> Urgency:
        """Return what a waiting request counts in this mode."""
        return Urgency()

    def decide(self, view: GroupView) -> Decision:
        """Apply the rules of the module's text; the comments repeat their numbers."""
        waiting = contenders(view)
        pinned = any(seat.pinned for seat in waiting)
        candidates = (
            waiting
            if pinned
            else waiting + [one for one in guests(view) if not _better_at_home(view, one, self.guest_ratio)]
        )
        if not candidates:  # (4)
            return _without_demand(view, self.idle_seconds, self.keep_ratio)
        urgency = self.urgency()
        if free_slots(view) <= 0:
            return self._make_room(view, candidates, urgency)
        bids = [self._bid(seat, urgency, 0.0) for seat in candidates]  # (1)
        first, why = self._first(bids)
        if fits(view, first.seat):
            return Switch(first.seat.seat, None, f"slot free; {why}")
        decision = self._make_room(view, candidates, urgency)
        return decision if isinstance(decision, Switch) else self._beside(view, first, bids) or decision

    def _make_room(self, view: GroupView, candidates: list[SeatView], urgency: Urgency) -> Decision:
        """Rules 2, 3 and 5: which holder leaves, if any, as one of those whose leaving makes room."""
        holders = movable(view)
        if not holders:
            return blocked(view)
        idle = [seat for seat in holders if not own_load(seat)]
        ready = [seat for seat in idle if settles_in(seat) <= 0]
        if ready:  # (2)
            least = min(ready, key=lambda seat: (_loss(seat), seat.seat))
            first, why = self._first([self._bid(seat, urgency, least.park_seconds) for seat in candidates])
            if victims := cheapest_victims(view, first.seat, ready, _loss):
                what = "starts, and gives way" if victims[0].yields else "is idle"
                return Switch(first.seat.seat, victims[0].seat, f"{victims[0].name} {what}; {why}")
        fresh = [seat for seat in idle if seat not in ready]
        stays = [Stay(settles_in(seat), f"{seat.name} has just come", settles=True) for seat in fresh]
        busy = sorted((seat for seat in holders if own_load(seat)), key=lambda seat: (own_load(seat), seat.seat))
        for holder in busy:  # (3), (5)
            bids = [self._bid(seat, urgency, holder.park_seconds) for seat in candidates]
            first, _ = self._first(bids)
            together = [holder]
            for other in (*ready, *busy):
                if other not in together and not fits(view, first.seat, together):
                    together.append(other)
            if not fits(view, first.seat, together):
                continue
            answers = [(own_load(one), self._busy(one, bids)) for one in together if own_load(one)]
            waits = [answer for _, answer in answers if isinstance(answer, Stay)]
            if not waits:  # the busiest first: what is left closes the more easily
                return max(answers, key=lambda one: one[0])[1]
            stays += waits
        return min(stays, key=lambda stay: inf if stay.until is None else stay.until, default=Stay(None, _NO_ROOM))

    def _beside(self, view: GroupView, first: Bid, bids: list[Bid]) -> Switch | None:
        """Rule 1, while the first one waits for memory and is not beyond the cap: the best seat that fits."""
        spare = [one for one in bids if one is not first and fits(view, one.seat)]
        if not spare or first.overdue >= self.cap_slos:
            return None
        second, why = self._first(spare)
        return Switch(second.seat.seat, None, f"{first.seat.name} does not fit yet; {why}")

    def _bid(self, seat: SeatView, urgency: Urgency, park_seconds: float) -> Bid:
        return bid(seat, urgency, park_seconds, self.length_power)

    def _first(self, bids: list[Bid]) -> tuple[Bid, str]:
        """Return the next bid and why: the most overdue one beyond the cap (5), else the highest index (1)."""
        late = [one for one in bids if one.overdue >= self.cap_slos]
        if late:
            first = min(late, key=lambda one: (-one.overdue, one.seat.seat))
            return first, f"{first}; it has waited beyond the cap of {self.cap_slos * first.seat.slo_seconds:g} s"
        ranked = sorted(bids, key=lambda one: (-one.index / self._ratio(one.seat), one.seat.seat))
        second = [f"; then {one.seat.name} with {asks(one.seat)}" for one in ranked[1:2]]
        return ranked[0], "".join([str(ranked[0]), *second])

    def _ratio(self, seat: SeatView) -> float:
        """By how much its index must be higher than that of a seat that belongs here."""
        return 1.0 if seat.move_seconds is None or seat.prefers else self.guest_ratio

    def _busy(self, holder: SeatView, bids: list[Bid]) -> Stay | Switch:
        """Rules 3 and 5: whether a busy holder closes now."""
        first, why = self._first(bids)
        settle = settles_in(holder)
        if first.overdue >= self.cap_slos or first.seat.pinned:
            if settle > 0:
                return Stay(settle, f"{holder.name} has just come; then {why}", settles=True)
            return Switch(first.seat.seat, holder.seat, f"{holder.name} closes; {why}")
        overdue_in = min((self.cap_slos - one.overdue) * max(one.seat.slo_seconds, 0.001) for one in bids)
        dwell = max(self.min_visit_seconds - holder.active_seconds, settle)
        saved, caused, numbers = self._closing(holder, first, bids)
        if not self.close_ratio or saved <= self.close_ratio * caused:
            fades = FADE_SECONDS if self.close_ratio and caused > 0 else inf
            return Stay(_soon(overdue_in, fades), f"{holder.name} serves on: {numbers}; then {why}")
        if dwell > 0:
            stays = f"{holder.name} stays {dwell:.1f} s more; {numbers}; then {why}"
            return Stay(_soon(dwell, overdue_in), stays, settles=True)
        return Switch(first.seat.seat, holder.seat, f"{holder.name} closes: {numbers}; {why}")

    def _closing(self, holder: SeatView, first: Bid, bids: list[Bid]) -> tuple[float, float, str]:
        """Return (saved, caused, both as text): weighted seconds of waiting.

        Closing the holder now, rather than with one request less in flight, saves waiting for the other seats, and
        causes it for requests that arrive for the holder while it drains: they wait for its next visit.
        """
        own = max(own_load(holder), 1)
        away = drain_seconds(holder, holder.in_flight) + first.setup_seconds + first.visit_seconds
        away += first.seat.park_seconds + holder.activate_seconds
        saved = step_seconds(holder, own) * sum(one.seat.weight * one.requests for one in bids)
        caused = holder.weight * rate(holder) * holder.service_seconds / own * away
        return saved, caused, f"closing saves {saved:.1f} s of waiting and causes {caused:.1f} s"


@dataclass(frozen=True, slots=True)
class KybBalanced(Kyb):
    """Mean wait first, with ages counted: ``u(x) = 1 + age_weight·x^age_power``."""

    age_weight: float = 1.0
    age_power: float = 1.0

    def urgency(self) -> Urgency:
        """``1 + age_weight·x^age_power``."""
        return Urgency(1.0, self.age_weight, self.age_power)


@dataclass(frozen=True, slots=True)
class KybBounded(KybBalanced):
    """Bounded waits: ages count by their square, and beyond a few SLOs they alone count."""

    cap_slos: float = 4.0
    age_weight: float = 0.2
    age_power: float = 2.0


@dataclass(frozen=True, slots=True)
class KybSlo(Kyb):
    """As many requests as possible within their SLO: those that can still meet it count fully, those that have missed
    it hardly, until they are late by several SLOs.

    ``u(x) = 1 + age_weight·x²`` up to the SLO, ``lost_weight·x`` beyond, and ``late_weight·(x − late_slos)`` on top.
    """

    close_ratio: float = 1.0
    length_power: float = 0.5
    age_weight: float = 0.5
    lost_weight: float = 0.05
    late_slos: float = 5.0
    late_weight: float = 0.35
    close_wait_weight: float = 0.2
    """For closing: how many missed SLOs one SLO length of waiting counts as."""

    def urgency(self) -> Urgency:
        """The function of the class text."""
        return Urgency(1.0, self.age_weight, 2.0, 1.0, self.lost_weight, self.late_slos, self.late_weight)

    def _closing(self, holder: SeatView, first: Bid, bids: list[Bid]) -> tuple[float, float, str]:
        """Return (saved, caused, both as text) in requests that miss their SLO, not in seconds.

        Saved: waiting requests that meet their SLO if the holder closes now. Caused: expected misses among the
        holder's next requests. Waiting counts a little, so that a holder also closes for requests that have missed.
        """
        own = max(own_load(holder), 1)
        slo = max(holder.slo_seconds, 0.001)
        closed = drain_seconds(holder, holder.in_flight)
        admitting = closed + step_seconds(holder, own)
        behind = first.visit_seconds + first.seat.park_seconds  # plus its own activation, for a seat that is not first
        saved = 0.0
        for one in bids:
            late = one.setup_seconds if one is first else one.setup_seconds + behind + first.seat.activate_seconds
            slacks = ((one.seat.slo_seconds - age - late, count) for age, count in waiting_ages(one.seat))
            spared = sum(n * (_lost(slack, admitting) - _lost(slack, closed)) for slack, n in slacks if slack > 0)
            saved += one.seat.weight * spared
        away = closed / 2 + first.setup_seconds + first.visit_seconds + first.seat.park_seconds
        over = away + holder.activate_seconds - slo
        misses = min(1.0, max(0.0, 0.5 + over / max(2 * (closed + first.visit_seconds), 0.001)))
        caused = holder.weight * rate(holder) * holder.service_seconds / own * misses
        waits, wait_caused, _ = Kyb._closing(self, holder, first, bids)
        saved += self.close_wait_weight * waits / slo
        caused += self.close_wait_weight * wait_caused / slo
        return saved, caused, f"closing saves {saved:.2g} requests their SLO and costs {caused:.2g}"


_NO_ROOM = "no holder that may leave makes room"


def _loss(holder: SeatView) -> float:
    """What parking a holder costs its expected requests."""
    return rate(holder) * (holder.park_seconds + holder.activate_seconds)


def _lost(slack: float, seconds: float) -> float:
    """Probability that an exponential time with mean ``seconds`` exceeds ``slack``."""
    return exp(-slack / max(seconds, 0.001))


def _soon(*seconds: float) -> float | None:
    """The earliest of these delays, at least 0.01 s; None if all are infinite."""
    first = max(0.01, min(seconds))
    return first if isfinite(first) else None


def _without_demand(view: GroupView, idle_seconds: float, keep_ratio: float) -> Decision:
    """Rule 4: park an idle holder whose share of the expected requests is below break-even, else stay."""
    parked = [seat for seat in view.seats if seat.state is SeatState.PARKED and seat.ready]
    ready = [seat for seat in parked if fits(view, seat)]
    if len(ready) == len(parked) and free_slots(view) > 0:
        return Stay(None, "no demand; a slot is free")
    idle = [seat for seat in movable(view) if not own_load(seat)]
    outside = [seat for seat in parked if seat not in ready and fits(view, seat, idle)]
    own = sum(map(rate, outside))
    coming = own + sum(peer.rate for peer in view.peers)
    if not idle or not keep_ratio or coming <= 0:
        return Stay(None, "no demand")
    holder = min(idle, key=lambda seat: (rate(seat), seat.seat))
    share = rate(holder) / (rate(holder) + coming)
    saved = _saved_by_room(view, holder.park_seconds, own, coming) / coming
    both = saved + holder.activate_seconds
    even = keep_ratio * (saved / both if both > 0 else 0.0)  # of the next requests; above it staying pays: P / (P + R)
    numbers = f"{holder.name} gets {share:.0%} of the requests, and keeps its GPUs from {even:.0%} on"
    if share >= even:
        return Stay(FADE_SECONDS, f"no demand; {numbers}")
    stays = _unused(holder) if _unused(holder) > 0 else idle_seconds - holder.idle_seconds
    if stays > 0:
        return Stay(max(0.01, stays), f"no demand; {numbers}")
    return Park(holder.seat, f"idle for {holder.idle_seconds:.1f} s; {numbers}")


def _saved_by_room(view: GroupView, park: float, own: float, coming: float) -> float:
    """Seconds of waiting, per second, that room in this group would save parked seats with ``own`` requests per second
    here and ``coming`` in the whole pool.

    Groups that are free already are a stock that a park of ``park`` seconds refills. While it lasts, room here only
    saves the group's own seats a move. The stock is used up when more requests come within a park than it has groups:
    a Poisson number. Then room here saves any of them a park, except where an idle holder of that group leaves
    sooner than it could move here.
    """
    short = _at_least(coming * park, sum(peer.free for peer in view.peers))
    saved = own * (short * park + (1.0 - short) * min(park, view.move_seconds))
    for peer in view.peers:
        if not peer.free:
            spared = park if peer.frees_in is None else max(0.0, peer.frees_in - view.move_seconds)
            saved += short * peer.rate * spared
    return saved


def _at_least(mean: float, most: int) -> float:
    """Probability that a Poisson number with this mean is at least ``most``."""
    term, below = exp(-mean), 0.0
    for number in range(1, most + 1):
        below += term
        term *= mean / number
    return max(0.0, 1.0 - below)


def _better_at_home(view: GroupView, guest: SeatView, ratio: float) -> bool:
    """Rule 1: a seat of another group whose own group makes room for it at less cost than a move; if that has not
    begun in this time, it comes. A seat that loses its copy by the move stays: it takes a free slot, or the place of
    an idle holder, of a group that is asked ``ratio`` times less than the other seats at home, and has waited there,
    over all its visits, for as long as the move takes longer than a park and an activation at home: what it could have
    waited for in vain is then no more than what it pays. Behind a start that hangs it comes like any other, after this
    time. An operator's wish does not wait.
    """
    move, asked = guest.move_seconds or 0.0, guest.pinned or guest.wanted_seconds is not None
    longer = move - guest.park_seconds - guest.activate_seconds
    waited = guest.waited_seconds + (guest.wait_seconds or 0.0)
    room = free_slots(view) > 0 or any(not own_load(holder) for holder in movable(view))
    quieter = guest.prefers or ratio * sum(seat.rate_slow for seat in view.seats) <= guest.others_rate
    if guest.loses_copy and not asked and (waited < longer or not (guest.home_late or (room and quieter))):
        return True
    home = next((peer for peer in view.peers if peer.group == guest.group), None)
    if (
        home is None
        or guest.prefers
        or home.frees_in is None
        or (guest.wait_seconds or 0.0) > home.frees_in + GRACE_SECONDS
    ):
        return False
    return home.frees_in + home.lost_seconds / max(1, demand(guest)) < move


def _unused(holder: SeatView) -> float:
    """Seconds for which a holder activated by an operator is still kept for its first request."""
    came_for_nothing = holder.idle_seconds >= holder.active_seconds and not holder.unclaimed
    return _UNUSED_SECONDS - holder.active_seconds if came_for_nothing else 0.0
