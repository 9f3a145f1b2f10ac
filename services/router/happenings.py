"""What goes into the router's decisions and what comes out of them. Plain data.

Wire messages (SeatEvent, SeatRecord, DrainAck …) go in and out as they are; here is the rest. ``now`` and all
durations here are wall seconds of CLOCK_MONOTONIC; ``request`` numbers the calls of one router, in order of arrival.
"""

from dataclasses import dataclass
from typing import Literal

from kybernate.messages import ActivateSeat, CommandReply, DrainAck, SeatEvent
from kybernate.roster import SeatRecord

Kind = Literal["call", "permit", "wake"]
"""A call is forwarded; a permit lets somebody else forward; a wake only asks for the model."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Somebody wants a model."""

    request: int
    model: str
    cause: str
    size: int = 0
    """Bytes that it takes while it waits."""
    kind: Kind = "call"
    hold_seconds: float | None = None
    """Longest wait; None: the router's own limit, which is also the upper bound."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The call is answered, or its caller left, whichever way: nothing is owed any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A forwarded call came back before the first byte of an answer; it waits again."""

    request: int
    suspect: bool = True
    """The engine itself failed; nothing more goes there until the seat says something new or a moment passed."""


@dataclass(frozen=True, slots=True)
class SeatMissing:
    """The roster has no such seat any more: its manager removed it, or NATS lost its disk."""

    key: str


@dataclass(frozen=True, slots=True)
class Synced:
    """The roster was read completely, after this router had made itself known at ``at``."""

    at: float
    records: tuple[SeatRecord, ...]
    present: frozenset[str]
    """Keys of all rows, also of those that were known already and are not in ``records``."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The bus has this router's presence, said at ``at``."""

    at: float


@dataclass(frozen=True, slots=True)
class BusLost:
    """The bus is away."""


@dataclass(frozen=True, slots=True)
class ManagerSaid:
    """What a node's manager answered over HTTP to a question sent at ``at``; None: it did not answer."""

    node: str
    at: float
    records: tuple[SeatRecord, ...] | None


@dataclass(frozen=True, slots=True)
class Replied:
    """The manager's answer to ActivateSeat; None: nobody answered, so it may have been heard or not."""

    key: str
    reply: CommandReply | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Happening = (
    Arrived
    | Ended
    | Refused
    | SeatRecord
    | SeatEvent
    | SeatMissing
    | Synced
    | Confirmed
    | BusLost
    | ManagerSaid
    | Replied
    | Tick
)


@dataclass(frozen=True, slots=True)
class Forward:
    """Send this call to that engine now (for a permit: say so to its caller; for a wake: it is awake)."""

    request: int
    key: str
    seat: str
    endpoint: str
    epoch: int
    held_seconds: float = 0.0
    opened: bool = False
    """It waited, and the activation of this seat set it free."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer this call with an error."""

    request: int
    status: int
    code: str
    message: str
    retry_after: int | None = None
    """Seconds for the Retry-After header."""


@dataclass(frozen=True, slots=True)
class Cut:
    """End this forwarded call: its seat loses its VRAM, or is beyond use."""

    request: int
    code: Literal["seat_evicted", "upstream_failed"]


@dataclass(frozen=True, slots=True)
class Wake:
    """Ask the seat's manager, and tell the answer as Replied."""

    request: int
    key: str
    command: ActivateSeat


@dataclass(frozen=True, slots=True)
class AskManager:
    """Ask a node's manager over HTTP what its seats are, and tell the answer as ManagerSaid."""

    node: str
    url: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close idle connections to this seat now, and the others when their calls end."""

    key: str


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """The level of (model, seat) changed; ``edge``: from or to zero."""

    model: str
    key: str | None
    edge: bool


@dataclass(frozen=True, slots=True)
class Resync:
    """This router was silent for too long to believe what it knows: read the roster again."""


Effect = Forward | Reject | Cut | Wake | AskManager | Disconnect | LevelChanged | Resync | DrainAck
