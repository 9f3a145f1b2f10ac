"""Events: past tense, for all subscribers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from kybernate.envelope import LONGEST_NAME, Address, Message, Record
from kybernate.seat import SeatState


class SeatFacts(BaseModel):
    """What events and rows of the roster tell of a seat."""

    node: str
    seat: str
    state: SeatState
    epoch: int = 0
    seq: int = 0
    """Rises with every event of a node's manager; with the epoch, it orders the rows and events of a seat."""
    model: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    group: str = ""
    """That it is on now."""
    way: str = ""
    """How it came to this group from another one: ``map``, restored there, or ``restart``, started there."""
    pod: str = ""
    """``namespace/name``."""
    pod_uid: str = ""
    endpoint: Address | None = None
    """``http://host:port`` of the engine; None until its pod has an address."""
    reason: str = ""
    vram_bytes: int = 0
    """Its footprint when active, over all its GPUs; 0 until seen."""


class SeatEvent(Message, SeatFacts):
    """Base of the events of a seat. Published by the node's manager (``allocated``: by the plugin)."""

    previous: SeatState | None = None
    op: str = ""
    came_from: str = ""
    """The group before, where ``way`` says how it came."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds of the switch by phase: drain (decision to drained), control (drained to
    journaled), park, activate, verify, release; and total."""
    last_call_at: float | None = None
    """Unix seconds at which the last backend call of an activation ended."""

    def __init_subclass__(cls, **more: Any) -> None:
        """The last word of its subject is that of its name: ``SeatParked`` is ``kyb.v1.evt.{node}.{seat}.parked``."""
        super().__init_subclass__(**more)
        cls.subject_template = f"kyb.v1.evt.{{node}}.{{seat}}.{cls.__name__.removeprefix('Seat').lower()}"


class SeatAllocated(SeatEvent):
    """Kubelet gave this seat to a container (the plugin's hint; PodResources has the container)."""


class SeatQueued(SeatEvent):
    """Its container waits at the start gate."""


class SeatStarted(SeatEvent):
    """It got its ticket; the engine starts."""


class SeatActivated(SeatEvent):
    """It holds VRAM and serves."""


class SeatClosed(SeatEvent):
    """It drains: routers send nothing new and acknowledge (seat, epoch)."""


class SeatEvicted(SeatEvent):
    """Its VRAM is being moved out. Streams that still run are cut by the routers."""


class SeatParked(SeatEvent):
    """Its VRAM is free, by evidence."""


class SeatLeased(SeatEvent):
    """Its group's GPUs are reserved for it and its VRAM is being moved back."""


class SeatMoved(SeatEvent):
    """Another group's GPUs are reserved for it and its VRAM is being moved back there."""


class SeatExited(SeatEvent):
    """Its container exited; kubelet will start it again."""


class SeatLost(SeatEvent):
    """Its processes cannot be used again; it will cold-start."""


class SeatQuarantined(SeatEvent):
    """It holds its GPUs and is left alone until an operator has resolved the reason."""


class SeatReleased(SeatEvent):
    """Its pod was deleted; its processes are ending."""


class SeatFreed(SeatEvent):
    """It has no owner any more."""


class SeatPinned(SeatEvent):
    """An operator pinned it."""


class SeatUnpinned(SeatEvent):
    """An operator unpinned it."""


EVENT_OF_STATE: dict[SeatState, type[SeatEvent]] = {
    SeatState.FREE: SeatFreed,
    SeatState.WAITING: SeatQueued,
    SeatState.STARTING: SeatStarted,
    SeatState.ACTIVE: SeatActivated,
    SeatState.DRAINING: SeatClosed,
    SeatState.PARKING: SeatEvicted,
    SeatState.PARKED: SeatParked,
    SeatState.ACTIVATING: SeatLeased,
    SeatState.MIGRATING: SeatMoved,
    SeatState.BACKOFF: SeatExited,
    SeatState.LOST: SeatLost,
    SeatState.QUARANTINED: SeatQuarantined,
    SeatState.RELEASING: SeatReleased,
}
"""The event of entering a state."""


DecisionKind = Literal["switch", "park", "start", "claim", "stay", "block"]
"""``switch``: a seat gets the group, in the place of a victim if there is one. ``park``: the victim leaves without an
incoming seat. ``start``: the start gate opens. ``claim``: GPUs that seats of other groups hold are being cleared for a
seat of this group. ``stay``: requests wait, and nothing changes. ``block``: a foreign process uses the group's GPUs, or
does not any more."""
DecidedBy = Literal["policy", "operator", "claim"]
"""``claim``: the seat leaves because a seat of another group needs its GPUs."""


class SeatLoad(Record):
    """One seat as a decision saw it. Durations in model seconds."""

    seat: str
    model: str = ""
    state: SeatState
    waiting: int = 0
    in_flight: int = 0
    oldest_wait_seconds: float = 0.0
    active_seconds: float | None = None
    """How long it has been active; None: it is not."""
    slo_seconds: float = 0.0


class GroupDecided(Message):
    """The node's manager decided which seat runs on a group, or let requests wait, for this reason."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{group}.decided"

    node: str
    group: str
    decision: DecisionKind
    by: DecidedBy = "policy"
    op: str = ""
    """The switch that begins, or whose incoming seat changes; its seat events have the same."""
    victim: str = ""
    """The seat that leaves."""
    victim_model: str = ""
    incoming: str = ""
    """The seat that gets the group, or for which it is cleared."""
    model: str = ""
    """Of the incoming seat; without one, of the victim."""
    reason: str = ""
    loads: tuple[SeatLoad, ...] = ()
    """What was seen: the seats concerned, then those with the most waiting requests; at most eight."""


class GpuHealthChanged(Message):
    """A GPU became faulty, or sound again, as the node's device plugin sees it. Its seats are not offered meanwhile."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{gpu}.gpu-health"

    node: str
    gpu: str
    """UUID."""
    index: int = 0
    """Host index, for people."""
    healthy: bool
    reason: str = ""
    """Why it is faulty."""
    xid: int | None = None
    """The XID event that reported it, if any."""
    groups: tuple[str, ...] = ()
    """Names of all groups that contain it."""
    seats: tuple[str, ...] = ()
    """All seats of these groups."""


class AuditRecord(Message):
    """A caller requested a change of what runs."""

    subject_template: ClassVar[str] = "kyb.v1.audit.{actor}.{verb}"

    actor: str
    verb: str
    node: str = ""
    seat: str = ""
    accepted: bool = True
    reason: str = ""
    remote: str = ""
    """Address of the caller."""


WAITED_IN_VAIN = ("hold_timeout", "queue_full", "activation_refused", "seat_quarantined", "engine_failed")
"""Codes of errors that end the wait of a request: it misses the SLO of its model."""


class RequestEnded(Message):
    """A request that was held, or that failed, has ended. Kept by its id for a day. Seconds are wall seconds."""

    subject_template: ClassVar[str] = "kyb.v1.req.{request}"

    request: str
    """The caller's ``X-Request-Id``, else the id in ``X-Kyb-Cause``."""
    trace_id: Annotated[str, Field(max_length=32)] | None = None
    """Of its trace, where the caller or the router has one."""
    router: str
    model: str
    node: str = ""
    """Of the seat that it was forwarded to last."""
    seat: str = ""
    epoch: int = 0
    arrived_at: float
    """Unix seconds."""
    held_seconds: float = 0.0
    """All its waits for a seat, until it was forwarded last or ended; time at an engine that took it is none."""
    forwarded_seconds: float | None = None
    """From its arrival until it was forwarded last; None: it was not."""
    first_byte_seconds: float | None = None
    """From its arrival to the engine's first byte; None: there was none."""
    seconds: float
    """From its arrival to its end."""
    status: int
    """HTTP; 499: the caller left."""
    reason: str = ""
    """Code of the error, if it failed."""
    prompt_tokens: int | None = None
    """None: not counted, because its caller has no key."""
    completion_tokens: int | None = None
