"""The seats that a router knows, the models they serve, and which seat a call goes to. Pure.

Reports about a seat are ordered by epoch, and within one epoch by ``seq``, which the seat's manager increments with
every report. A complete reading of the roster overrides the order within an epoch.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kybernate.messages import SeatActivated, SeatAllocated, SeatEvent, SeatFreed, SeatPinned, SeatUnpinned
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import SeatState
from services.router.core.step import Kind

_S = SeatState

CLOSING = frozenset({_S.DRAINING, _S.PARKING})
"""The seat gets no new calls, and its manager waits for drain acknowledgements."""
ACTIVATABLE = frozenset({_S.WAITING, _S.DRAINING, _S.PARKING, _S.PARKED, _S.BACKOFF, _S.LOST})
"""The seat is not on its way to active: calls that wait there make the router request its activation."""
EVICTED = frozenset({_S.PARKING, _S.PARKED, _S.LOST})
"""Calls in flight cannot finish."""
FREEZING = frozenset({_S.PARKING, _S.PARKED})
"""Calls in flight may be frozen with the seat instead of being cut, if its manager grants a stall budget."""


class Rank(IntEnum):
    """How good a seat is for a call now; lower is better."""

    OPEN = 0  # forward
    UNCONFIRMED = 1  # last known as active, but the knowledge is stale: query its manager first
    ACTIVATING = 2
    PARKED = 3
    STARTING = 4  # a cold start takes longer than an activation
    BUSY = 5  # draining, or its engine has just refused a connection
    DOWN = 6  # its container is not running
    REFUSED = 7  # its manager refuses to activate it
    UNUSABLE = 8


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
    size: int
    kind: Kind
    arrived: float
    deadline: float
    upstream: "Upstream | None" = None
    """The seat where it waits or runs; None: its model has no usable seat at present."""
    held: bool = False
    sent: float = 0.0
    """When it was last forwarded."""


@dataclass(slots=True)
class CallCounts:
    """Calls to one seat since the router started."""

    arrivals: int = 0
    served: int = 0
    served_seconds: float = 0.0
    """Wall seconds in flight of the served calls, without those in which they were frozen."""
    last_cause: str = "router"


@dataclass(slots=True)
class ActivationRequest:
    """The ActivateSeat command that the calls waiting at one seat need."""

    sent_at: float | None = None
    """When it was last sent for the calls that wait now."""
    answered: bool = False
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
    counts: CallCounts = field(default_factory=CallCounts)
    activation_request: ActivationRequest = field(default_factory=ActivationRequest)
    frozen_since: float | None = None
    """Set while its calls in flight are frozen with the seat."""
    suspect_until: float = 0.0
    unseen: bool = False
    """The roster has no row for it, so what is known here may be stale."""
    activation: SeatActivated | None = None
    """The last one received."""
    weight: int = 0
    """Rendezvous hash of model and seat; the same in every router."""

    def __post_init__(self) -> None:
        self.key = self.record.key

    def assign(self, model: str) -> None:
        """Assign the seat to this model (empty: to none)."""
        self.model = model
        self.weight = int.from_bytes(hashlib.blake2b(f"{model}|{self.record.seat}".encode(), digest_size=8).digest())

    def rank(self, now: float, sure: bool) -> Rank:
        """Return how good the seat is now; ``sure``: knowledge about its node is fresh (Trust.sure)."""
        state = self.record.state
        if state is _S.ACTIVE:
            if now < self.suspect_until:
                return Rank.BUSY
            if self.record.endpoint is None:
                return Rank.ACTIVATING
            return Rank.OPEN if sure and not self.unseen else Rank.UNCONFIRMED
        if self.activation_request.refusal is not None:
            return Rank.REFUSED
        return _RANK_OF_STATE[state]

    def apply_record(self, record: SeatRecord, *, complete: bool = False) -> bool:
        """Apply a row of the roster; return whether its state, epoch, endpoint or model changed, or it was unseen.

        ``complete``: the row belongs to a complete reading of the roster, where only a lower epoch is out of date.
        """
        mine = self.record
        if record.epoch < mine.epoch or ((record.epoch, record.seq) < (mine.epoch, mine.seq) and not complete):
            return False
        if record.epoch > mine.epoch:
            self.cause = f"roster:{record.key}:{record.epoch}"
        return self._replace(record)

    def apply_event(self, event: SeatEvent) -> bool:
        """Apply an event; return whether the seat's state, epoch, endpoint or model changed, or it was unseen."""
        if isinstance(event, SeatActivated) and (self.activation is None or event.epoch >= self.activation.epoch):
            self.activation = event
        if (event.epoch, event.seq) < (self.record.epoch, self.record.seq):
            return False
        self.cause = event.cause
        return self._replace(_updated(self.record, event))

    def _replace(self, new: SeatRecord) -> bool:
        old, self.record = self.record, new
        changed = (old.state, old.epoch, old.endpoint, old.model) != (new.state, new.epoch, new.endpoint, new.model)
        if changed:
            self.suspect_until = 0.0
            self.activation_request.refusal = None
        unseen, self.unseen = self.unseen, False
        return changed or unseen


def _upstream_of(event: SeatEvent) -> Upstream | None:
    """Return a seat of which only this event is known; None if the event names no model or the seat is unusable."""
    if not event.model or _RANK_OF_STATE[event.state] is Rank.UNUSABLE:
        return None
    record = _updated(SeatRecord(node=event.node, seat=event.seat, state=event.state, reported_at=event.at), event)
    activation = event if isinstance(event, SeatActivated) else None
    return Upstream(record, event.cause, activation=activation)


def _updated(record: SeatRecord, event: SeatEvent) -> SeatRecord:
    """Return the row with the event's changes."""
    changes: dict[str, object] = {"state": event.state, "epoch": event.epoch, "seq": event.seq}
    changes |= {"since": event.at, "reason": event.reason, "stall_seconds": event.stall_seconds}
    for name in ("model", "group", "pod", "pod_uid", "endpoint", "vram_bytes"):
        if value := getattr(event, name):
            changes[name] = value
    if isinstance(event, SeatPinned | SeatUnpinned):
        changes["pinned"] = isinstance(event, SeatPinned)
        changes["since"] = record.since
    if isinstance(event, SeatFreed):
        changes |= {"endpoint": None, "pod": "", "pod_uid": ""}
    return record.model_copy(update=changes)


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
    def moved(self) -> bool:
        """True if open connections to it must be closed: the endpoint changed, or the seat is not active."""
        record = self.upstream.record
        return self.before is not None and (
            self.before.endpoint != record.endpoint or record.state is not SeatState.ACTIVE
        )


class UpstreamTable:
    """Upstreams by key of the roster, models by name. Each upstream is in the model that it is assigned to."""

    def __init__(self) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self.models: dict[str, Model] = {}

    def model(self, name: str) -> Model:
        """Return the model of this name, added if it is unknown."""
        return self.models.setdefault(name, Model(name))

    def forget_empty(self, name: str) -> None:
        """Remove a model that has neither seats nor waiting calls."""
        model = self.models.get(name)
        if model is not None and not model.upstreams and not model.held:
            del self.models[name]

    def apply_event(self, event: SeatEvent) -> Change | None:
        """Apply an event; None if nothing changed."""
        if isinstance(event, SeatAllocated):
            return None  # published by the plugin as a hint for the manager, which alone knows the seat's state
        upstream = self.upstreams.get(seat_key(event.node, event.seat))
        if upstream is None:
            upstream = _upstream_of(event)
            return None if upstream is None else self._change(upstream, None)
        before = upstream.record
        return self._change(upstream, before) if upstream.apply_event(event) else None

    def apply_record(self, record: SeatRecord, *, complete: bool = False) -> Change | None:
        """Apply a row of the roster; None if nothing changed. ``complete``: as in Upstream.apply_record."""
        upstream = self.upstreams.get(record.key)
        if upstream is None:
            return self._change(Upstream(record, f"roster:{record.key}:{record.epoch}"), None)
        before = upstream.record
        return self._change(upstream, before) if upstream.apply_record(record, complete=complete) else None

    def drop(self, upstream: Upstream) -> Change:
        """Remove a seat that does not exist any more."""
        before = upstream.record
        upstream.record = before.model_copy(update={"state": SeatState.FREE})
        change = self._change(upstream, before)
        del self.upstreams[upstream.key]
        return change

    def retry_after(self, model: str, speed: float) -> int:
        """Return the learned time of an activation of this model in wall seconds, at least 1."""
        upstreams = self.models[model].upstreams.values() if model in self.models else ()
        learned = [seat.record.activate_seconds for seat in upstreams if seat.record.activate_seconds > 0]
        return max(1, math.ceil(min(learned) / speed)) if learned else 1

    def known_models(self) -> str:
        """Return the names of all models as text for error messages."""
        return ", ".join(sorted(self.models)) or "none yet"

    def _change(self, upstream: Upstream, before: SeatRecord | None) -> Change:
        self.upstreams[upstream.key] = upstream
        old, new = upstream.model, "" if upstream.record.state is SeatState.FREE else upstream.record.model
        if old == new:
            return Change(upstream, before, "")
        if old in self.models:
            del self.models[old].upstreams[upstream.key]
        upstream.assign(new)
        if new:
            self.model(new).upstreams[upstream.key] = upstream
        return Change(upstream, before, old)
