"""Every message of Kybernate. Each knows its subject; nobody else spells one.

Signals are levels, commands are imperative and answered, jobs and reports live on the node bus between manager and
checkpointer, events are in the past tense. Subjects and delivery: ``docs/bus.md``.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from kybernate.envelope import Message
from kybernate.seat import SeatState

# --- signals: levels that expire ---------------------------------------------------------------------------------


class TrafficSignal(Message):
    """A source says how much traffic a model (or one seat of it) has right now. Not a change: the present level.

    Expires ``ttl_seconds`` (wall) after receipt, by the receiver's clock. Levels of several sources add up.
    """

    subject_template: ClassVar[str] = "kyb.v1.sig.{source}.{model}"
    cloud_event: ClassVar[bool] = False

    source: str
    """Which instance says it, e.g. ``router-0`` or ``litellm/pod-3``."""
    model: str
    seat: str | None = None
    """The seat that these requests are assigned to; None leaves the choice to the manager."""
    tier: str = "standard"
    waiting: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    arrivals: int = Field(default=0, ge=0)
    """Requests that arrived during the last ``window_seconds``."""
    window_seconds: float = Field(default=1.0, gt=0)
    oldest_wait_seconds: float | None = Field(default=None, ge=0)
    """Age of the oldest waiting request, model seconds, at sending."""
    age_histogram: tuple[tuple[float, int], ...] = ()
    """Waiting requests, oldest first, in at most 16 steps: (their mean age in model seconds, how many). Optional; when
    there, the counts add up to ``waiting``, and the oldest stands alone."""
    incarnation: str = ""
    """New at each start of the source: the three counters below then begin again at 0."""
    arrived: int | None = Field(default=None, ge=0)
    """Requests that ever arrived for this seat, None: not counted. A receiver that missed signals misses no request."""
    served: int | None = Field(default=None, ge=0)
    """Requests that were ever answered by it."""
    served_seconds: float | None = Field(default=None, ge=0)
    """Model seconds that those spent in flight, summed."""
    seq: int = 0
    """Rises with each signal of one source; a lower one that comes late is dropped."""
    ttl_seconds: float = Field(default=3.0, gt=0)


class Presence(Message):
    """An instance is alive. Sent every 2 s; dead after 10 s by the receiver's clock."""

    subject_template: ClassVar[str] = "kyb.v1.hb.{component}.{instance}"
    cloud_event: ClassVar[bool] = False

    component: Literal["router", "gpu-manager", "plugin", "checkpointer"]
    instance: str
    """Stable name, e.g. ``router-0``."""
    incarnation: str
    """New at each start; a new incarnation replaces the old one of the same instance at once."""
    node: str | None = None
    url: str | None = None
    """Where it answers HTTP."""


class DrainAck(Message):
    """A router says that it sends nothing new to a seat, and how many requests it still has in flight there."""

    subject_template: ClassVar[str] = "kyb.v1.ack.{node}.{seat}"
    cloud_event: ClassVar[bool] = False

    node: str
    seat: str
    instance: str
    incarnation: str
    epoch: int
    in_flight: int = Field(ge=0)
    """Forwarded requests, plus permissions of ``/v1/hold`` that are still valid."""
    permits: int | None = Field(default=None, ge=0)
    """Those permissions alone; None: a router that cannot keep requests of a frozen seat."""


# --- commands: to the node's manager, answered within milliseconds ------------------------------------------------


class Command(Message):
    """Base of commands to a seat's manager."""

    node: str
    seat: str
    actor: str = "router"
    """Who asks: ``router``, ``operator`` or the name of an API key."""
    deadline: float | None = None
    """Unix seconds after which the command must not be begun any more."""
    if_epoch: int | None = None
    """Refuse unless the seat's epoch is this one."""


class ActivateSeat(Command):
    """Bring this seat to VRAM. From a router it is a poke beside its signal; from an operator a wish of its own."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.activate"


class ParkSeat(Command):
    """Take this seat out of VRAM."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.park"


class PinSeat(Command):
    """Keep this seat active: it is activated, and never parked by policy until unpinned."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.pin"


class UnpinSeat(Command):
    """Let policy park this seat again."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.unpin"


class CommandReply(BaseModel):
    """The answer to a command: taken (progress comes as events), or refused with a reason to act on."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    accepted: bool
    op: str = ""
    """Names the operation in events."""
    epoch: int = 0
    """The seat's epoch now."""
    code: str = ""
    """``unknown-seat``, ``pinned``, ``quarantined``, ``stale-epoch``, ``too-late``, ``not-ready`` … when refused."""
    reason: str = ""
    retry_after_seconds: float | None = None


# --- jobs and reports: manager and checkpointer, on the node bus ---------------------------------------------------


class SeatTarget(BaseModel):
    """Everything the checkpointer needs to find and move one seat's processes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seat: str
    pod_uid: str
    container_id: str
    """As kubelet reports it: ``containerd://…``, or ``process://<pid>`` from the fake kubelet."""
    gpus: tuple[str, ...]
    """UUIDs of the group's GPUs, in the group's order."""
    vram_bytes: int = Field(default=0, ge=0)
    """Expected footprint over all GPUs together; 0 if not known yet."""
    backend: str = "cuda"


class Job(Message):
    """Base of what the manager asks the checkpointer for. ``epoch`` fences: a lower one than seen is refused."""

    node: str
    epoch: int


class SwitchJob(Job):
    """Park these seats, then activate that one. Once journaled it finishes without any bus."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.switch"

    op: str
    group: str
    park: tuple[SeatTarget, ...] = ()
    activate: SeatTarget | None = None


class RetargetJob(Job):
    """Change the second half of a switch that has not begun it. ``activate=None`` drops that half."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.retarget"

    op: str
    activate: SeatTarget | None = None


class ReleaseJob(Job):
    """The pod of this seat is deleted: thaw what is frozen so that it can end, and forget it."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.release"

    target: SeatTarget


class KillJob(Job):
    """The seat's processes are beyond use: end them and prove that their VRAM is free."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.kill"

    target: SeatTarget


class AskJobs(Job):
    """What became of these operations, and what are these seats' processes doing? Moves nothing.

    An epoch above 0 fences: on the GPUs of these seats no job with a lower one is taken after the answer.
    """

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.status"

    ops: tuple[str, ...] = ()
    targets: tuple[SeatTarget, ...] = ()
    gpus: tuple[str, ...] = ()
    """Further GPUs to fence: seats of others may have been on their way there."""


Outcome = Literal["pending", "started", "active", "parked", "lost", "gone", "quarantined"]
"""Where one seat of a job is: not begun, begun, or at one of the ends.

After the park half ``parked`` is success and ``active`` a rollback; after the activate half ``active`` is success and
``parked`` means that nothing was restored. ``gone``: no process exists. ``lost``: they exist and cannot be used.
"""


class SeatProgress(BaseModel):
    """How far a job is with one seat."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seat: str
    pod_uid: str
    container_id: str
    outcome: Outcome
    reason: str = ""
    """Why it did not go as asked; empty when it did."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds by step: lock, checkpoint, verify, freeze / thaw, restore, unlock, verify."""
    vram_bytes: int = 0
    """Footprint seen at park, over all GPUs."""
    host_bytes: int = 0
    """Host memory that the parked copy takes."""
    last_call_at: float | None = None
    """Unix seconds at which the last backend call of this half ended."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that its memory is on, or was on when it was parked; empty where that is not known."""
    move_refused: Literal["", "seat", "node"] = ""
    """It was to be restored on other GPUs than it was parked on, and this seat, or any of this node, cannot be: the
    reason says why."""


class JobStatus(BaseModel):
    """The whole truth about one switch; the same in reports and in answers, so a lost report loses nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    op: str
    epoch: int
    group: str
    park: tuple[SeatProgress, ...] = ()
    activate: SeatProgress | None = None
    journaled_at: float = 0.0
    """Unix seconds."""
    done: bool = False


class JobProgress(Message):
    """The checkpointer reports a step of a job, as the job's whole present status."""

    subject_template: ClassVar[str] = "kyb.v1.rpt.{node}.progress"

    node: str
    status: JobStatus


class JobReply(BaseModel):
    """The checkpointer's answer to a job: journaled (fsync) or refused."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    accepted: bool
    code: str = ""
    """``stale-epoch``, ``busy``, ``too-late``, ``unknown-op``, ``unsupported`` … when refused."""
    reason: str = ""
    highest_epoch: int = 0
    """The highest epoch the checkpointer has seen; a manager goes above it."""
    jobs: tuple[JobStatus, ...] = ()
    """For AskJobs: the asked operations, or all unfinished ones when none was named."""
    seats: tuple[SeatProgress, ...] = ()
    """For AskJobs: what the processes of each asked target do now (active, parked, gone, lost)."""


# --- events: past tense, to anyone --------------------------------------------------------------------------------


class SeatEvent(Message):
    """Base of what happened to a seat. Said by the node's manager (``allocated``: by the plugin)."""

    node: str
    seat: str
    state: SeatState
    previous: SeatState | None = None
    epoch: int = 0
    seq: int = 0
    """Rises with everything that a node's manager says; orders what is said about a seat within one epoch."""
    op: str = ""
    model: str = ""
    group: str = ""
    pod: str = ""
    """``namespace/name``."""
    pod_uid: str = ""
    endpoint: str | None = None
    """``http://host:port`` of the engine, once known."""
    reason: str = ""
    vram_bytes: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds of the switch by phase: drain (decision to drained), control (drained to
    journaled), park, activate, verify, release; and total."""
    last_call_at: float | None = None
    """Unix seconds at which the last backend call of an activation ended."""
    stall_seconds: float = 0.0
    """Above 0: its requests in flight are frozen with it and go on when it is back. Routers keep them for so many wall
    seconds from now; 0: they cut them, if it leaves."""


class SeatAllocated(SeatEvent):
    """Kubelet gave this seat to a container (the plugin's hint; which container, PodResources tells)."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.allocated"


class SeatQueued(SeatEvent):
    """Its container waits at the start gate."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.queued"


class SeatStarted(SeatEvent):
    """It got its ticket; the engine starts."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.started"


class SeatActivated(SeatEvent):
    """It holds VRAM and serves."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.activated"


class SeatClosed(SeatEvent):
    """It drains: routers send nothing new and acknowledge (seat, epoch)."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.closed"


class SeatEvicted(SeatEvent):
    """Its VRAM is being moved out. Streams that still run are cut by the routers."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.evicted"


class SeatParked(SeatEvent):
    """Its VRAM is free, by evidence."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.parked"


class SeatLeased(SeatEvent):
    """Its group's GPUs are reserved for it and its VRAM is being moved back."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.leased"


class SeatMoved(SeatEvent):
    """Another group's GPUs are reserved for it and its VRAM is being moved back there."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.moved"


class SeatExited(SeatEvent):
    """Its container exited; kubelet will start it again."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.exited"


class SeatLost(SeatEvent):
    """Its processes cannot be used again; it will cold-start."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.lost"


class SeatQuarantined(SeatEvent):
    """It holds its GPUs and nobody touches it; the reason says what a person should look at."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.quarantined"


class SeatReleased(SeatEvent):
    """Its pod was deleted; its processes are ending."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.released"


class SeatFreed(SeatEvent):
    """Nobody owns it any more."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.freed"


class SeatPinned(SeatEvent):
    """An operator pinned it."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.pinned"


class SeatUnpinned(SeatEvent):
    """An operator unpinned it."""

    subject_template: ClassVar[str] = "kyb.v1.evt.{node}.{seat}.unpinned"


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
"""Which event tells that a seat entered a state."""


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
    """The XID event that said so, if one did."""
    groups: tuple[str, ...] = ()
    """Names of all groups that contain it."""
    seats: tuple[str, ...] = ()
    """All seats of these groups."""


class AuditRecord(Message):
    """Somebody asked for something that changes what runs."""

    subject_template: ClassVar[str] = "kyb.v1.audit.{actor}.{verb}"

    actor: str
    verb: str
    node: str = ""
    seat: str = ""
    accepted: bool = True
    reason: str = ""
    remote: str = ""
    """Address of the caller."""
