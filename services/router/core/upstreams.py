"""The seats that a router knows, the models they serve, and which seat a call goes to. Pure.

Reports about a seat are ordered by epoch, and within one epoch by ``seq``, which the seat's manager increments with
every report. A complete reading of the roster overrides the order within an epoch.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from kybernate.messages import SeatActivated, SeatAllocated, SeatEvent
from kybernate.roster import MOST_NAMES, SeatRecord, after_event, seat_key, some
from kybernate.seat import SeatState
from services.router.core.capacity import Capacity
from services.router.core.step import Kind

_S = SeatState

CLOSING = frozenset({_S.DRAINING, _S.PARKING})
"""The seat gets no new calls, and its manager waits for drain acknowledgements."""
ACTIVATABLE = frozenset({_S.WAITING, _S.DRAINING, _S.PARKING, _S.PARKED, _S.BACKOFF, _S.LOST})
"""The seat is not on its way to active: calls that wait there make the router request its activation."""
EVICTED = frozenset({_S.PARKING, _S.PARKED, _S.LOST})
"""Calls in flight cannot finish."""


MOST_LOOKED_AT = 1000
"""Models that are looked at for it: thousands of requests for unknown models cost little."""


LEAST_SHARED = 4
"""Places of a seat that one of is kept: of fewer it would be a third or more."""


class Rank(IntEnum):
    """How good a seat is for a call now; lower is better."""

    OPEN = 0  # forward
    FULL = 1  # active, but as many requests are in flight as its engine serves at once: wait for a place
    UNCONFIRMED = 2  # last known as active, but the knowledge is stale: query its manager first
    ACTIVATING = 3
    PARKED = 4
    STARTING = 5  # a cold start takes longer than an activation
    BUSY = 6  # draining, or its engine has just refused a connection
    DOWN = 7  # its engine does not run
    REFUSED = 8  # its manager refuses to activate it, or its engine fails again and again
    UNUSABLE = 9


_RANK_OF_STATE = {
    _S.ACTIVE: Rank.OPEN,
    _S.ACTIVATING: Rank.ACTIVATING,
    _S.MIGRATING: Rank.ACTIVATING,
    _S.PARKED: Rank.PARKED,
    _S.STARTING: Rank.STARTING,
    _S.DRAINING: Rank.BUSY,
    _S.PARKING: Rank.BUSY,
    _S.WAITING: Rank.DOWN,
    _S.BACKOFF: Rank.DOWN,
    _S.LOST: Rank.DOWN,
    _S.QUARANTINED: Rank.REFUSED,
    _S.FREE: Rank.UNUSABLE,
    _S.RELEASING: Rank.UNUSABLE,
}


@dataclass(slots=True, eq=False)
class RoutedCall:
    """One call from its arrival to its end."""

    request: int
    model: str
    cause: str
    kind: Kind
    arrived: float
    deadline: float
    gives_up: float = inf
    """When its caller stops waiting for an answer, if it says."""
    patience: str = ""
    """How long that is, and what of the caller says so."""
    priority: int = 0
    tenant: str = ""
    """Empty where no other tenant could call."""
    turn: int = 0
    """In the queue of its model; given when it is held for the first time."""
    upstream: "Upstream | None" = None
    """The seat where it waits or runs; None: its model has no usable seat at present."""
    held: bool = False
    sent: float = 0.0
    """When it was last forwarded."""
    found: int = 0
    """Requests in flight at its seat then, with itself."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Among waiting calls, the lowest is forwarded first."""
        return -self.priority, self.turn, self.request


@dataclass(slots=True)
class CallCounts:
    """Calls to one seat since it serves its model."""

    arrivals: int = 0
    served: int = 0
    served_seconds: float = 0.0
    """Wall seconds in flight of the served calls."""
    last_cause: str = "router"


@dataclass(slots=True)
class ActivationRequest:
    """The ActivateSeat command that the calls waiting at one seat need."""

    sent_at: float | None = None
    """When it was last sent for the calls that wait now; None while none wait."""
    interval: float = 0.0
    """Seconds from then until it may be sent again."""
    refusal: str | None = None
    """Why the manager does not activate the seat; None: it has not refused."""


@dataclass(slots=True, eq=False)
class Upstream:
    """One seat as this router sees it, with the router's own calls there."""

    record: SeatRecord
    cause: str = "roster"
    key: str = ""
    """Key of the seat in the roster."""
    model: str = ""
    """The model that it is assigned to; empty while no pod owns the seat."""
    waiting: dict[int, RoutedCall] = field(default_factory=dict)
    in_flight: dict[int, RoutedCall] = field(default_factory=dict)
    permits: int = 0
    """Of those in flight."""
    capacity: Capacity = field(default_factory=Capacity)
    counts: CallCounts = field(default_factory=CallCounts)
    activation_request: ActivationRequest = field(default_factory=ActivationRequest)
    suspect_until: float = 0.0
    unseen: bool = False
    """The roster has no row for it, so what is known here may be stale."""
    doubted: float = inf
    """When its row was first older than what is known; inf: it is not, or something newer has come since."""
    doubted_url: str = ""
    """Address of the manager that wrote the last row of a lower epoch: its pod may have moved."""
    counted: bool = False
    """Its manager counts a row of it."""
    activation: SeatActivated | None = None
    """The last one received."""
    weight: int = 0
    """Rendezvous hash of model and seat; the same in every router."""

    def __post_init__(self) -> None:
        self.key = self.record.key

    @property
    def manager_url(self) -> str:
        """Where its manager is asked."""
        return (self.doubted_url if self.doubted < inf else "") or self.record.manager_url

    @property
    def limit(self) -> int:
        """Most requests in flight: what its pod declares, else what was learned."""
        return self.record.max_requests or self.capacity.limit

    @property
    def full(self) -> bool:
        """True if it is active and its places are taken, but for the kept one."""
        return self.record.state is _S.ACTIVE and self._taken >= self.limit - self.kept

    @property
    def kept(self) -> int:
        """1 where the last place is kept for tenants that have no request there, as each wait is bounded by the end of
        any request; 0 where no tenants share the seat, or few places."""
        first = next(iter(self.in_flight.values()), None)
        return int(first is not None and first.tenant != "" and self.limit >= LEAST_SHARED)

    @property
    def kept_from(self) -> Set[str] | None:
        """If it is full but for the kept place: the tenants that may not take that one."""
        return self.tenants if self.full and self._taken < self.limit else None

    @property
    def tenants(self) -> Set[str]:
        """Those of the requests in flight."""
        return {one.tenant for one in self.in_flight.values()}

    @property
    def _taken(self) -> int:
        """Places that are taken: permits, used or not, take at most a quarter of all."""
        return len(self.in_flight) - max(0, self.permits - max(1, self.limit // 4))

    def place_seconds(self, now: float, more: int = 1) -> float | None:
        """Return the wall seconds until ``more`` requests beyond those in flight have a place; None: not known."""
        rate = self.capacity.rate(now)
        return None if rate is None else max(0, self._taken - self.limit + more) / rate

    def rank(self, now: float, sure: bool) -> Rank:
        """Return how good the seat is now; ``sure``: knowledge about its node is fresh (Trust.sure)."""
        state = self.record.state
        if state is _S.ACTIVE:
            if now < self.suspect_until:
                return Rank.BUSY
            if self.record.endpoint is None:
                return Rank.ACTIVATING
            if not sure or self.unseen:
                return Rank.UNCONFIRMED
            return Rank.FULL if self.full else Rank.OPEN
        if self.activation_request.refusal is not None or self.record.failed_until:
            return Rank.REFUSED
        if state is _S.PARKED and self.record.cold:
            return Rank.DOWN
        return _RANK_OF_STATE[state]

    def apply_record(self, record: SeatRecord, *, complete: bool = False, asked: float = -inf) -> bool:
        """Apply a row of the roster; return whether its state, epoch, endpoint, model or drain changed, or it was
        unseen.

        ``complete``: the row belongs to a complete reading of the roster, where only a lower epoch is out of date.
        ``asked``: when its manager was asked for it. If what is known here was in doubt before, the manager does not
        know of it: it lost its ledger since, and began at lower epochs.
        """
        mine = self.record
        older = record.epoch < mine.epoch or ((record.epoch, record.seq) < (mine.epoch, mine.seq) and not complete)
        if older and asked <= self.doubted:
            return False
        if record.epoch > mine.epoch:
            self.cause = f"roster:{record.key}:{record.epoch}"
        return self._replace(record)

    def apply_event(self, event: SeatEvent) -> bool:
        """Apply an event; return whether the seat's state, epoch, endpoint or model changed, or it was unseen."""
        if isinstance(event, SeatActivated) and event.epoch >= self.record.epoch:
            self.activation = event
        if (event.epoch, event.seq) < (self.record.epoch, self.record.seq):
            return False
        self.cause = event.cause
        return self._replace(after_event(self.record, event))

    def _replace(self, new: SeatRecord) -> bool:
        old, self.record = self.record, new
        changed = (old.state, old.epoch, old.endpoint, old.model) != (new.state, new.epoch, new.endpoint, new.model)
        changed = changed or old.drained != new.drained  # a refusal for a drain ends with it
        changed = changed or (old.failed_until, old.cold) != (new.failed_until, new.cold)
        if changed:
            self.suspect_until = 0.0
            self.activation_request.refusal = None
        unseen, self.unseen, self.doubted = self.unseen, False, inf
        return changed or unseen


def _upstream_of(report: SeatEvent | SeatRecord) -> Upstream | None:
    """Return a seat of which only this is known; None if an event names no model or the seat is unusable."""
    if isinstance(report, SeatRecord):
        return Upstream(report, f"roster:{report.key}:{report.epoch}")
    if not report.model or _RANK_OF_STATE[report.state] is Rank.UNUSABLE:
        return None
    upstream = Upstream(SeatRecord(node=report.node, seat=report.seat, state=report.state, reported_at=report.at))
    upstream.apply_event(report)
    return upstream


# --- which seat a call goes to ----------------------------------------------------------------------------------------

Found = tuple[Rank, Upstream] | None
"""The best seat of a model and its rank; None: the model has no usable seat."""


def best(ranked: Iterable[tuple[Rank, Upstream]], present: Upstream | None) -> Found:
    """Choose a seat for a call: open ones by fewest in flight, others by rendezvous hash, so that routers agree.

    A call that waits stays at its ``present`` seat unless another one has a better rank.
    """
    found: Found = None
    for rank, upstream in ranked:
        if rank is Rank.UNUSABLE:
            continue
        if found is None or rank < found[0] or (rank == found[0] and _better(rank, upstream, found[1], present)):
            found = (rank, upstream)
    return found


def _better(rank: Rank, upstream: Upstream, than: Upstream, present: Upstream | None) -> bool:
    if rank is Rank.OPEN:
        return (len(upstream.in_flight), -upstream.weight) < (len(than.in_flight), -than.weight)
    if present is upstream or present is than:
        return present is upstream
    return upstream.weight > than.weight


# --- all seats --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Model:
    """The seats of one model, and the calls that wait for it."""

    name: str
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    held: dict[int, RoutedCall] = field(default_factory=dict)
    orphans: dict[int, RoutedCall] = field(default_factory=dict)
    """The part of ``held`` that waits at no seat, because none is usable at present."""
    expected: bool = False
    """It has lost its last seat a short time ago, and its pod may be made anew."""
    wake: RoutedCall | None = None
    """The part of ``held`` that is no request: the pending wake of all callers."""
    waiting: dict[int, Counter[str]] = field(default_factory=dict)
    """Of the held calls without the wake: how many by priority, then by tenant."""
    _turns: dict[tuple[int, str], int] = field(default_factory=dict)
    """By priority and tenant: the last turn given, while one of its calls waits."""
    _turn: dict[int, int] = field(default_factory=dict)
    """By priority: the highest turn that was forwarded."""
    _queue: list[tuple[int, int, int]] = field(default_factory=list)
    """A heap with the order of every held call; calls that are held no more stay until they would be the first."""

    def add(self, call: RoutedCall) -> None:
        """Add a call to those that are held: its turn comes after its tenant's others, and after one of each other."""
        lane = call.priority, call.tenant
        if not call.turn:
            call.turn = max(self._turns.get(lane, 0), self._turn.get(call.priority, 0)) + 1
            self._turns[lane] = call.turn
        self.held[call.request] = call
        heappush(self._queue, call.order)
        if call.kind == "wake":
            self.wake = call
        else:
            self.waiting.setdefault(call.priority, Counter())[call.tenant] += 1

    def served(self, call: RoutedCall) -> None:
        """A held call is forwarded: no tenant that comes now gets an earlier turn."""
        self._turn[call.priority] = max(call.turn, self._turn.get(call.priority, 0))

    def remove(self, call: RoutedCall) -> None:
        """Remove a call from those that are held."""
        del self.held[call.request]
        if self.wake is call:
            self.wake = None
        else:
            tenants = self.waiting[call.priority]
            tenants[call.tenant] -= 1
            if not tenants[call.tenant]:
                del tenants[call.tenant]
                self._turns.pop((call.priority, call.tenant), None)
            if not tenants:
                del self.waiting[call.priority]
        if len(self._queue) > 2 * len(self.held) + 100:
            self._queue = sorted(call.order for call in self.held.values())

    def first(self) -> RoutedCall:
        """Return the held call that is forwarded first."""
        while self._queue[0][-1] not in self.held:
            heappop(self._queue)
        return self.held[self._queue[0][-1]]

    def first_of_others(self, than: Set[str]) -> RoutedCall | None:
        """Return the held call that is forwarded first but for those of some tenants."""
        if all(tenants.keys() <= than for tenants in self.waiting.values()):
            return None  # as mostly: no look at each call
        return min((call for call in self.held.values() if call.tenant not in than), key=lambda call: call.order)

    def last(self, priority: int, tenant: str | None = None) -> RoutedCall:
        """Return the held call of this priority, and tenant, that is forwarded last."""
        calls = (call for call in self.held.values() if call is not self.wake and call.priority == priority)
        return max((call for call in calls if tenant in (None, call.tenant)), key=lambda call: call.order)

    def tenants(self, priority: int) -> Set[str]:
        """Return the tenants of the calls that wait with this priority."""
        return self.waiting.get(priority, Counter[str]()).keys()

    def ahead(self, priority: int, tenant: str) -> int:
        """Return how many of the calls that wait are forwarded before a new one: all with a higher priority, and of
        those with the same one its tenant's, and as many of each other tenant."""
        tenants = self.waiting.get(priority, Counter[str]())
        mine = tenants[tenant]
        others = sum(min(count, mine + 1) for name, count in tenants.items() if name != tenant)
        return mine + others + sum(of.total() for level, of in self.waiting.items() if level > priority)


class Change(NamedTuple):
    """A seat whose state, epoch, endpoint or model changed, or whose row appeared again."""

    upstream: Upstream
    before: SeatRecord | None
    """Its row before; None: it was unknown."""
    left: str
    """The model that it no longer serves; empty: none."""

    @property
    def opened(self) -> bool:
        """True if it became active."""
        was = self.before is not None and self.before.state is SeatState.ACTIVE
        return self.upstream.record.state is SeatState.ACTIVE and not was

    @property
    def closed(self) -> bool:
        """True if it began to close. That the park begins is no news: the drain of this epoch was acknowledged."""
        was, now = self.before, self.upstream.record
        return now.state in CLOSING and not (was is not None and was.state in CLOSING and was.epoch == now.epoch)

    @property
    def moved(self) -> bool:
        """True if open connections to it must be closed: the endpoint changed, or the seat is not active."""
        record = self.upstream.record
        return self.before is not None and (
            self.before.endpoint != record.endpoint or record.state is not SeatState.ACTIVE
        )


class UpstreamTable:
    """Upstreams by key of the roster, each in its model; models by name, while they have seats or held calls or are
    expected."""

    def __init__(self) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self.models: dict[str, Model] = {}
        self.rows: Counter[str] = Counter()
        """Rows by node, as its manager counts them."""
        self.seqs: dict[str, int] = {}
        """By node, the highest ``seq`` that was received."""
        self.version = 0
        """Grows with every report and every seat that goes."""
        self.closing: dict[str, Upstream] = {}
        """Those whose seat drains or parks, by key."""

    def model(self, name: str) -> Model:
        """Return the model of this name; a new one is known once it has a seat, or a call that waits."""
        return self.models.get(name) or Model(name)

    def forget_empty(self, model: Model) -> None:
        """Forget the model if nothing keeps it."""
        if not (model.upstreams or model.held or model.expected):
            self.models.pop(model.name, None)

    def records_of(self, model: str, seat: str | None = None) -> list[SeatRecord]:
        """Return the rows of a model's seats, or of those with this name."""
        known = self.models.get(model)
        records = [upstream.record for upstream in known.upstreams.values()] if known is not None else []
        return [record for record in records if seat in (None, record.seat)]

    def apply(self, report: SeatEvent | SeatRecord, *, complete: bool = False, asked: float = -inf) -> Change | None:
        """Apply an event or a row of the roster; None if nothing changed. ``complete``, ``asked``: of a row, as in
        ``Upstream.apply_record``."""
        if isinstance(report, SeatAllocated):
            return None  # published by the plugin as a hint for the manager, which alone knows the seat's state
        self.version += 1
        self.seqs[report.node] = max(report.seq, self.seqs.get(report.node, 0))
        upstream = self.upstreams.get(seat_key(report.node, report.seat))
        if upstream is None:
            upstream = _upstream_of(report)
            return None if upstream is None else self._change(upstream, None)
        before = upstream.record
        if isinstance(report, SeatRecord):
            changed = upstream.apply_record(report, complete=complete, asked=asked)
        else:
            changed = upstream.apply_event(report)
        return self._change(upstream, before) if changed else None

    def drop(self, upstream: Upstream) -> Change:
        """Remove a seat that does not exist any more."""
        self.version += 1
        before = upstream.record
        upstream.record = before.model_copy(update={"state": SeatState.FREE})
        change = self._change(upstream, before)
        del self.upstreams[upstream.key]
        return change

    def retry_after(self, model: str, now: float, speed: float) -> float:
        """Return the wall seconds until a request of this model has a chance, at least 1.

        An active seat: until those that wait now are forwarded; else the learned time of an activation.
        """
        known = self.models.get(model)
        seats = known.upstreams.values() if known else ()
        waiting = len(known.held) if known else 0
        queues = [seat.place_seconds(now, waiting + 1) for seat in seats if seat.record.state is SeatState.ACTIVE]
        learned = [seat.record.activate_seconds / speed for seat in seats if seat.record.activate_seconds > 0]
        return max(1.0, min([seconds for seconds in queues if seconds is not None] or learned, default=1.0))

    def known_models(self, sees: Callable[[str], bool] = lambda _: True) -> str:
        """Return names of models that a caller ``sees`` as text for error messages."""
        looked_at = islice(self.models.items(), MOST_LOOKED_AT)
        names = sorted(name for name, model in looked_at if model.upstreams and sees(name))
        if len(self.models) <= MOST_LOOKED_AT:
            return some(names)
        return f"{', '.join(names[:MOST_NAMES])} and more: GET /v1/models" if names else "see GET /v1/models"

    def _change(self, upstream: Upstream, before: SeatRecord | None) -> Change:
        self.upstreams[upstream.key] = upstream
        counted = upstream.record.state is not SeatState.FREE or bool(upstream.record.drained)
        self.rows[upstream.record.node] += counted - upstream.counted
        upstream.counted = counted
        if upstream.record.state in CLOSING:
            self.closing[upstream.key] = upstream
        else:
            self.closing.pop(upstream.key, None)
        old, new = upstream.model, "" if upstream.record.state is SeatState.FREE else upstream.record.model
        if old == new:
            return Change(upstream, before, "")
        if old in self.models:
            left = self.models[old]
            del left.upstreams[upstream.key]
            left.expected = not left.upstreams
        upstream.model, upstream.counts = new, CallCounts()
        name = f"{new}|{upstream.record.seat}".encode()
        upstream.weight = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        if new:
            model = self.models[new] = self.model(new)
            model.upstreams[upstream.key] = upstream
        return Change(upstream, before, old)
