"""The KYB policies: the seat with the highest index goes next, and a busy holder closes only when that pays.

1. A free slot goes to the highest index. 2. An idle holder leaves at once for somebody who waits. 3. A busy holder
admits what comes for it, until all who wait would lose more by the later arrivals that prolong its visit than those
arrivals would by waiting for its return. 4. With nobody waiting, an idle holder stays if the next request is likely
enough its own. 5. Whoever has waited for ``cap_slos`` times its SLO goes next, whatever the index says, and closes a
busy holder.
"""

from dataclasses import dataclass, replace
from math import exp, inf, isfinite

from kybernate.policy.index import Bid, Urgency, bid, drain_seconds, rate, step_seconds, waiting_ages
from kybernate.policy.quiet import nobody_waits
from kybernate.policy.turns import (
    FADE_SECONDS,
    contenders,
    free_slots,
    guests,
    movable,
    nobody_leaves,
    own_load,
    settles_in,
)
from kybernate.policy.view import Decision, GroupView, SeatView, Stay, Switch


@dataclass(frozen=True, slots=True)
class Kyb:
    """What all modes share. Seconds are model seconds."""

    min_visit_seconds: float = 2.0
    """A busy holder closes no earlier."""
    close_ratio: float = 1.2
    """It closes when the waiting that this saves exceeds so many times the waiting that it causes; 0: never."""
    length_power: float = 0.7
    """The index is urgency divided by this power of the visit's whole length."""
    cap_slos: float = 12.0
    """Beyond this many SLOs of waiting, age alone decides."""
    idle_seconds: float = 0.5
    """An idle holder is parked no earlier when nobody waits."""
    keep_ratio: float = 1.0
    """Times the break-even share of requests below which an idle holder is parked; 0: it always stays."""
    guest_ratio: float = 1.5
    """A seat of another group comes before those of this one only with an index that is so many times as high."""
    freeze_ratio: float = 0.0
    """Freeze requests in flight when the waiting saved exceeds this times their stall; 0: never. 2 is sensible."""
    prefetch: bool = False
    """Activate the likeliest seat before its request comes, where the measured share of hits pays for it."""

    def urgency(self) -> Urgency:
        """What a waiting request counts in this mode."""
        return Urgency()

    def decide(self, view: GroupView) -> Decision:
        """Rules 1 to 5 of the module's text."""
        waiting = contenders(view)
        comers = waiting if any(seat.pinned for seat in waiting) else waiting + guests(view)
        if not comers:
            return nobody_waits(view, self.idle_seconds, self.keep_ratio, self.prefetch)
        urgency = self.urgency()
        if free_slots(view) > 0:
            first, why = self._first([self._bid(seat, urgency, 0.0) for seat in comers])
            return Switch(first.seat.seat, None, f"slot free; {why}")
        holders = movable(view)
        if not holders:
            return nobody_leaves(view)
        idle = [seat for seat in holders if not own_load(seat)]
        ready = [seat for seat in idle if settles_in(seat) <= 0]
        if ready:
            victim = min(ready, key=lambda seat: (rate(seat) * (seat.park_seconds + seat.activate_seconds), seat.seat))
            first, why = self._first([self._bid(seat, urgency, victim.park_seconds) for seat in comers])
            return Switch(first.seat.seat, victim.seat, f"{victim.seat} idle; {why}")
        stays = [Stay(settles_in(seat), f"{seat.seat} has just come") for seat in idle]
        for holder in sorted(holders, key=lambda seat: (own_load(seat), seat.seat)):
            if own_load(holder):
                answer = self._busy(holder, [self._bid(seat, urgency, holder.park_seconds) for seat in comers])
                if isinstance(answer, Switch):
                    return answer
                stays.append(answer)
        return min(stays, key=lambda stay: stay.until if stay.until is not None else float("inf"))

    def _bid(self, seat: SeatView, urgency: Urgency, park_seconds: float) -> Bid:
        """Its case; a seat whose requests are frozen is beyond the cap when their stall budget is used up."""
        made = bid(seat, urgency, park_seconds, self.length_power)
        if seat.in_flight and seat.stall_budget_seconds > 0:
            stalled = (seat.oldest_wait_seconds + made.setup_seconds) / seat.stall_budget_seconds
            return replace(made, overdue=max(made.overdue, self.cap_slos * stalled))
        return made

    def _first(self, bids: list[Bid]) -> tuple[Bid, str]:
        """Who goes next: the most overdue of those beyond the cap, else the highest index."""
        late = [one for one in bids if one.overdue >= self.cap_slos]
        if late:
            first = min(late, key=lambda one: (-one.overdue, one.seat.seat))
            return first, f"{first} is beyond the cap of {self.cap_slos:g} SLO"
        ranked = sorted(bids, key=lambda one: (-one.index / (self.guest_ratio if one.guest else 1.0), one.seat.seat))
        return ranked[0], " > ".join(str(one) for one in ranked[:2])

    def _busy(self, holder: SeatView, bids: list[Bid]) -> Stay | Switch:
        """Rule 3 and the cap: whether a holder with requests of its own closes now."""
        first, why = self._first(bids)
        settle = settles_in(holder)
        if first.overdue >= self.cap_slos or first.seat.pinned:
            if settle > 0:
                return Stay(settle, f"{holder.seat} has just come; {why}")
            return Switch(first.seat.seat, holder.seat, f"{holder.seat} closes; {why}")
        overdue_in = min((self.cap_slos - one.overdue) * _cap_unit(one.seat, self.cap_slos) for one in bids)
        dwell = max(self.min_visit_seconds - holder.active_seconds, settle)
        if self._freezes(holder, first, bids):
            if dwell <= 0:
                return Switch(first.seat.seat, holder.seat, f"{holder.seat} frozen; {why}", "freeze")
            return Stay(_soon(dwell, overdue_in), f"{holder.seat} is frozen in {dwell:.1f} s; {why}")
        saved, caused, numbers = self._closing(holder, first, bids)
        if not self.close_ratio or saved <= self.close_ratio * caused:
            fades = FADE_SECONDS if self.close_ratio and caused > 0 else inf
            return Stay(_soon(overdue_in, fades), f"{holder.seat} admits: {numbers}; {why}")
        if dwell > 0:
            return Stay(_soon(dwell, overdue_in), f"{holder.seat} stays {dwell:.1f} s more; {numbers}; {why}")
        return Switch(first.seat.seat, holder.seat, f"{holder.seat} closes: {numbers}; {why}")

    def _closing(self, holder: SeatView, first: Bid, bids: list[Bid]) -> tuple[float, float, str]:
        """Weighted seconds of waiting that closing a holder now, rather than with one request less in flight, saves
        the others, and causes those who come for it while it drains: they wait until it is back.
        """
        own = max(own_load(holder), 1)
        away = drain_seconds(holder, holder.in_flight) + first.setup_seconds + first.visit_seconds
        away += first.seat.park_seconds + holder.activate_seconds
        saved = step_seconds(holder, own) * sum(one.seat.weight * one.requests for one in bids)
        caused = holder.weight * rate(holder) * holder.service_seconds / own * away
        return saved, caused, f"closing saves {saved:.1f} s of waiting and causes {caused:.1f} s"

    def _freezes(self, holder: SeatView, first: Bid, bids: list[Bid]) -> bool:
        """Whether freezing what is in flight ends more waiting than it stalls, within the seat's stall budget."""
        if not self.freeze_ratio or not holder.in_flight or holder.waiting:
            return False
        away = sum(one.setup_seconds + one.visit_seconds for one in bids)
        away += first.seat.park_seconds + holder.activate_seconds
        waiting = sum(one.requests for one in bids)
        saved = waiting * drain_seconds(holder, holder.in_flight)
        return away <= holder.stall_budget_seconds and saved > self.freeze_ratio * holder.in_flight * away


@dataclass(frozen=True, slots=True)
class KybBalanced(Kyb):
    """Mean wait first, with ages counted: ``u(x) = 1 + age_weight·x^age_power``."""

    age_weight: float = 0.4
    age_power: float = 1.0

    def urgency(self) -> Urgency:
        """``1 + age_weight·x^age_power``."""
        return Urgency(1.0, self.age_weight, self.age_power)


@dataclass(frozen=True, slots=True)
class KybBounded(Kyb):
    """Nobody waits very long: ages count by their square, and beyond a few SLOs they alone count."""

    cap_slos: float = 4.0
    age_weight: float = 0.2
    age_power: float = 2.0

    def urgency(self) -> Urgency:
        """``1 + age_weight·x^age_power``."""
        return Urgency(1.0, self.age_weight, self.age_power)


@dataclass(frozen=True, slots=True)
class KybSlo(Kyb):
    """As many as possible within their SLO: who can be saved counts, who is lost hardly, until that gets late.

    ``u(x) = 1 + age_weight·x²`` up to the SLO, ``lost_weight·x`` beyond, and ``late_weight·(x − late_slos)`` on top.
    """

    close_ratio: float = 1.0
    length_power: float = 0.5
    age_weight: float = 0.5
    lost_weight: float = 0.05
    late_slos: float = 5.0
    late_weight: float = 0.35
    close_wait_weight: float = 0.2
    """What an SLO's length of waiting counts for closing, in requests that miss their SLO."""

    def urgency(self) -> Urgency:
        """The class text's function."""
        return Urgency(1.0, self.age_weight, 2.0, 1.0, self.lost_weight, self.late_slos, self.late_weight)

    def _closing(self, holder: SeatView, first: Bid, bids: list[Bid]) -> tuple[float, float, str]:
        """Requests that miss their SLO, not seconds: those that closing now is expected to save, and those that it
        costs among the holder's next ones. Waiting counts a little, so that it closes for those who are lost, too.
        """
        own = max(own_load(holder), 1)
        slo = max(holder.slo_seconds, 0.001)
        closed = drain_seconds(holder, holder.in_flight)
        admitting = closed + step_seconds(holder, own)
        behind = first.visit_seconds + first.seat.park_seconds  # and its own activation: whoever is not first
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


def _lost(slack: float, seconds: float) -> float:
    """How likely a holder that is expected to be left after ``seconds`` is left later than ``slack``: exponential."""
    return exp(-slack / max(seconds, 0.001))


def _cap_unit(seat: SeatView, cap_slos: float) -> float:
    """Seconds in which ``Bid.overdue`` of a waiting seat grows by 1."""
    unit = max(seat.slo_seconds, 0.001)
    if seat.in_flight and seat.stall_budget_seconds > 0:
        return min(unit, seat.stall_budget_seconds / cap_slos)
    return unit


def _soon(*seconds: float) -> float | None:
    """The first of these moments; None: never, as with a cap of infinity."""
    first = max(0.01, min(seconds))
    return first if isfinite(first) else None
