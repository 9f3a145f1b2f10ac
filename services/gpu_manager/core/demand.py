"""What routers report: demand, until it expires; presence and acknowledgements; and what is learned from it. Pure.

Sources count requests since they started, so a lost signal loses no request: what counts is the difference to the last
signal received. A source that counts only a window (another gateway) is trusted for each part of its
window once. Costs of parking and activating are learned where switches end (``switch``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from kybernate.messages import DrainAck, Presence, TrafficSignal
from kybernate.policy.estimators import SERVICE_WEIGHT, Arrivals, Ewma
from kybernate.seat import SeatState
from services.gpu_manager.core.inputs import ModelTime, Now, WallTime

POKE_SECONDS = 3.0
"""Wall seconds for which an ActivateSeat of a router counts as one waiting request, while its signal is on the way."""
ASSUMED_SERVICE_SECONDS = 5.0
"""Until a seat has served anything."""
MOST_AT_ONCE = 64
"""Requests of one signal that count one by one in the mean of service times; more would not change it."""
MOST_SOURCES = 4096
"""Counters that are remembered; the ones updated longest ago are dropped first."""
MOST_DURATIONS = 9
"""Durations of a phase that are remembered."""
MOST_PHASES = 4096
"""Phases of which durations are remembered; the ones that ended longest ago are dropped first."""
PHASES = {
    SeatState.DRAINING: SeatState.PARKING,
    SeatState.PARKING: SeatState.PARKED,
    SeatState.ACTIVATING: SeatState.ACTIVE,
    SeatState.MIGRATING: SeatState.ACTIVE,
    SeatState.STARTING: SeatState.ACTIVE,
    SeatState.RELEASING: SeatState.FREE,
    SeatState.LOST: SeatState.BACKOFF,
    SeatState.BACKOFF: SeatState.WAITING,
}
"""States that end by themselves, and the state that follows when all goes well."""

MOST_LEVELS = 1000
"""Sources of one seat or model at a time; further ones count when some have expired."""


# --- levels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SeatDemand:
    """The requests for one seat: those of one source, or of all."""

    in_flight: int = 0
    since: tuple[tuple[ModelTime, int], ...] = ()
    """Those that wait, oldest first: (since when, how many)."""
    cause: str = ""
    """Of the oldest of them; empty: none waits."""
    waiting: int = field(init=False)
    """How many wait."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "waiting", sum(count for _, count in self.since))

    def ages(self, now: Now) -> tuple[tuple[float, int], ...]:
        """Those that wait, oldest first: (age in model seconds, how many)."""
        return tuple((max(0.0, now.model - since), count) for since, count in self.since)

    def oldest_wait(self, now: Now) -> float:
        """Age of the oldest one that waits, model seconds."""
        return max(0.0, now.model - self.since[0][0]) if self.since else 0.0


NO_DEMAND = SeatDemand()


@dataclass(frozen=True, slots=True)
class DemandLevel:
    """The last report of one source."""

    seq: int
    demand: SeatDemand
    expires: WallTime
    poke: bool = False


_Place = tuple[str, str]
"""("seat", seat) for reports about a seat, ("model", model) for reports that name no seat."""


@dataclass
class DemandLevels:
    """All levels of a node: by place, then by (source, tier)."""

    places: dict[_Place, dict[tuple[str, str], DemandLevel]] = field(default_factory=dict)

    def update(self, signal: TrafficSignal, now: Now) -> bool:
        """Take a signal in; one that is older than its source's last one is dropped. True: its counts differ."""
        place = ("seat", signal.seat) if signal.seat is not None else ("model", signal.model)
        sources = self.places.setdefault(place, {})
        known = sources.get((signal.source, signal.tier))
        if known is not None and signal.seq < known.seq and known.expires > now.wall:
            return False
        if known is None and len(sources) >= MOST_LEVELS:
            return False
        before = NO_DEMAND if known is None else known.demand
        since = _waiting_since(signal, before, now) if signal.waiting else ()
        demand = SeatDemand(signal.in_flight, since, signal.cause if since else "")
        sources[signal.source, signal.tier] = DemandLevel(signal.seq, demand, now.wall + signal.ttl_seconds)
        return known is None or (before.waiting, before.in_flight) != (signal.waiting, signal.in_flight)

    def poke(self, source: str, seat: str, cause: str, now: Now) -> None:
        """A router asked for a seat: one request waits there until its own signal arrives, or for a moment."""
        sources = self.places.setdefault(("seat", seat), {})
        key = (f"poke/{source}", "")
        known = sources.get(key)
        since = now.model if known is None else known.demand.since[0][0]
        sources[key] = DemandLevel(0, SeatDemand(0, ((since, 1),), cause), now.wall + POKE_SECONDS, poke=True)

    def unpoke(self, seat: str) -> None:
        """The seat serves, or never will again: drop the pokes."""
        sources = self.places.get(("seat", seat), {})
        for key in [key for key, level in sources.items() if level.poke]:
            del sources[key]

    def expire(self, now: Now) -> bool:
        """Drop the levels that were not repeated in time; True if there was one."""
        dropped = False
        for place, sources in list(self.places.items()):
            for key in [key for key, level in sources.items() if level.expires <= now.wall]:
                del sources[key]
                dropped = True
            if not sources:
                del self.places[place]
        return dropped

    def next_expiry(self) -> WallTime | None:
        """When the next level expires."""
        return min((level.expires for sources in self.places.values() for level in sources.values()), default=None)

    def of(self, model: str, seat: str, *, takes_unassigned: bool) -> SeatDemand:
        """The demand for one seat; ``takes_unassigned`` adds the demand for the model that names no seat."""
        levels = [*self.places.get(("seat", seat), {}).values()]
        if takes_unassigned:
            levels += self.places.get(("model", model), {}).values()
        if len(levels) <= 1:
            return levels[0].demand if levels else NO_DEMAND
        oldest = min(
            (one.demand for one in levels if one.demand.since), key=lambda one: one.since[0][0], default=NO_DEMAND
        )
        since = sorted(waits for one in levels if not one.poke for waits in one.demand.since) or oldest.since
        return SeatDemand(sum(one.demand.in_flight for one in levels), tuple(since), oldest.cause)


def _waiting_since(signal: TrafficSignal, before: SeatDemand, now: Now) -> tuple[tuple[ModelTime, int], ...]:
    """Since when the requests of a signal wait.

    (1) A sound age histogram is used as it is. (2) One request is the oldest, which may have waited ``before``.
    (3) Otherwise the other requests are taken to wait half as long as the oldest.
    """
    ages = signal.age_histogram
    sound = all(age >= 0 and count > 0 for age, count in ages)
    if ages and sound and sum(count for _, count in ages) == signal.waiting:  # (1)
        return tuple(sorted((now.model + -age, count) for age, count in ages))
    oldest = now.model + -(signal.oldest_wait_seconds or 0.0)
    if signal.oldest_wait_seconds is None and before.since:
        oldest = before.since[0][0]
    if signal.waiting == 1:  # (2)
        return ((oldest, 1),)
    return ((oldest, 1), (oldest + (now.model - oldest) / 2, signal.waiting - 1))  # (3)


# --- presence and acknowledgements ------------------------------------------------------------------------------------

DEAD_AFTER_SECONDS = 10.0
SETTLE_SECONDS = 3.0
"""Wall seconds after a start or a return of the bus in which every router on the bus publishes its presence."""
SILENT_SECONDS = 10.0
"""Wall seconds after a drain was announced in which every router that lives acknowledges it; it repeats that each
second."""
PERMIT_SECONDS = 1.5
"""Wall seconds for which a router without NATS may forward by an answer that the manager gave it over HTTP."""


@dataclass
class Routers:
    """Present routers by instance and incarnation, and their acknowledgements by seat.

    Drained means that every router that may still forward has acknowledged that it does not. One that stops says so
    once it has ended its last call. One that fell silent proves nothing: it counts until its presence has expired, and
    by then it has stopped by its own clock. Its silence counts up to ``Now.handled``: a presence may wait in the inbox.
    One that lives and does not acknowledge is not listed until it does: no drain waits longer than for its lease.
    """

    present: dict[tuple[str, str], WallTime] = field(default_factory=dict)
    """(instance, incarnation) → when it counts as dead. Two routers with one instance name are both waited for."""
    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    """``Presence.sent`` of the last presence of each present router, since this manager started."""
    acks: dict[str, dict[tuple[str, str], DrainAck]] = field(default_factory=dict)
    """Seat → (instance, incarnation) → its last acknowledgement."""
    aside: dict[tuple[str, str], WallTime] = field(default_factory=dict)
    """Present routers that did not acknowledge a drain in time → since when they are not listed."""
    settled_at: WallTime = WallTime(0.0)
    """The list of routers may be incomplete until then."""
    permitted_until: WallTime = WallTime(0.0)
    """A router may forward by an HTTP answer until then."""

    def unsettle(self, now: Now) -> None:
        """Routers may be present that are not known yet: wait a moment before trusting the list."""
        self.settled_at = now.handled + SETTLE_SECONDS

    def settled(self, now: Now) -> bool:
        """True once every living router must have published its presence."""
        return now.handled >= self.settled_at

    def update(self, presence: Presence, now: Now) -> None:
        """A router is alive, or leaves. Its incarnation before counts until it expires: it may be another router of
        that name."""
        router = presence.instance, presence.incarnation
        if presence.leaving:
            self._drop(router)
            return
        self.present[router] = now.handled + DEAD_AFTER_SECONDS
        if presence.sent is not None:
            self.sent[router] = presence.sent

    def _drop(self, router: tuple[str, str]) -> None:
        self.present.pop(router, None)
        self.sent.pop(router, None)
        self.aside.pop(router, None)

    def counted(self) -> dict[str, float]:
        """What the manager's presence lists: no drain ends without these routers until they have been silent for
        ``DEAD_AFTER_SECONDS``."""
        return {router[1]: at for router, at in self.sent.items() if router not in self.aside}

    def set_aside(self, seat: str, epoch: int, since: WallTime) -> None:
        """List no present router that has not acknowledged (seat, epoch), until it acknowledges something. ``since``:
        no later than it was listed last."""
        for router in self.present:
            if self._ack(router, seat, epoch) is None:
                self.aside.setdefault(router, since)

    def silent(self, now: Now) -> dict[str, float]:
        """By instance: for how many seconds a router that lives has not been listed."""
        return {router[0]: now.wall - since for router, since in self.aside.items()}

    def remember(self, known: Iterable[tuple[str, str]], now: Now) -> None:
        """Routers that the previous manager knew: present until their next presence or until they expire."""
        for router in known:
            self.present.setdefault(router, now.wall + DEAD_AFTER_SECONDS)

    def pause(self, now: Now) -> None:
        """Nothing was read for a while: no router has become silent by that, and others may have come."""
        self.present = dict.fromkeys(self.present, now.handled + DEAD_AFTER_SECONDS)
        self.unsettle(now)

    def permit(self, now: Now) -> None:
        """A router got the active seats over HTTP."""
        self.permitted_until = now.wall + PERMIT_SECONDS

    def expire(self, now: Now) -> None:
        """Drop routers that fell silent."""
        for router in [router for router, dead_at in self.present.items() if dead_at <= now.handled]:
            self._drop(router)

    def acknowledge(self, ack: DrainAck) -> None:
        """Keep a router's acknowledgement of a draining seat."""
        self.acks.setdefault(ack.seat, {})[ack.instance, ack.incarnation] = ack
        self.aside.pop((ack.instance, ack.incarnation), None)

    def forget(self, seat: str) -> None:
        """The seat does not drain any more."""
        self.acks.pop(seat, None)

    def quiet(self, seat: str, epoch: int, now: Now) -> bool:
        """True when every present router has acknowledged (seat, epoch) with nothing in flight."""
        if not self.settled(now) or now.wall < self.permitted_until:
            return False
        return not self.busy(seat, epoch, now)

    def unheard(self, seat: str, epoch: int, now: Now) -> bool:
        """True while a present router has not acknowledged (seat, epoch): it may send to the seat."""
        return None in self.busy(seat, epoch, now).values()

    def busy(self, seat: str, epoch: int, now: Now) -> dict[str, int | None]:
        """The present routers for which a drain waits: how many requests each has in flight; None: not acknowledged.

        One that is not listed for ``DEAD_AFTER_SECONDS`` has no lease any more: it sends nothing without asking.
        """
        found: dict[str, int | None] = {}
        for router in self.present:
            ack, aside = self._ack(router, seat, epoch), self.aside.get(router)
            if ack is None and aside is not None and now.wall >= aside + DEAD_AFTER_SECONDS:
                continue
            if ack is None:
                found[router[0]] = None
            elif ack.in_flight:
                found[router[0]] = ack.in_flight
        return found

    def _ack(self, router: tuple[str, str], seat: str, epoch: int) -> DrainAck | None:
        ack = self.acks.get(seat, {}).get(router)
        return ack if ack is not None and ack.epoch == epoch else None


# --- learning ---------------------------------------------------------------------------------------------------------

_Key = tuple[str, str, str, str]
"""(source, model, seat or empty, tier), as the source names them."""


@dataclass(slots=True)
class LearnedSeat:
    """Arrivals and service times of one seat, while it serves one model."""

    model: str
    arrivals: Arrivals
    service: Ewma


@dataclass
class Learning:
    """All seats of a node. Times are model seconds."""

    seats: dict[str, LearnedSeat] = field(default_factory=dict)
    counters: dict[_Key, tuple[TrafficSignal, ModelTime]] = field(default_factory=dict)
    """The last signal of each source, and when it was received."""
    durations: dict[str, list[float]] = field(default_factory=dict)
    """By model, backend and phase, and by backend and phase: the last wall seconds, oldest first."""

    def usual(self, model: str, backend: str, phase: SeatState) -> float:
        """Wall seconds that a phase of a seat usually takes, else of seats with its backend; 0: nothing is known."""
        known = self.durations.get(f"{backend} {phase}")
        return self.learned(model, backend, phase) or (median(known) if known else 0.0)

    def learned(self, model: str, backend: str, phase: SeatState) -> float:
        """Wall seconds that a phase of seats with this model and backend usually takes; 0: nothing is known."""
        known = self.durations.get(f"{model} {backend} {phase}")
        return median(known) if known else 0.0

    def of(self, seat: str, model: str) -> LearnedSeat | None:
        """What is known about this seat; None: nothing about this model there."""
        known = self.seats.get(seat)
        return known if known is not None and known.model == model else None

    def update(self, signal: TrafficSignal, seat: str, now: Now) -> None:
        """Take a signal in that concerns ``seat``."""
        key = (signal.source, signal.model, signal.seat or "", signal.tier)  # its counter, wherever the requests go
        last, received = self.counters.get(key, (None, now.model))
        arrived, served, seconds = _difference(signal, last, now.model - received)
        if last is None or signal.seq >= last.seq or signal.incarnation != last.incarnation:
            self.counters[key] = signal, now.model
        learned = self.of(seat, signal.model)
        if learned is None:
            learned = self.seats[seat] = LearnedSeat(
                signal.model, Arrivals(float(now.model)), Ewma(SERVICE_WEIGHT, ASSUMED_SERVICE_SECONDS)
            )
        if arrived:
            learned.arrivals.add(float(now.model), arrived)
        for _ in range(min(served, MOST_AT_ONCE)):
            learned.service.add(seconds / served)
        if len(self.counters) > MOST_SOURCES:
            for old in sorted(self.counters, key=lambda each: self.counters[each][1])[: MOST_SOURCES // 4]:
                del self.counters[old]


def _difference(signal: TrafficSignal, last: TrafficSignal | None, after: float) -> tuple[int, int, float]:
    """(arrived, served, seconds in flight of the served ones) since the last signal of this source, ``after`` so many
    model seconds.

    (1) The first signal: its own window, since the start of its counting is unknown. (2) A source without counters:
    windows that overlap count for the new part only. (3) A restarted source, or a counter that fell: all that it has
    counted. (4) Otherwise: the differences.
    """
    if last is None:  # (1)
        return signal.arrivals, 0, 0.0
    if signal.arrived is None:  # (2)
        new = 0.0 if signal.seq < last.seq else min(1.0, after / signal.window_seconds)
        return round(signal.arrivals * new), 0, 0.0
    before = last.arrived or 0
    fell = signal.seq > last.seq and signal.arrived < before
    if fell or last.incarnation != signal.incarnation:  # (3)
        return signal.arrived, signal.served or 0, signal.served_seconds or 0.0
    served = max(0, (signal.served or 0) - (last.served or 0))  # (4)
    seconds = max(0.0, (signal.served_seconds or 0.0) - (last.served_seconds or 0.0))
    return max(0, signal.arrived - before), served, seconds
