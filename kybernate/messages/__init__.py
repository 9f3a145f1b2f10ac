"""Every message of Kybernate. A message knows its subject; no other module contains subjects.

Signals are levels, commands are imperative and answered, jobs and reports live on the node bus between manager and
checkpointer, events are in the past tense. Subjects and delivery: ``docs/dev/bus.md``.
"""

from kybernate.messages.commands import (
    ActivateSeat,
    Command,
    CommandReply,
    DrainNode,
    MigrateSeat,
    OrderCommand,
    OrderStatus,
    ParkSeat,
    PinSeat,
    ResumeNode,
    SeatCommand,
    UnpinSeat,
)
from kybernate.messages.events import (
    EVENT_OF_STATE,
    WAITED_IN_VAIN,
    AuditRecord,
    DecidedBy,
    DecisionKind,
    GpuHealthChanged,
    GroupDecided,
    RequestEnded,
    SeatActivated,
    SeatAllocated,
    SeatClosed,
    SeatEvent,
    SeatEvicted,
    SeatExited,
    SeatFacts,
    SeatFreed,
    SeatLeased,
    SeatLoad,
    SeatLost,
    SeatMoved,
    SeatParked,
    SeatPinned,
    SeatQuarantined,
    SeatQueued,
    SeatReleased,
    SeatStarted,
    SeatUnpinned,
)
from kybernate.messages.jobs import (
    AskJobs,
    Job,
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    Outcome,
    ReleaseJob,
    SeatOutcome,
    SeatProgress,
    SeatTarget,
    SwitchJob,
)
from kybernate.messages.signals import DrainAck, EngineFaults, NodeTrafficSignal, Presence, TrafficSignal
