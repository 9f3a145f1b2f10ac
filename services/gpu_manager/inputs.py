"""What the board hears besides wire messages, and what it says besides them. Plain frozen values."""

from dataclasses import dataclass, field

from kybernate.messages import JobReply
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.seat_pod import Owners


@dataclass(frozen=True, slots=True)
class Now:
    """One instant in the three times of a node."""

    wall: float
    """CLOCK_MONOTONIC seconds."""
    model: float
    """Model seconds (``speed`` times the wall)."""
    unix: float
    """Unix seconds, for what leaves the node."""

    @property
    def pace(self) -> float:
        """Model seconds per wall second."""
        return self.model / self.wall


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """Who owns the seats of this node now."""

    owners: Owners


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process on a GPU that belongs to no seat."""

    gpu: str
    """UUID."""
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class StrangersSeen:
    """All of them, as of one look."""

    strangers: tuple[Stranger, ...]


@dataclass(frozen=True, slots=True)
class StartCall:
    """Kubelet waits at the start gate for this seat (PreStartContainer)."""

    call: str
    since: float
    """Unix seconds."""
    until: float
    """Unix seconds at which the plugin gives up."""


@dataclass(frozen=True, slots=True)
class StartCalls:
    """All waiting calls of this node, by seat."""

    calls: dict[str, StartCall] = field(hash=False)


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """What an engine answered. ``running`` counts its requests; None when it does not tell.

    Not healthy and None: it did not answer in time, which says nothing about what it does.
    """

    seat: str
    container_id: str
    healthy: bool
    running: int | None = None
    asked_at: float = 0.0
    """Wall seconds at which the question was sent."""


@dataclass(frozen=True, slots=True)
class DrainAnnounced:
    """The roster entry that closes a seat is written: every router that reads it from now on knows."""

    seat: str
    epoch: int


@dataclass(frozen=True, slots=True)
class JobAnswered:
    """The checkpointer answered a switch job; None: no answer in time, which proves nothing."""

    op: str
    epoch: int
    reply: JobReply | None


@dataclass(frozen=True, slots=True)
class Retargeted:
    """The checkpointer answered a RetargetJob; None: no answer in time, which proves nothing."""

    op: str
    reply: JobReply | None


@dataclass(frozen=True, slots=True)
class JobsTold:
    """The checkpointer answered a question about jobs and processes."""

    reply: JobReply
    asked: tuple[str, ...] = ()
    """The operations asked for; it does not know those that the reply leaves out."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a manager knows after its start: pods, the ledger's memory, the checkpointer's evidence."""

    owners: Owners
    ledger: Ledger
    reply: JobReply


@dataclass(frozen=True, slots=True)
class AskedOverHttp:
    """A router that lost NATS asked what is active, and goes by the answer for a moment."""


@dataclass(frozen=True, slots=True)
class BusChanged:
    """The cluster bus was lost or came back."""

    connected: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Open the start gate for one waiting call."""

    seat: str
    call: str
    pod_uid: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A sentence about what was decided and why, for the log."""

    group: str
    text: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask an engine whether it is healthy, or whether it still computes."""

    seat: str
    endpoint: str
    container_id: str
    idle: bool
    """True: how many requests run (metrics). False: is it healthy."""
    since: float
    """Wall seconds; a new value means a new question."""
