"""Jobs and reports between manager and checkpointer, on the node bus."""

from typing import ClassVar, Literal

from pydantic import Field

from kybernate.envelope import Message, Record


class SeatTarget(Record):
    """Everything the checkpointer needs to find and move one seat's processes."""

    seat: str
    pod_uid: str
    container_id: str
    """As kubelet reports it: ``containerd://…``, or ``process://<pid>`` from the fake kubelet."""
    gpus: tuple[str, ...]
    """UUIDs of the group's GPUs, in the group's order."""
    vram_bytes: int = Field(default=0, ge=0)
    """Expected footprint over all GPUs together; 0 if not known yet."""
    backend: str = "cuda"
    parked_on: tuple[str, ...] = ()
    """UUIDs of the GPUs that it was parked on, where it is parked; for a checkpointer that lost its own record."""
    kept_bytes: int = Field(default=0, ge=0)
    """VRAM that the processes of parked seats keep, on that of these GPUs where it is most; for the same."""
    endpoint: str = ""
    """Where its engine answers: ``http://<pod IP>:<port>``; empty: not known."""
    engine_key: str = ""
    """The file of the key that its engine requires, ``namespace.name``; empty: none."""
    verify: bool = True
    """Compare its models' answers before it serves again."""
    usual_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Wall: what the half that is asked of it usually takes, as learned; 0: not known. Deadlines follow from it."""


class Job(Message):
    """Base of the manager's requests to the checkpointer. ``epoch`` fences: a lower one than seen is refused."""

    node: str
    epoch: int


class SwitchJob(Job):
    """Park these seats, then activate that one. Once journaled it finishes without any bus."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.switch"

    op: str
    group: str
    park: tuple[SeatTarget, ...] = ()
    activate: SeatTarget | None = None


class ReleaseJob(Job):
    """The pod of this seat is deleted: end it if it is parked, thaw what else is frozen, and forget it."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.release"

    target: SeatTarget


class KillJob(Job):
    """The seat's processes are beyond use: end them and prove that their VRAM is free."""

    subject_template: ClassVar[str] = "kyb.v1.job.{node}.kill"

    target: SeatTarget


class AskJobs(Job):
    """Request the status of these operations and of these seats' processes. Moves nothing.

    An epoch above 0 fences: on the GPUs of these seats no job with a lower one is taken after the answer. It is refused
    unless it is above all that these GPUs have seen.
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


class SeatOutcome(Record):
    """Where a job has brought one seat, or how a seat was found."""

    outcome: Outcome
    reason: str = ""
    """Why it did not go as asked; empty when it did."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds by step: lock, checkpoint, verify, freeze / thaw, restore, unlock, verify. ``verify`` has the proofs
    and the requests to the engine."""
    vram_bytes: int = 0
    """Footprint seen at park, over all GPUs."""
    host_bytes: int = 0
    """Host memory that its container takes, parked or active: anonymous and shared pages of its control group. Without
    one, of a parked seat the copy."""
    residue_bytes: int = 0
    """VRAM that its parked processes keep, over all GPUs."""
    last_call_at: float | None = None
    """Unix seconds at which the last backend call of this half ended."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that its memory is on, or was on when it was parked; empty where that is not known."""
    keeper: bool = True
    """For AskJobs: kyb-run lives in its container, or an older checkpointer does not say; with ``gone`` it has started
    nothing that lives."""
    no_context: bool = False
    """No process of its container has a CUDA context: it holds no VRAM, and a new context goes to the GPUs of its home.
    """
    move_refused: Literal["", "seat", "node"] = ""
    """It was to be restored on other GPUs than it was parked on, and this seat, or any of this node, cannot be: the
    reason says why."""
    failed: bool = False
    """The backend failed with this seat."""
    refused: bool = False
    """A rule forbids this backend for the seat, also when it is asked again."""
    unverified: str = ""
    """Why the answers of its engine cannot be compared: it serves unverified."""


class SeatProgress(SeatOutcome):
    """How far a job is with one seat."""

    seat: str
    pod_uid: str
    container_id: str


class JobStatus(Record):
    """The complete status of one switch; the same in reports and in answers, so a lost report loses nothing."""

    op: str
    epoch: int
    group: str
    park: tuple[SeatProgress, ...] = ()
    activate: SeatProgress | None = None
    journaled_at: float = 0.0
    """Unix seconds."""
    done: bool = False


class JobProgress(Message):
    """The checkpointer reports that one seat of a job has ended its half, or the job, as its whole present status."""

    subject_template: ClassVar[str] = "kyb.v1.rpt.{node}.progress"

    node: str
    status: JobStatus


class JobReply(Record):
    """The checkpointer's answer to a job: journaled, so that a kill of it loses nothing, or refused."""

    accepted: bool
    code: str = ""
    """``stale-epoch``, ``busy``, ``unknown-op``, ``unsupported`` … when refused."""
    reason: str = ""
    highest_epoch: int = 0
    """The highest epoch the checkpointer has seen; a manager goes above it."""
    jobs: tuple[JobStatus, ...] = ()
    """For AskJobs: the named operations, as far as they are known, and all unfinished switches."""
    seats: tuple[SeatProgress, ...] = ()
    """For AskJobs: the state of each target's processes (active, parked, gone, lost)."""
    ends: bool = False
    """For ReleaseJob: the checkpointer ends the running processes itself, so kubelet's signal should wait for that."""
