"""What a router knows about one seat, and which seat a request goes to. Pure.

What is said about a seat is ordered by epoch, and within one epoch by ``seq``, which rises with everything that its
manager says. A complete reading of the roster overrules the order within an epoch.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from kybernate.messages import SeatActivated, SeatEvent, SeatFreed, SeatPinned, SeatUnpinned
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.router.happenings import Kind

_S = SeatState

CLOSING = frozenset({_S.DRAINING, _S.PARKING})
"""The seat is being closed: nothing new goes there and its manager waits for acknowledgements."""
ASKABLE = frozenset({_S.WAITING, _S.DRAINING, _S.PARKING, _S.PARKED, _S.BACKOFF, _S.LOST})
"""Nothing is under way that would make it serve: those who wait here ask its manager for it."""
CUT = frozenset({_S.PARKING, _S.PARKED, _S.LOST})
"""What still runs there cannot be finished."""
FREEZING = frozenset({_S.PARKING, _S.PARKED})
"""Its requests in flight may stand still with it, where its manager says so, instead of being cut."""
FINAL_STATES = frozenset({_S.FREE, _S.RELEASING})
"""Nobody can be served there any more."""


class Rank(IntEnum):
    """How good a seat is for a request now; lower is better."""

    OPEN = 0  # send
    UNSURE = 1  # active as far as known, but the knowledge is old: ask first
    COMING = 2  # activating
    PARKED = 3
    STARTING = 4  # a cold start takes longer than an activation
    BUSY = 5  # being closed, or its engine just refused a connection
    DOWN = 6  # its container is not there
    REFUSED = 7  # its manager says that it cannot be
    NEVER = 8


_RANK_OF_STATE = {
    _S.ACTIVE: Rank.OPEN,
    _S.ACTIVATING: Rank.COMING,
    _S.MIGRATING: Rank.COMING,
    _S.PARKED: Rank.PARKED,
    _S.STARTING: Rank.STARTING,
    _S.DRAINING: Rank.BUSY,
    _S.PARKING: Rank.BUSY,
    _S.WAITING: Rank.DOWN,
    _S.BACKOFF: Rank.DOWN,
    _S.LOST: Rank.DOWN,
    _S.QUARANTINED: Rank.REFUSED,
    _S.FREE: Rank.NEVER,
    _S.RELEASING: Rank.NEVER,
}


@dataclass(slots=True, eq=False)
class Call:
    """One request from its arrival until its end."""

    request: int
    model: str
    cause: str
    size: int
    kind: Kind
    arrived: float
    deadline: float
    lane: "Lane | None" = None
    """Where it waits or runs; None: no seat of its model can be used at present."""
    held: bool = False
    sent: float = 0.0
    """When it was last forwarded."""


@dataclass(slots=True, eq=False)
class Lane:
    """One seat as this router sees it, with its own requests there."""

    record: SeatRecord
    cause: str = "roster"
    key: str = ""
    """Key of the seat in the roster."""
    model: str = ""
    """Under which model it is kept; empty while nobody owns it."""
    waiting: dict[int, Call] = field(default_factory=dict)
    in_flight: dict[int, Call] = field(default_factory=dict)
    arrivals: int = 0
    """Ever since; the level says the difference."""
    served: int = 0
    """Calls that ended there, ever since."""
    served_seconds: float = 0.0
    """Wall seconds that those were in flight."""
    last_cause: str = "router"
    frozen_since: float | None = None
    """Its requests in flight stand still with it."""
    suspect_until: float = 0.0
    unseen: bool = False
    """The roster does not have it; what is known here may be old."""
    refusal: str | None = None
    """Why the manager will not activate it; None: it may."""
    wake_sent: float | None = None
    """When ActivateSeat was last sent for those who wait here now."""
    wake_heard: bool = False
    activation: SeatActivated | None = None
    """The last one heard."""
    weight: int = 0
    """Rendezvous hash of model and seat; the same in every router."""

    def __post_init__(self) -> None:
        self.key = self.record.key

    def serve(self, model: str) -> None:
        """Keep it under this model from now on (empty: under none)."""
        self.model = model
        self.weight = int.from_bytes(hashlib.blake2b(f"{model}|{self.record.seat}".encode(), digest_size=8).digest())

    def rank(self, now: float, sure: bool) -> Rank:
        """How good it is now; ``sure``: what is known about its node is fresh."""
        state = self.record.state
        if state is _S.ACTIVE:
            if now < self.suspect_until:
                return Rank.BUSY
            if self.record.endpoint is None:
                return Rank.COMING
            return Rank.OPEN if sure and not self.unseen else Rank.UNSURE
        if self.refusal is not None:
            return Rank.REFUSED
        return _RANK_OF_STATE[state]

    def see(self, record: SeatRecord, *, overrule: bool = False) -> bool:
        """Take a row of the roster; returns whether anything was learned.

        ``overrule`` when it belongs to a complete reading: then only a lower epoch is older.
        """
        mine = self.record
        if record.epoch < mine.epoch or ((record.epoch, record.seq) < (mine.epoch, mine.seq) and not overrule):
            return False
        self.unseen = False
        if record.epoch > mine.epoch:
            self.cause = f"roster:{record.key}:{record.epoch}"
        return self._become(record)

    def hear(self, event: SeatEvent) -> bool:
        """Take an event; returns whether anything was learned."""
        if isinstance(event, SeatActivated) and (self.activation is None or event.epoch >= self.activation.epoch):
            self.activation = event
        if (event.epoch, event.seq) < (self.record.epoch, self.record.seq):
            return False
        self.unseen = False
        self.cause = event.cause
        return self._become(_updated(self.record, event))

    def _become(self, record: SeatRecord) -> bool:
        before, self.record = self.record, record
        news = (before.state, before.epoch, before.endpoint, before.model) != (
            record.state,
            record.epoch,
            record.endpoint,
            record.model,
        )
        if news:
            self.suspect_until = 0.0
            self.refusal = None
        return news


def lane_of(event: SeatEvent) -> Lane | None:
    """A seat of which only an event is known so far; None when that says too little."""
    if not event.model or event.state in FINAL_STATES:
        return None
    record = _updated(SeatRecord(node=event.node, seat=event.seat, state=event.state, reported_at=event.at), event)
    activation = event if isinstance(event, SeatActivated) else None
    return Lane(record, event.cause, activation=activation)


def best(lanes: Iterable[tuple[Rank, Lane]], stay: Lane | None) -> tuple[Rank, Lane] | None:
    """The seat for a request: open ones by fewest in flight, others by rendezvous hash, so routers agree.

    A request that waits already stays where it is while nothing better is there.
    """
    found: tuple[Rank, Lane] | None = None
    for rank, lane in lanes:
        if rank is Rank.NEVER:
            continue
        if found is None or rank < found[0] or (rank == found[0] and _better(rank, lane, found[1], stay)):
            found = (rank, lane)
    return found


def _better(rank: Rank, lane: Lane, than: Lane, stay: Lane | None) -> bool:
    if rank is Rank.OPEN:
        return (len(lane.in_flight), -lane.weight) < (len(than.in_flight), -than.weight)
    if stay is lane or stay is than:
        return stay is lane
    return lane.weight > than.weight


def _updated(record: SeatRecord, event: SeatEvent) -> SeatRecord:
    """The row as the event leaves it."""
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
