"""The clocks of a node, the messages that a board receives beside the wire's, and the effects that only it has. Pure.

The three clocks are three types: an instant minus an instant of the same clock is a number of seconds, and mypy refuses
to compare or subtract instants of different clocks. The interpreter sees plain floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Self

from kybernate.messages import JobReply, KillJob, ReleaseJob, SwitchJob
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.ledger import Ledger

if TYPE_CHECKING:

    class _Instant:
        """An instant of one clock."""

        def __init__(self, seconds: float) -> None: ...
        def __sub__(self, other: Self) -> float: ...
        def __add__(self, seconds: float) -> Self: ...
        def __lt__(self, other: Self) -> bool: ...
        def __le__(self, other: Self) -> bool: ...
        def __gt__(self, other: Self) -> bool: ...
        def __ge__(self, other: Self) -> bool: ...
        def __float__(self) -> float: ...

    class WallTime(_Instant):
        """CLOCK_MONOTONIC seconds: deadlines, pauses, time-outs."""

    class ModelTime(_Instant):
        """Model seconds (``speed`` times the wall): waits, costs and rates, as policies see them."""

    class UnixTime(_Instant):
        """Unix seconds: what leaves the node or outlives the process."""

else:
    WallTime = ModelTime = UnixTime = float


@dataclass(frozen=True, slots=True)
class Now:
    """One instant on the three clocks of a node."""

    wall: WallTime
    model: ModelTime
    unix: UnixTime
    lag: float = 0.0
    """Wall seconds for which the message that is handled has waited."""

    @property
    def handled(self) -> WallTime:
        """All that arrived before this instant has been handled: silence counts until then, and no longer."""
        return self.wall + -self.lag

    @property
    def pace(self) -> float:
        """Model seconds per wall second."""
        return float(self.model) / float(self.wall)


# --- what the board receives ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a GPU that belongs to no seat."""

    gpu: str
    """UUID."""
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class ForeignProcessesSeen:
    """All foreign processes, as of one read of the GPUs' process lists."""

    processes: tuple[ForeignProcess, ...]
    used: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By container: the VRAM that its processes use over its GPUs, as if all used the fullest's."""
    strays: frozenset[tuple[str, str]] = frozenset()
    """(container, UUID) of processes of a seat that hold memory on a GPU that is not its group's."""
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    """By container of a seat that rests, and GPU: the bytes that were in use in both of the last two reads."""
    since: WallTime = field(default=WallTime(0.0), compare=False)
    """When the first of them began."""


@dataclass(frozen=True, slots=True)
class FaultyGpusSeen:
    """All GPUs that the device plugin takes for faulty: UUID → why."""

    faults: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class StartCall:
    """Kubelet waits at the start gate for this seat (PreStartContainer)."""

    call: str
    since: UnixTime
    until: UnixTime
    """The plugin ends the call then."""
    inside: bool = False
    """Not kubelet waits, but kyb-run in the container that runs: it may start on any group of the seat's pool. That its
    engine has ended, only evidence shows."""
    closed: frozenset[str] = frozenset()
    """Groups on which this start cannot be: a GPU is gone, or the container was made without it."""


@dataclass(frozen=True, slots=True)
class StartCalls:
    """All waiting calls of this node, by seat."""

    calls: dict[str, StartCall] = field(hash=False)


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """An engine's answer. ``running`` counts its requests; None when its metrics do not say.

    Not healthy and None: it did not answer in time or cannot be reached, which proves nothing about its load.
    """

    seat: str
    container_id: str
    healthy: bool
    running: int | None = None
    asked_at: WallTime = WallTime(0.0)  # noqa: RUF009  (a float)
    """When the request was sent."""
    said: str = ""
    """What it answered in place of being healthy, for people."""


@dataclass(frozen=True, slots=True)
class DrainAnnounced:
    """The roster entry that closes a seat is written: every router that reads the roster from now on knows."""

    seat: str
    epoch: int


@dataclass(frozen=True, slots=True)
class JobAnswered:
    """The checkpointer's answer to a job; None: no answer in time, which proves nothing."""

    job: SwitchJob | ReleaseJob | KillJob
    reply: JobReply | None


@dataclass(frozen=True, slots=True)
class JobsReported:
    """The checkpointer's answer to a question about jobs and processes."""

    reply: JobReply
    asked: tuple[str, ...] = ()
    """The operations in the question; the checkpointer does not know those that the reply leaves out."""
    asked_at: WallTime = WallTime(0.0)  # noqa: RUF009  (a float)
    """When the question was sent: the answer says nothing about what was before; 0: not known."""


@dataclass(frozen=True, slots=True)
class StartTicket:
    """Open the start gate for one waiting call: an effect. The file of the ticket has these fields."""

    seat: str
    call: str
    pod_uid: str
    epoch: int
    expires: WallTime = WallTime(inf)  # noqa: RUF009  (a float)
    """Nothing starts by it after that; infinity: release 843f10d5 gave it, and did not say."""
    vram_bytes: int = 0
    """As its pod declares; 0: nothing."""
    container: str = ""
    """The id of a start inside a container that runs; empty: a container starts."""
    group: str = ""
    """Where it starts; empty: at its seat's home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTicket(StartTicket):
    """The last ticket in a seat's folder, taken or not."""

    age_seconds: float


@dataclass(frozen=True, slots=True)
class Published:
    """The highest numbers in the node's rows of the roster, which routers have seen: they refuse lower ones."""

    epoch: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryBegun:
    """A manager has started and read its ledger and the pods; the checkpointer's evidence is still missing."""

    owners: Owners
    ledger: Ledger
    published: Published = Published()
    """Zeros if the roster could not be read."""
    tickets: tuple[SeatTicket, ...] = ()
    """The last ticket in each seat folder."""
    seen: int = 0
    """The highest epoch of the checkpointer, which refused a question for it; 0: it refused none."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The checkpointer has answered: the manager knows all that it can know after its start."""

    begun: RecoveryBegun
    reply: JobReply


@dataclass(frozen=True, slots=True)
class RouterAskedOverHttp:
    """A router without NATS read the active seats over HTTP and forwards by the answer for a moment."""


@dataclass(frozen=True, slots=True)
class BusChanged:
    """The cluster bus was lost or came back."""

    connected: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing arrived for longer than a running manager ever waits: what was sent meanwhile may still be unread."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# --- what the board returns, beside wire messages ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InvariantBroken:
    """An invariant does not hold on a GPU: nothing is granted there until it holds again. For the log."""

    gpu: str
    """UUID."""
    text: str


@dataclass(frozen=True, slots=True)
class InputRefused:
    """An input that contradicts the state was refused and changed nothing. For the log."""

    text: str


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """A question to an engine: is it healthy, or does it still compute."""

    seat: str
    endpoint: str
    container_id: str
    idle: bool
    """True: count its running requests (metrics). False: is it healthy."""
    since: WallTime
    """A new value means a new question."""
