"""The state of one node: its groups, its seats and the switches under way, and the hooks of its riders.

Pure. Only ``NodeState.transition`` advances a seat: with its epoch and its event. Only the modules above call it, and
only while ``Board.handle`` runs; everything else reads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from inspect import isfunction
from typing import Any

from kybernate.config import STANDARD, TIERS, Tier
from kybernate.messages import (
    EVENT_OF_STATE,
    AskJobs,
    Command,
    CommandReply,
    GroupDecided,
    JobReply,
    JobStatus,
    KillJob,
    ReleaseJob,
    SeatEvent,
    SeatProgress,
    SeatTarget,
    SwitchJob,
)
from kybernate.policy import Policy, SeatView
from kybernate.seat import SeatState
from kybernate.topology import Group, peers
from services.gpu_manager.core.demand import MOST_DURATIONS, MOST_PHASES, PHASES, DemandLevels, Learning, Routers
from services.gpu_manager.core.facts import Promise, Trigger, after
from services.gpu_manager.core.inputs import (
    ForeignProcess,
    InputRefused,
    InvariantBroken,
    ModelTime,
    Now,
    StartTicket,
    UnixTime,
    WallTime,
)
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat, PodTerms
from services.gpu_manager.core.seat_pod import Reserved, SeatPod
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.ledger import OperatorOrder

Effect = (
    SeatEvent
    | SwitchJob
    | ReleaseJob
    | KillJob
    | AskJobs
    | StartTicket
    | CommandReply
    | GroupDecided
    | InvariantBroken
    | InputRefused
)
"""What follows from a message: the shell carries it out once the ledger is written."""

Hook = Callable[..., object]
MOVE_SECONDS = 3.0
"""Model seconds that a move is assumed to cost until the first one was measured."""
RESEND_SECONDS = 1.0
"""Wall: how long to wait for the checkpointer's answer before the job is sent again."""
CUT_GRACE_SECONDS = 2.0
"""Wall: how long after a cut the engine may take to notice that its callers left."""


# --- one switch of a group --------------------------------------------------------------------------------------------


class SwitchPhase(StrEnum):
    """How far a switch is."""

    DRAINING = "draining"  # the victim serves what is in flight and gets nothing new
    CUTTING = "cutting"  # its streams are cut; the engine notices that the callers left
    JOB = "job"  # the checkpointer parks the victim and activates the incoming seat
    DONE = "done"


class SwitchTrigger(StrEnum):
    """What can happen to a switch."""

    IDLE = "idle"  # nothing is in flight any more
    DEADLINE = "deadline"  # the drain took too long
    GRACE_OVER = "grace-over"  # the engine had time to notice the cut
    CALLED_OFF = "called-off"  # the eviction is not justified any more; the victim serves on
    VICTIM_LEFT = "victim-left"  # it exited or was deleted before the job was sent
    REFUSED = "refused"  # the checkpointer does not take the job
    FINISHED = "finished"  # the checkpointer reports the end of the job


_P, _W = SwitchPhase, SwitchTrigger
SWITCH_TRANSITIONS: dict[tuple[SwitchPhase, SwitchTrigger], SwitchPhase] = {
    (_P.DRAINING, _W.IDLE): _P.JOB,
    (_P.DRAINING, _W.DEADLINE): _P.CUTTING,
    (_P.DRAINING, _W.CALLED_OFF): _P.DONE,
    (_P.DRAINING, _W.VICTIM_LEFT): _P.DONE,
    (_P.CUTTING, _W.IDLE): _P.JOB,
    (_P.CUTTING, _W.GRACE_OVER): _P.JOB,
    (_P.CUTTING, _W.VICTIM_LEFT): _P.DONE,
    (_P.JOB, _W.VICTIM_LEFT): _P.DONE,
    (_P.JOB, _W.REFUSED): _P.DONE,
    (_P.JOB, _W.FINISHED): _P.DONE,
}
"""A switch without a victim begins in the phase ``job``."""


@dataclass(slots=True)
class Drain:
    """How the victim leaves."""

    deadline: ModelTime
    """Draining ends with a cut then."""
    announced: WallTime = WallTime(0.0)
    """When the roster entry that closes the victim was written; 0: it is not."""
    overdue: WallTime = WallTime(0.0)
    """Since then routers that have not acknowledged it are not listed; 0: they are."""
    quiet: WallTime | None = None
    """Every router has been quiet since then."""
    idle: bool = False
    """The engine, asked since then, computes nothing."""
    cut: WallTime = WallTime(0.0)


@dataclass(slots=True)
class JobExchange:
    """What is known of the SwitchJob at the checkpointer."""

    sent: WallTime | None = None
    """When it was last sent; None: send it now."""
    journaled: bool = False
    """The checkpointer has it in its journal: it finishes without the manager."""


@dataclass(slots=True)
class SwitchTimes:
    """When the steps of a switch happened, for what is learned and reported."""

    decided: WallTime
    drained: WallTime
    """The victim was drained; without a victim, as ``decided``."""
    leaves: WallTime | None = None
    """Since then only the switch itself keeps the victim, where it had nothing in flight from the beginning."""
    parked: WallTime | None = None
    """The victim's VRAM was free."""
    control_seconds: float = 0.0
    """From drained until the job was journaled."""
    park_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Of the park."""


@dataclass(slots=True)
class GroupSwitch:
    """One switch of a group: which seat leaves, which one arrives, and how far it is."""

    op: str
    epoch: int
    group: str
    victim: str | None
    incoming: str | None
    cause: str
    phase: SwitchPhase
    drain: Drain
    times: SwitchTimes
    job: JobExchange = field(default_factory=JobExchange)
    clears_for: str | None = None
    """A seat of another group for which these GPUs are cleared."""
    room_for: str | None = None
    """A seat of this group for which more than the victim has to leave."""
    ordered: bool = False
    """An operator wants the victim parked: nothing calls the drain off."""

    def advance(self, trigger: SwitchTrigger) -> None:
        """Follow the table. A pair that it does not list is a KeyError and changes nothing."""
        self.phase = SWITCH_TRANSITIONS[self.phase, trigger]

    @property
    def holds_group(self) -> bool:
        """Its job is sent, or about to be: the checkpointer may fill the group's GPUs until the switch ends."""
        return self.phase is SwitchPhase.JOB

    @property
    def beneficiary(self) -> str | None:
        """The seat for which the victim leaves: the incoming one, or one that needs more than the victim's place."""
        return self.incoming or self.clears_for or self.room_for


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """GPUs that seats of other groups hold are being cleared for a seat of this group."""

    seat: str
    since: ModelTime


@dataclass(frozen=True, slots=True)
class Woke:
    """A seat had memory while it rested."""

    model: str
    """Its owner's then."""
    times: int
    """Since the manager's start."""
    at: UnixTime
    """The last time."""
    reason: str


@dataclass(slots=True)
class GroupState:
    """One group and what the arbiter remembers of it."""

    group: Group
    neighbours: tuple[Group, ...]
    """Other groups that share a GPU with it."""
    peers: tuple[Group, ...]
    """Other groups to which its seats may move."""
    backoff: Backoff = field(default_factory=Backoff)
    """Switches that failed in a row; while active, no other one begins."""
    wake: ModelTime | None = None
    """When the policy wants to decide again."""
    why: str = ""
    """The reason of the last decision, or what forbids one."""
    picked: str = ""
    """The seat that the last decision would activate; empty: none."""
    settles: bool = False
    """That decision only waits until a holder has been active for long enough."""
    kept: dict[str, WallTime] = field(default_factory=dict)
    """Seats of other groups that end their engines and start here: until when each has a place."""
    stay_due: WallTime = WallTime(0.0)
    """Earliest time of the next event about requests that wait while nothing changes."""


@dataclass(frozen=True, slots=True)
class Lane:
    """GPUs that share a PCIe switch or the host's memory, and how many switches copy there at full speed."""

    gpus: frozenset[str]
    transfers: int


@dataclass(frozen=True)
class NodeSetup:
    """What a node is configured to be; constant as long as the board lives."""

    node: str
    groups: tuple[Group, ...]
    policy: Policy
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    reserved: Reserved = field(default_factory=dict)
    drain_seconds: float = 60.0
    """Model: bounds draining."""
    warmup: bool = True
    """Start seats without demand."""
    start_within_seconds: float = 600.0
    """Wall: without warm-up, a container at the gate becomes demand after this."""
    host_bytes: int | None = None
    """Host memory for all seats together; None: no limit."""
    lanes: tuple[Lane, ...] = ()
    """Empty: no limit."""


@dataclass
class NodeState:
    """The whole state of one node's manager; ``board.broken_invariants`` checks it. Epochs and seqs only rise."""

    setup: NodeSetup
    riders: "Mapping[Hook, tuple[Rider, ...]]"
    """By hook, a method of ``Rider``: those that have it, in the order in which they are asked."""
    manager_url: str = ""
    epoch: int = 0
    seq: int = 0
    recovered: bool = False
    bus_up: bool = False
    bus_lost: ModelTime | None = None
    """The bus is down since then."""
    seats: dict[str, ManagedSeat] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    switches: dict[str, GroupSwitch] = field(default_factory=dict)
    """By group."""
    claims: dict[str, GpuClaim] = field(default_factory=dict)
    """By group."""
    levels: DemandLevels = field(default_factory=DemandLevels)
    learning: Learning = field(default_factory=Learning)
    routers: Routers = field(default_factory=Routers)
    foreign: tuple[ForeignProcess, ...] = ()
    """Processes on the GPUs that belong to no seat."""
    faulty: Mapping[str, str] = field(default_factory=dict)
    """GPU → why it is faulty, as the device plugin sees it. No seat is touched for that."""
    drains: dict[str, OperatorOrder] = field(default_factory=dict)
    """Drains in force by group; under the empty name that of the node. Nothing is started or activated there."""
    moves: dict[str, OperatorOrder] = field(default_factory=dict)
    """Seat → its move by an operator, which goes on or has failed."""
    broken: dict[str, str] = field(default_factory=dict)
    """GPU → the invariant that does not hold on it now: nothing is granted there."""
    pods_read: WallTime = WallTime(0.0)
    """The last read of the pods."""
    violations: int = 0
    """How often an invariant was found broken on a GPU since the start."""
    woke: dict[str, Woke] = field(default_factory=dict)
    """By seat that had memory while it rested, since the start."""
    refused: int = 0
    """How many inputs contradicted the state and were refused since the start."""
    move_seconds: float = MOVE_SECONDS
    """Learned, model seconds: what activating a seat on another group costs beyond activating it."""
    immovable: str = ""
    """Why no seat of this node can move: the driver cannot; empty as long as that is not known."""
    spills: int = 0
    """How often a seat was parked by a restart, or its copy dropped, for lack of host memory since the start."""
    moved_views: dict[str, SeatView] = field(default_factory=dict)
    """Cache: parked seats as other groups see them; for one message, and until anything changes."""
    effects: list[Effect] = field(default_factory=list)
    """What follows from the message that is being handled."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name, groups = self.setup.node, self.setup.groups
        gpus = {group.name: {*group.uuids} for group in groups}
        may_move_to = peers(groups)
        for group in groups:
            sharing = tuple(o for o in groups if o.name != group.name and gpus[o.name] & gpus[group.name])
            self.groups[group.name] = GroupState(group, sharing, may_move_to[group.name])
            for seat in group.seat_ids:
                self.seats.setdefault(seat, self.unowned_seat(seat, group))

    def unowned_seat(self, seat: str, home: Group) -> ManagedSeat:
        """A seat that no pod owns."""
        return ManagedSeat(seat, home, home, home, PodTerms(self.setup.tiers[STANDARD]))

    def own(self, seat: ManagedSeat, pod: SeatPod) -> None:
        """The pod owns the seat, as it is described now; its annotations are parsed when they change."""
        if seat.pod is None or seat.pod.notes != pod.notes or seat.pod.uid != pod.uid:
            seat.terms = PodTerms.of(pod, self.setup.tiers, self.setup.reserved)
            seat.model = seat.terms.model
        seat.pod = pod

    def switch_of_op(self, op: str) -> GroupSwitch | None:
        """The switch that the checkpointer knows by this name."""
        return next((switch for switch in self.switches.values() if switch.op == op), None)

    def switch_leaving(self, seat: ManagedSeat) -> GroupSwitch | None:
        """The switch in which this seat leaves the group that it is on. (A switch that it left before may still bring
        its successor there.)"""
        switch = self.switches.get(seat.group.name)
        return switch if switch is not None and switch.victim == seat.id else None

    def gpus_of(self, seat: ManagedSeat) -> set[str]:
        """UUIDs of the GPUs that its processes may be on: those of its group; where that is not known, of its pool."""
        pool = (seat.home, *self.groups[seat.home.name].peers) if seat.facts.unlocated else ()
        return {uuid for group in (seat.group, *pool) for uuid in group.uuids}

    # --- changes ------------------------------------------------------------------------------------------------------

    def on_bus(self, connected: bool, now: Now) -> None:
        """Without the bus nothing is evicted and drains stand still; once it is back, routers have to be known
        first."""
        if connected and not self.bus_up:
            self.routers.unsettle(now)
            if self.bus_lost is not None:
                for switch in self.switches.values():
                    switch.drain.deadline += now.model - self.bus_lost
            self.bus_lost = None
        elif not connected and self.bus_up:
            self.bus_lost = now.model
        self.bus_up = connected

    def next_epoch(self, now: Now) -> int:
        """An epoch above everything this node has seen."""
        self.epoch = max(self.epoch, int(float(now.unix) * 1000)) + 1
        return self.epoch

    def next_seq(self, now: Now) -> int:
        """The number of the next event: above all before, also over a restart."""
        self.seq = max(self.seq + 1, int(float(now.unix) * 1_000_000))
        return self.seq

    def transition(
        self,
        seat: ManagedSeat,
        trigger: Trigger,
        now: Now,
        *,
        epoch: int | None = None,
        switch: GroupSwitch | None = None,
        reason: str = "",
        to: Group | None = None,
        seconds: dict[str, float] | None = None,
        progress: SeatProgress | None = None,
    ) -> None:
        """Advance a seat by the table and emit the event. Raises IllegalTransitionError and changes nothing.

        ``epoch``: None draws the next one. ``to``: the group that it moves to. ``seconds``: what an activation
        measured. ``progress``: what the checkpointer reported of it.
        """
        away = seat.state is SeatState.STARTING and seat.group is not seat.home
        before, backend = seat.become(after(seat.facts, trigger), to), seat.backend
        if away and seat.state is not SeatState.ACTIVE:  # its start there has failed
            seat.stay(now)
        if progress is not None:
            for rider in self.riders[Rider.reported]:
                rider.reported(self, seat, before, progress)
        for rider in self.riders[Rider.after]:
            rider.after(self, seat, switch, now)
        self.moved_views.clear()
        seat.epoch, seat.reason = self.next_epoch(now) if epoch is None else epoch, reason
        took = now.wall - seat.entered_wall
        seat.entered, seat.entered_wall = now.unix, now.wall
        seat.op, cause = (switch.op, switch.cause) if switch else ("", seat.default_cause)
        if PHASES.get(before) is seat.state:
            self._learn(f"{backend} {before}", took)
            self._learn(f"{seat.model} {backend} {before}", took)
        if seat.state in (SeatState.ACTIVE, SeatState.LOST):
            self.levels.unpoke(seat.id)
        if seat.state is SeatState.LOST:
            self.end_processes(seat, cause=cause)
        event = EVENT_OF_STATE[seat.state]
        last_call = progress.last_call_at if progress is not None and seconds else None
        self.emit(seat, event, now, cause=cause, previous=before, seconds=seconds, last_call_at=last_call)

    def _learn(self, phase: str, seconds: float) -> None:
        """A phase that ended well took so many wall seconds."""
        durations = self.learning.durations
        durations[phase] = [*durations.pop(phase, [])[1 - MOST_DURATIONS :], seconds]
        while len(durations) > MOST_PHASES:
            del durations[next(iter(durations))]

    def emit(
        self,
        seat: ManagedSeat,
        kind: type[SeatEvent],
        now: Now,
        *,
        cause: str = "",
        previous: SeatState | None = None,
        seconds: dict[str, float] | None = None,
        last_call_at: float | None = None,
    ) -> None:
        """Publish an event about a seat as it is now."""
        pod, seq = seat.pod, self.next_seq(now)
        self.effects.append(
            kind(
                id=f"{self.name}:{seat.epoch}:{kind.__name__}:{seq}",
                cause=cause or seat.default_cause,
                node=self.name,
                seat=seat.id,
                state=seat.state,
                previous=previous,
                epoch=seat.epoch,
                seq=seq,
                op=seat.op,
                model=seat.model,
                group=seat.group.name,
                way=seat.durable.way,
                came_from=seat.durable.came_from,
                pod=pod.pod if pod else "",
                pod_uid=pod.uid if pod else "",
                endpoint=pod.endpoint if pod else None,
                reason=seat.reason,
                vram_bytes=seat.durable.vram_bytes,
                seconds=seconds or {},
                last_call_at=last_call_at,
            )
        )

    def end_processes(
        self, seat: ManagedSeat, *, by: type[KillJob | ReleaseJob] = KillJob, cause: str = "", epoch: int | None = None
    ) -> None:
        """Ask the checkpointer to end them. ``epoch``: None is the seat's."""
        epoch = seat.epoch if epoch is None else epoch
        self.effects.append(by(cause=cause or seat.default_cause, node=self.name, epoch=epoch, target=seat.target()))

    def drop_copy(self, seat: ManagedSeat, reason: str, now: Now, epoch: int) -> None:
        """End the engine of a parked seat: its copy is gone, and it starts cold."""
        seat.durable.spilled = seat.reason = reason
        self.moved_views.clear()
        self.emit(seat, EVENT_OF_STATE[seat.state], now, previous=seat.state)
        self.kill_copy(seat, epoch)

    def kill_copy(self, seat: ManagedSeat, epoch: int) -> None:
        """Send the kill of a copy that was decided to be dropped."""
        seat.learn(promise=Promise.DROPS)
        self.end_processes(seat, epoch=epoch)


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric, of this node and by these labels."""

    name: str
    text: str
    value: float | None
    """None: no sample, only its text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    counter: bool = False


class Rider:
    """A feature in one file that forbids, delays and follows decisions. Each hook that it has is called; here are all.

    It never chooses a seat. It may add rows to the list (``core.obstacles.row``). No rider imports another; switch and
    arbiter name none, and no shell does.
    """

    name = ""
    """Of what it remembers and shows."""
    record: type[Any] = object
    """What it remembers of a seat while a pod owns it, also over a restart: a dataclass of defaults and JSON types."""

    @classmethod
    def of(cls, seat: ManagedSeat) -> Any:
        """Its record of a seat, which only it changes."""
        known = seat.records.get(cls.name, {})
        if isinstance(known, dict):  # as the ledger has it
            names = {one.name for one in fields(cls.record)}
            seat.records[cls.name] = known = cls.record(**{name: known[name] for name in names & known.keys()})
        return known

    def row(self, node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
        """What the roster shows of a seat: fields of ``SeatRecord``, and others, which stand in its ``riders``."""
        return {}

    def metrics(self, node: NodeState, now: Now) -> Iterable[Sample]:
        """What it measures."""
        return ()

    def why(self, node: NodeState, of: Group | ManagedSeat | None, now: Now) -> Any:
        """For ``GET /v1/why``: of the node, under its name; or fields of a group or a seat. None: nothing."""
        return None

    def answers(self, node: NodeState, command: Command, now: Now) -> CommandReply | None:
        """Its answer to a command; None: that of another one."""
        return None

    def expels(self, node: NodeState, holder: ManagedSeat) -> str:
        """Why a seat has to leave its group, whatever the policy decides; empty: it need not."""
        return ""

    def waits(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        """Why the job of a switch is not sent now. Changes nothing."""
        return None

    def parks(self, node: NodeState, victim: ManagedSeat, target: SeatTarget) -> SeatTarget:
        """A job is about to be sent, since no rider waits: how the checkpointer parks its victim."""
        return target

    def starts(self, node: NodeState, seat: ManagedSeat) -> None:
        """A seat is about to get a ticket."""

    def before_serving(self, node: NodeState, seat: ManagedSeat, now: Now) -> bool:
        """An engine is healthy: may its seat serve."""
        return True

    def reported(self, node: NodeState, seat: ManagedSeat, before: SeatState, half: SeatProgress) -> None:
        """How a park or an activation of a seat ended, which came from this state."""

    def after(self, node: NodeState, seat: ManagedSeat, switch: GroupSwitch | None, now: Now) -> None:
        """The state of a seat has changed, in this switch if in one."""

    def found(self, node: NodeState, seat: ManagedSeat, now: Now, *, remembered: bool) -> None:
        """A seat was found with its processes. ``remembered``: by the ledger, which may be older than what it keeps."""

    def step(self, node: NodeState, now: Now) -> None:
        """Every group has followed a message."""

    def on_status(self, node: NodeState, status: JobStatus, now: Now) -> None:
        """The status of a job that is no switch's."""

    def on_answer(self, node: NodeState, op: str, reply: JobReply, now: Now) -> None:
        """The answer to a job that is no switch's."""


def by_hook(riders: tuple[Rider, ...]) -> dict[Hook, tuple[Rider, ...]]:
    """``NodeState.riders`` of these."""
    hooks = {name: hook for name, hook in vars(Rider).items() if isfunction(hook) and not name.startswith("_")}
    return {hook: tuple(one for one in riders if getattr(type(one), name) is not hook) for name, hook in hooks.items()}
