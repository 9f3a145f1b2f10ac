"""One step of the router's decisions: an input comes in, effects go out, alarms are set for later. Pure.

Wire messages (SeatEvent, SeatRecord, DrainAck …) are inputs and effects as they are; all others are defined here.
``now`` and all durations are wall seconds of CLOCK_MONOTONIC; ``request`` numbers the calls of one router in order of
arrival. Those that each call brings are not frozen, because Python needs five times as long to make a frozen one; but
nothing changes them.
"""

import heapq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from kybernate.messages import ActivateSeat, CommandReply, DrainAck, Presence, SeatActivated, SeatEvent
from kybernate.roster import SeatRecord

Kind = Literal["call", "permit", "wake"]
"""A call is forwarded; a permit allows another gateway to forward one; a wake only requests the activation."""


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CallArrived:
    """A caller requests a model."""

    request: int
    model: str
    cause: str
    kind: Kind = "call"
    hold_seconds: float | None = None
    """Longest wait; None: the router's own limit, which is also the upper bound."""
    by: str = ""
    """The caller's header or parameter that says so."""
    priority: int = 0
    """Of calls that wait, those with a higher one are forwarded first."""
    tenant: str = ""
    """Tenants whose calls wait for a model with the same priority take turns."""


@dataclass(slots=True)
class CallEnded:
    """The call was answered, or it failed, or its caller disconnected."""

    request: int
    answered: bool | None = None
    """True: completely. False: its caller left before the first byte. None: it tells nothing about the engine's
    capacity (an error, a caller that left in the middle of a stream)."""


@dataclass(frozen=True, slots=True)
class CallReturned:
    """A forwarded call failed before the first byte of its response; it waits again."""

    request: int
    suspect: bool = True
    """The engine itself failed: it gets no calls until its seat reports a change or ``SUSPECT_SECONDS`` have passed."""
    taken: bool = False
    """The engine had taken the request: the time since it was forwarded was no wait."""


@dataclass(frozen=True, slots=True)
class SeatMissing:
    """The roster has no row for this seat any more: its manager removed it, or NATS lost its disk."""

    key: str


@dataclass(frozen=True, slots=True)
class RosterRead:
    """The roster was read completely, beginning at ``at``.

    A large one comes in parts: all but the last have no ``at``, and ``present`` counts in the last.
    """

    at: float | None
    records: tuple[SeatRecord, ...]
    present: AbstractSet[str]
    """Keys of all rows, including unchanged ones that are not in ``records``."""


@dataclass(frozen=True, slots=True)
class BusLost:
    """The connection to the bus is lost."""


@dataclass(frozen=True, slots=True)
class ManagerAnswered:
    """Result of QueryManager, sent at ``at``: the node's seats, or None if its manager did not answer."""

    node: str
    at: float
    records: tuple[SeatRecord, ...] | None
    away: bool = False
    """It did not answer, and after that the leader of the roster's stream did."""


@dataclass(frozen=True, slots=True)
class ActivationAnswered:
    """Result of RequestActivation; None: no reply arrived, so the manager may have received the command or not."""

    key: str
    reply: CommandReply | None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """An alarm may be due."""


Input = (
    CallArrived | CallEnded | CallReturned | SeatRecord | SeatEvent | SeatMissing | RosterRead
    | Presence | BusLost | ManagerAnswered | ActivationAnswered | TimePassed
)  # fmt: skip


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Forward:
    """Send this call to the engine at ``endpoint`` (a permit: report it to the gateway; a wake: the seat is active)."""

    request: int
    key: str
    seat: str
    endpoint: str
    epoch: int
    held_seconds: float = 0.0
    opened: SeatActivated | None = None
    """The activation that ended the wait of a held call, as far as its event has arrived."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer this call with an error."""

    request: int
    status: int
    code: str
    message: str
    retry_after: int | None = None
    """Seconds for the Retry-After header."""
    detail: str = ""
    """The seat and its manager's reason, for callers who may see seats."""
    until: float = 0.0
    """Unix seconds before which a retry is in vain; 0: ``retry_after`` counts."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Abort this forwarded call: its seat loses its VRAM, or its processes are gone."""

    request: int
    code: Literal["seat_evicted", "upstream_failed"]


@dataclass(frozen=True, slots=True)
class RequestActivation:
    """Send the command to the seat's manager; its reply comes back as ActivationAnswered."""

    request: int
    key: str
    command: ActivateSeat


@dataclass(frozen=True, slots=True)
class QueryManager:
    """Request the node's seats from its manager over HTTP; the result comes back as ManagerAnswered."""

    node: str
    url: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close idle connections to this seat now, and busy ones when their calls end."""

    key: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Connect to the engine of a seat that is being activated: so many calls wait for it."""

    key: str
    endpoint: str
    count: int


@dataclass(slots=True)
class LevelChanged:
    """The level of (model, seat) changed; ``edge``: requests begin or end there."""

    model: str
    key: str | None
    edge: bool


@dataclass(frozen=True, slots=True)
class Resync:
    """A manager counts this router again, and may not have waited for it before: read the roster again."""


Effect = (
    Forward | Reject | Cut | RequestActivation | QueryManager | Disconnect | Prepare | LevelChanged | Resync | DrainAck
)  # fmt: skip


# --- the step ---------------------------------------------------------------------------------------------------------

AlarmName = tuple[str, str | int]
"""(kind, what it is about: key of a seat, node, or number of a call)."""


class Alarms:
    """A heap of (time, name) with at most one pending alarm per name."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, AlarmName]] = []
        self._at: dict[AlarmName, float] = {}
        self._count = 0
        self.at: float | None = None
        """Time of the earliest pending alarm."""

    def set(self, name: AlarmName, at: float) -> None:
        """Ring at ``at``, unless an earlier alarm of this name is pending."""
        if at >= self._at.get(name, float("inf")):
            return
        self._at[name] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, name))
        self.at = self._heap[0][0]

    def clear(self, name: AlarmName) -> None:
        """Cancel the pending alarm of this name, if there is one."""
        at = self._at.pop(name, None)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        if at is not None and at == self.at:
            self._find_first()

    def due(self, now: float) -> list[AlarmName]:
        """Remove the alarms that are due at ``now`` and return their names in order."""
        names = []
        while self.at is not None and self.at <= now:
            name = heapq.heappop(self._heap)[2]
            del self._at[name]
            names.append(name)
            self._find_first()
        return names

    def _find_first(self) -> None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.at = self._heap[0][0] if self._heap else None


@dataclass(slots=True)
class RouterStep:
    """The current step, shared by all parts of the core, which append its effects."""

    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    """In order."""
    alarms: Alarms = field(default_factory=Alarms)
    """Pending ones of all steps."""

    def set_alarm(self, name: AlarmName, seconds: float) -> None:
        """Ring in ``seconds``, unless an earlier alarm of this name is pending."""
        self.alarms.set(name, self.now + seconds)
