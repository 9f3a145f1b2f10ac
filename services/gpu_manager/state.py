"""The state of one node: its groups, its seats and the switches under way. Pure data and its invariants.

The fields here are heavily correlated: a seat's ``state``, ``lease`` and ``residence`` change together in
``NodeState.transition``, and a switch's phase in ``GroupSwitch.advance``. Only the modules above change anything, and
only while ``Board.handle`` runs; everything else reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kybernate.annotations import REBALANCE, tier_problem
from kybernate.config import STANDARD, TIERS, Tier
from kybernate.messages import (
    EVENT_OF_STATE,
    AskJobs,
    CommandReply,
    KillJob,
    OrderChanged,
    ReleaseJob,
    RetargetJob,
    SeatEvent,
    SeatTarget,
    SwitchJob,
)
from kybernate.policy import Policy, SeatView
from kybernate.roster import SeatRecord
from kybernate.seat import COMING, HOLDING, SeatState, Trigger, advance
from kybernate.topology import Group, peers
from services.gpu_manager.demand import DemandLevels, Learning, Routers
from services.gpu_manager.inputs import (
    ForeignProcess,
    GroupDecided,
    InputRefused,
    InvariantBroken,
    ModelTime,
    Now,
    StartCall,
    StartTicket,
    UnixTime,
    WallTime,
)
from services.gpu_manager.ledger import Durable, Freeze, OperatorOrder
from services.gpu_manager.seat_pod import SeatPod, refusal

Effect = (
    SeatEvent
    | OrderChanged
    | SwitchJob
    | RetargetJob
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

START_DEADLINE_SECONDS = 270.0
"""Wall: a runtime may take two minutes each to create and to start a container."""
MOVE_SECONDS = 3.0
"""Model seconds that a move is assumed to cost until the first one was measured."""
LAST_MOMENT_SECONDS = 0.5
"""Wall: a waiting call that ends within this time gets no ticket any more."""
RESTART = "restart"
"""Backend that parks by ending the container."""
PEAK_MARGIN = 1.05
"""Times the most VRAM that a seat was seen to use: what is reserved for it where seats share memory."""
MOVABLE_BACKENDS = ("cuda", "fake")
"""Backends that restore through the driver's checkpoint, which can place a process on another GPU."""
FROZEN_STATES = (SeatState.PARKING, SeatState.PARKED, SeatState.ACTIVATING, SeatState.MIGRATING)
"""States in which a seat's frozen requests stay frozen."""
_AT_HOME = (SeatState.FREE, SeatState.WAITING, SeatState.BACKOFF)
"""States without a process: a container starts, if ever, with the GPUs that kubelet gave it."""


# --- one seat ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Backoff:
    """Failures in a row, and until when they keep something from being tried again."""

    count: int = 0
    until: WallTime = WallTime(0.0)
    reason: str = ""

    def active(self, now: Now) -> bool:
        """True while it must not be tried again."""
        return now.wall < self.until

    def fail(self, now: Now, *, first: float, longest: float, least: float = 0.0) -> float:
        """Count one more failure and return the pause in wall seconds: doubled each time, within least and longest."""
        self.count += 1
        seconds = max(least, min(longest, first * 2.0 ** min(self.count, 64)))
        self.until = now.wall + seconds
        return seconds


@dataclass(slots=True)
class SeatBackoffs:
    """What has failed with one seat lately."""

    activation: Backoff = field(default_factory=Backoff)
    """Since it last served. While active, other seats of its group that serve or wait go first."""
    park: Backoff = field(default_factory=Backoff)
    """Since it was last parked. While active, other holders of its group leave first."""
    move: Backoff = field(default_factory=Backoff)
    """Since it last served, moves that failed without a refusal. While active, it is not moved."""


@dataclass(frozen=True, slots=True)
class PodTerms:
    """What counts for one seat by its pod's annotations; computed when the pod is seen, not for every decision."""

    tier: Tier
    """With the pod's own SLO and stall budget."""
    tier_name: str = STANDARD
    """As annotated, also where no tier has this name."""
    model: str = ""
    pinned: bool = False
    problems: tuple[str, ...] = ()
    """Annotations that cannot be used and count as absent, each with its remedy."""

    @classmethod
    def of(cls, pod: SeatPod, tiers: Mapping[str, Tier]) -> "PodTerms":
        """The terms of a pod where these tiers are configured."""
        notes = pod.notes
        bad_tier = tier_problem(notes.tier, tiers)
        own = {"slo_seconds": notes.slo_seconds, "stall_budget_seconds": notes.stall_budget_seconds}
        changes = {field: value for field, value in own.items() if value is not None}
        tier = tiers[notes.tier if bad_tier is None else STANDARD]
        problems = notes.problems if bad_tier is None else (bad_tier, *notes.problems)
        return cls(
            tier=tier.model_copy(update=changes) if changes else tier,
            tier_name=notes.tier,
            model=pod.model,
            pinned=notes.pin,
            problems=tuple(problem.text(pod.pod) for problem in problems),
        )


@dataclass(slots=True)
class Ownership:
    """The pod that owns a seat, as far as it is known."""

    terms: PodTerms
    pod: SeatPod | None = None
    misses: int = 0
    """Reads of the pods in a row in which the pod did not own the seat."""
    seen: WallTime = WallTime(0.0)
    """The last read of the pods in which the pod owned the seat."""
    ends: bool = False
    """The pod was seen in deletion: once it is not listed any more, kubelet has ended its containers."""


@dataclass(slots=True)
class GateState:
    """A seat's call and its last ticket at the start gate (whose call got it is in ``Durable``)."""

    call: StartCall | None = None
    called: WallTime | None = None
    """The first call since the last ticket: each call is short, and kubelet calls again."""
    confirmed: int = 0
    """Reads of the pods since that call was received in which the owner was still the same."""
    ticket_open: bool = False
    """The last ticket has not been used by a container yet, as far as was seen."""
    ticket_given: WallTime = WallTime(0.0)


@dataclass(slots=True)
class Residence:
    """The group of a seat's ID, and the group that it is on."""

    home: Group
    """Where its container starts."""
    group: Group
    """Whose GPUs it holds, or held when it was parked. Another one than ``home`` once it has moved."""
    parked_on: Group | None = None
    """Where its copy came from, while it moves to ``group``."""


@dataclass(slots=True)
class Usage:
    """When a seat last served requests, and whether an operator wants it active."""

    active_since: ModelTime = ModelTime(0.0)
    busy: ModelTime = ModelTime(0.0)
    """The last time that any request waited or was in flight."""
    unclaimed: bool = False
    """It was started only to have been started once, and has had no request since."""
    wanted_since: ModelTime | None = None
    """An operator wants it active since then."""
    wanted_until: WallTime = WallTime(0.0)
    """That wish lapses."""


@dataclass(slots=True)
class ManagedSeat:
    """One seat of this node."""

    id: str
    residence: Residence
    owner: Ownership
    durable: Durable = field(default_factory=Durable)
    """What survives a restart of the manager."""
    state: SeatState = SeatState.FREE
    epoch: int = 0
    lease: bool = False
    """Its group's GPUs are reserved for it. Follows ``state``; only of a RELEASING seat evidence decides."""
    gate: GateState = field(default_factory=GateState)
    backoff: SeatBackoffs = field(default_factory=SeatBackoffs)
    usage: Usage = field(default_factory=Usage)
    conflict: bool = False
    """Quarantined only because other seats seem to hold its group too; over when they do not."""
    processes_gone: bool = False
    """While RELEASING or LOST: the checkpointer found none of its processes."""
    ended_here: bool | None = None
    """While RELEASING: the checkpointer ends its processes, so kubelet's signal waits; None: not known yet."""
    outlives_list: bool = False
    """Since the restart: the driver has its processes although the pods say that its container does not run."""
    entered: UnixTime = UnixTime(0.0)
    """It entered its state then."""
    entered_wall: WallTime = WallTime(0.0)
    reason: str = ""
    cause: str = ""
    op: str = ""

    @property
    def group(self) -> Group:
        """The group that it is on."""
        return self.residence.group

    @property
    def home(self) -> Group:
        """The group of its ID."""
        return self.residence.home

    @property
    def pod(self) -> SeatPod | None:
        """The pod that owns it."""
        return self.owner.pod

    @property
    def model(self) -> str:
        """The model it serves; empty without an owner."""
        return self.owner.terms.model

    @property
    def pinned(self) -> bool:
        """True while an operator or its pod pins it."""
        return self.durable.pinned or self.owner.terms.pinned

    @property
    def default_cause(self) -> str:
        """The cause of messages about it that belong to no switch."""
        return self.cause or f"seat-{self.id}"

    def advance(self, trigger: Trigger, to: Group | None = None) -> SeatState:
        """Follow the table; lease, residence and freeze follow the state. Return the state before.

        ``to``: the group that it moves to. Raises IllegalTransitionError and changes nothing.
        """
        before, place = self.state, self.residence
        self.state = advance(before, trigger)
        if to is not None:
            place.parked_on, place.group = place.group, to
        elif self.state is SeatState.PARKED and before is SeatState.MIGRATING:
            place.group, place.parked_on = place.parked_on or place.group, None
        elif self.state is SeatState.ACTIVE:
            place.parked_on = None
        if self.state in _AT_HOME:
            place.group, place.parked_on = place.home, None
            self.durable.residue_bytes, self.durable.measured = 0, False
        if self.state is not SeatState.RELEASING:
            held, self.lease = self.lease, self.state in HOLDING
            if not self.lease:
                self.durable.reserved_bytes = None
            elif not held:
                self.durable.reserved_bytes = self.needed_bytes(self.group)
        if self.state not in FROZEN_STATES:
            self.durable.freeze = Freeze()
        match self.state:
            case SeatState.STARTING:
                self.gate.called = None
            case SeatState.ACTIVE:
                self.usage.wanted_since = None
            case SeatState.LOST:
                self.processes_gone = False
        return before

    def stall_seconds(self, now: Now) -> float:
        """Wall seconds for which routers still keep its frozen requests; 0: there are none, or no more."""
        freeze = self.durable.freeze
        return max(0.0, freeze.until - float(now.unix)) if freeze.since else 0.0

    def yields_group(self, now: Now) -> bool:
        """True while its failed activations keep it from taking the group again before others."""
        return self.state is SeatState.PARKED and self.backoff.activation.active(now)

    def calls(self, now: Now) -> bool:
        """True while kubelet waits at the gate for this owner, and long enough to use a ticket."""
        call = self.gate.call
        return call is not None and not self.owner.misses and call.until > now.unix + LAST_MOMENT_SECONDS

    def refused(self) -> str:
        """Why its container can never start; empty when it can."""
        return refusal(self.pod, self.group) if self.pod is not None else ""

    @property
    def starts_cold(self) -> bool:
        """True if it is parked by restart: its container ends, and starts again at its gate."""
        return self.pod is not None and self.pod.notes.backend == RESTART

    def needed_bytes(self, group: Group) -> int:
        """VRAM that a lease of this group is to reserve over all its GPUs; 0: all of it.

        Where seats share memory, what the pod declares counts as long as it uses no more; else the most that was seen,
        with a margin, once it was seen for a whole visit.
        """
        declared, durable = self.pod.vram_bytes if self.pod else 0, self.durable
        if group.slots == 1:
            return 0
        if not group.profile.packs:
            return max(declared, durable.vram_bytes)
        seen = max(durable.vram_bytes, durable.peak_bytes)
        if declared >= seen:
            return declared
        return round(seen * PEAK_MARGIN) if declared or durable.vram_bytes else 0

    def reserved_bytes(self, memory_bytes: int, on: Group | None = None, *, granted: bool = False) -> int:
        """VRAM to reserve on each GPU of its group, or of ``on``; of a holder at least what its lease reserves.

        ``granted``: only that.
        """
        group = on or self.group
        needs, held = self.needed_bytes(group), self.durable.reserved_bytes
        if self.lease and held is not None and group.name == self.group.name:
            needs = held if granted or not held else max(held, needs) if needs else 0
        return min(memory_bytes, -(-needs // len(group.gpus))) if needs else memory_bytes

    def residue_on(self, gpu: str) -> int:
        """VRAM on this GPU that its processes keep while it is parked."""
        gpus = self.group.gpus if self.durable.residue_bytes else ()
        return -(-self.durable.residue_bytes // len(gpus)) if any(one.uuid == gpu for one in gpus) else 0

    def target(self, on: Group | None = None) -> SeatTarget:
        """How the checkpointer finds its processes. ``on``: the group that it is to be on, if it is to move."""
        pod, place = self.pod, self.residence
        copied = (place.parked_on or place.group).gpus if self.state is SeatState.PARKED or self.state in COMING else ()
        return SeatTarget(
            seat=self.id,
            pod_uid=pod.uid if pod else "",
            container_id=self.durable.container_id or (pod.container_id if pod else None) or "",
            gpus=tuple(gpu.uuid for gpu in (on or self.group).gpus),
            vram_bytes=self.durable.vram_bytes or (pod.vram_bytes if pod else 0),
            backend=pod.notes.backend if pod else "cuda",
            parked_on=tuple(gpu.uuid for gpu in copied),
        )


# --- one switch -------------------------------------------------------------------------------------------------------


class SwitchPhase(StrEnum):
    """How far a switch is."""

    DRAINING = "draining"  # the victim serves what is in flight and gets nothing new
    CUTTING = "cutting"  # its streams are cut; the engine notices that the callers left
    JOB = "job"  # the checkpointer parks the victim and activates the incoming seat
    DONE = "done"


class SwitchTrigger(StrEnum):
    """What can happen to a switch."""

    IDLE = "idle"  # nothing is in flight any more, or it is frozen with the victim
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
"""A pair that is not listed is refused. A switch without a victim begins in the phase ``job``."""


class IllegalPhaseError(Exception):
    """The table has no such row; the switch stays as it was."""


@dataclass(slots=True)
class Drain:
    """How the victim leaves."""

    deadline: ModelTime
    """Draining ends with a cut then."""
    freeze: bool = False
    """Its requests in flight are frozen with it: only admission is waited for."""
    announced: bool = False
    """The roster entry that closes the victim is written."""
    quiet: WallTime | None = None
    """Every router has been quiet since then."""
    cut: WallTime = WallTime(0.0)


@dataclass(slots=True)
class JobExchange:
    """What is known of the SwitchJob at the checkpointer."""

    sent: WallTime | None = None
    """When it was last sent; None: send it now."""
    journaled: bool = False
    """The checkpointer has it on disk: it finishes without the manager."""


@dataclass(slots=True)
class Retarget:
    """Late binding: the questions to bring another seat than the job names."""

    asking: str | None = None
    """The seat in the question that is under way."""
    ask_after: WallTime = WallTime(0.0)
    """The last question was not answered; the next one waits until then."""
    settled: bool = False
    """The checkpointer has refused: it is not asked again."""
    offered: set[str] = field(default_factory=set)
    """All seats that the checkpointer may bring instead."""
    unanswered: set[str] = field(default_factory=set)
    """Seats offered in a question that was not answered; the checkpointer may have accepted it."""


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
    retarget: Retarget = field(default_factory=Retarget)
    clears_for: str | None = None
    """A seat of another group for which these GPUs are cleared."""
    room_for: str | None = None
    """A seat of this group for which more than the victim has to leave."""
    ordered: bool = False
    """An operator wants the victim parked: nothing calls the drain off."""

    def advance(self, trigger: SwitchTrigger) -> None:
        """Follow the table. Raises IllegalPhaseError and changes nothing."""
        try:
            self.phase = SWITCH_TRANSITIONS[self.phase, trigger]
        except KeyError:
            raise IllegalPhaseError(f"a switch in phase {self.phase} cannot take {trigger}") from None

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
    """The reason of the last decision."""
    settles: bool = False
    """That decision only waits until a holder has been active for long enough."""


@dataclass(frozen=True)
class NodeSetup:
    """What a node is configured to be; constant as long as the board lives."""

    node: str
    groups: tuple[Group, ...]
    policy: Policy
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    drain_seconds: float = 60.0
    """Model: bounds draining."""
    warmup: bool = True
    """Start seats without demand."""
    start_within_seconds: float = 600.0
    """Wall: without warm-up, a container at the gate becomes demand after this."""


@dataclass
class NodeState:
    """The whole state of one node's manager; ``view.validate`` checks its invariants. Epochs and seqs only rise."""

    setup: NodeSetup
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
    orders: dict[str, OperatorOrder] = field(default_factory=dict)
    """Operations of operators by name, oldest first."""
    drains: dict[str, OperatorOrder] = field(default_factory=dict)
    """Drains in force by group; under the empty name that of the node. Nothing is started or activated there."""
    phases: dict[str, str] = field(default_factory=dict)
    """Operation → the phase that was reported last."""
    moves: dict[str, str] = field(default_factory=dict)
    """Seat → the group to which an operator moves it: no other group brings it back."""
    broken: dict[str, str] = field(default_factory=dict)
    """GPU → the invariant that does not hold on it now: nothing is granted there."""
    violations: int = 0
    """How often an invariant was found broken on a GPU since the start."""
    refused: int = 0
    """How many inputs contradicted the state and were refused since the start."""
    move_seconds: float = MOVE_SECONDS
    """Learned, model seconds: what activating a seat on another group costs beyond activating it."""
    immovable: str = ""
    """Why no seat of this node can move: the driver cannot; empty as long as that is not known."""
    moved_views: dict[str, SeatView] = field(default_factory=dict)
    """Cache: parked seats as other groups see them; for one message, and until anything changes."""
    effects: list[Effect] = field(default_factory=list)
    """What follows from the message that is being handled."""

    def __post_init__(self) -> None:
        groups = self.setup.groups
        gpus = {group.name: {gpu.uuid for gpu in group.gpus} for group in groups}
        may_move_to = peers(groups)
        for group in groups:
            sharing = tuple(o for o in groups if o.name != group.name and gpus[o.name] & gpus[group.name])
            self.groups[group.name] = GroupState(group, sharing, may_move_to[group.name])
            for seat in group.seat_ids:
                self.seats.setdefault(seat, self.unowned_seat(seat, group))

    @property
    def name(self) -> str:
        """The node's name."""
        return self.setup.node

    def unowned_seat(self, seat: str, home: Group) -> ManagedSeat:
        """A seat that no pod owns."""
        standard = PodTerms(self.setup.tiers[STANDARD])
        return ManagedSeat(seat, Residence(home, home), Ownership(standard))

    def own(self, seat: ManagedSeat, pod: SeatPod) -> None:
        """The pod owns the seat, as it is described now; its annotations are parsed when they change."""
        if seat.owner.pod is None or seat.owner.pod.annotations != pod.annotations or seat.owner.pod.uid != pod.uid:
            seat.owner.terms = PodTerms.of(pod, self.setup.tiers)
        seat.owner.pod = pod

    def seats_on(self, group: Group) -> list[ManagedSeat]:
        """The seats that are on a group now: its own, without those that moved away, and those that moved there."""
        return [seat for seat in self.seats.values() if seat.residence.group.name == group.name]

    def switch_of_op(self, op: str) -> GroupSwitch | None:
        """The switch that the checkpointer knows by this name."""
        return next((switch for switch in self.switches.values() if switch.op == op), None)

    def switch_leaving(self, seat: ManagedSeat) -> GroupSwitch | None:
        """The switch in which this seat leaves the group that it is on. (A switch that it left before may still bring
        its successor there.)"""
        switch = self.switches.get(seat.group.name)
        return switch if switch is not None and switch.victim == seat.id else None

    def foreign_on(self, group: Group) -> str:
        """Why nothing is started on this group: a process that belongs to no seat uses its GPUs. Empty: none does."""
        if not self.foreign:
            return ""
        index = {uuid: gpu.index for gpu in group.gpus for uuid in {gpu.uuid, gpu.mig.parent if gpu.mig else gpu.uuid}}
        found = [f"{one.name} (pid {one.pid}) on GPU {index[one.gpu]}" for one in self.foreign if one.gpu in index]
        if not found:
            return ""
        return (
            f"group {group.name} is quarantined: {', '.join(found)} belongs to no seat; end it, or take these GPUs out "
            f"of the configuration"
        )

    def broken_on(self, group: Group) -> str:
        """The broken invariant that stops grants on this group. Empty: none."""
        return next((self.broken[gpu.uuid] for gpu in group.gpus if gpu.uuid in self.broken), "")

    def drain_on(self, group: Group) -> OperatorOrder | None:
        """The drain that empties GPUs of this group, also that of a group that shares one with it."""
        if not self.drains or "" in self.drains:
            return self.drains.get("")
        mine = {gpu.uuid for gpu in group.gpus}
        return next((drain for drain in self.drains.values() if not mine.isdisjoint(drain.gpus)), None)

    def drained_on(self, group: Group) -> str:
        """Why nothing is started or activated on this group: an operator drained it. Empty: no one did."""
        drain = self.drain_on(group)
        if drain is None:
            return ""
        command = f"kyb resume group {drain.target}" if drain.target else f"kyb resume node {self.name}"
        scope = drain.scope if drain.target else f"node {self.name}"
        return f"{scope} is drained for {drain.purpose} by {drain.actor}; it ends with: {command}"

    def shut_out(self, seat: ManagedSeat) -> str:
        """Why a drain keeps this seat from being activated anywhere; empty: nothing does, or it may move elsewhere."""
        drained = self.drained_on(seat.group)
        if not drained or seat.state in _AT_HOME or self.why_immovable(seat):
            return drained
        peers = self.groups[seat.group.name].peers
        return drained if all(self.drain_on(peer) is not None for peer in peers) else ""

    def why_immovable(self, seat: ManagedSeat) -> str:
        """Why this seat stays on its group although its profile rebalances; empty: it may move, or has no other
        group."""
        pod = seat.pod
        if pod is None or not self.groups[seat.group.name].peers:
            return ""
        if not pod.notes.rebalance:
            return f"pod {pod.pod} opted out ({REBALANCE})"
        if pod.notes.backend not in MOVABLE_BACKENDS:
            return f"backend {pod.notes.backend} cannot restore on other GPUs"
        return seat.durable.fixed or self.immovable

    def may_move(self, seat: ManagedSeat) -> bool:
        """True for a parked seat that could be activated on another group."""
        movable = seat.state is SeatState.PARKED and bool(self.groups[seat.group.name].peers)
        return movable and not self.why_immovable(seat)

    def blocked(self, seat: ManagedSeat, now: Now) -> str:
        """Why a seat is not started or activated at present, whatever the demand; empty: nothing prevents it."""
        if seat.yields_group(now):
            return seat.backoff.activation.reason
        return seat.refused() or self.shut_out(seat) or ("" if self.may_move(seat) else self.foreign_on(seat.group))

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
        last_call_at: float | None = None,
    ) -> None:
        """Advance a seat by the table and emit the event. Raises IllegalTransitionError and changes nothing.

        ``epoch``: None draws the next one. ``to``: the group that it moves to. ``seconds`` and ``last_call_at``: what
        an activation measured.
        """
        before = seat.advance(trigger, to)
        self.moved_views.clear()
        seat.epoch, seat.reason = self.next_epoch(now) if epoch is None else epoch, reason
        seat.entered, seat.entered_wall = now.unix, now.wall
        seat.op, cause = (switch.op, switch.cause) if switch else ("", seat.default_cause)
        if seat.state in (SeatState.ACTIVE, SeatState.LOST):
            self.levels.unpoke(seat.id)
        if seat.state is SeatState.LOST:
            self.effects.append(KillJob(cause=cause, node=self.name, epoch=seat.epoch, target=seat.target()))
        event = EVENT_OF_STATE[seat.state]
        self.emit(seat, event, now, cause=cause, previous=before, seconds=seconds, last_call_at=last_call_at)

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
        self.seq = max(self.seq + 1, int(float(now.unix) * 1_000_000))
        pod = seat.pod
        self.effects.append(
            kind(
                id=f"{self.name}:{seat.epoch}:{kind.__name__}:{self.seq}",
                cause=cause or seat.default_cause,
                node=self.name,
                seat=seat.id,
                state=seat.state,
                previous=previous,
                epoch=seat.epoch,
                seq=self.seq,
                op=seat.op,
                model=seat.model,
                group=seat.group.name,
                pod=pod.pod if pod else "",
                pod_uid=pod.uid if pod else "",
                endpoint=pod.endpoint if pod else None,
                reason=seat.reason,
                vram_bytes=seat.durable.vram_bytes,
                stall_seconds=seat.stall_seconds(now),
                seconds=seconds or {},
                last_call_at=last_call_at,
            )
        )

    def refuse(self, text: str) -> None:
        """Count and log an input that contradicts the state. The caller changes nothing."""
        self.refused += 1
        self.effects.append(InputRefused(text))

    def decided(self, group: Group, reason: str) -> None:
        """Log a decision and its reason."""
        self.effects.append(GroupDecided(group.name, reason))

    def record(self, seat: ManagedSeat, now: Now) -> SeatRecord:
        """The seat's row of the roster, as of now."""
        pod = seat.pod
        return SeatRecord(
            node=self.name,
            seat=seat.id,
            state=seat.state,
            epoch=seat.epoch,
            seq=self.seq,
            model=seat.model,
            endpoint=pod.endpoint if pod else None,
            group=seat.group.name,
            home_group=seat.home.name,
            gpus=tuple(gpu.index for gpu in seat.group.gpus),
            resource=seat.home.profile.resource,
            pod=pod.pod if pod else "",
            pod_uid=pod.uid if pod else "",
            tier=seat.owner.terms.tier_name,
            pinned=seat.pinned,
            vram_bytes=seat.durable.vram_bytes or (pod.vram_bytes if pod else 0),
            host_bytes=seat.durable.host_bytes,
            reason=seat.reason,
            since=float(seat.entered),
            started=seat.durable.started,
            max_requests=pod.notes.max_requests if pod else 0,
            activate_seconds=seat.durable.costs.switch_seconds,
            manager_url=self.manager_url,
            blocked=self.blocked(seat, now),
            drained=self.drained_on(seat.group),
            fixed=self.why_immovable(seat),
            stall_seconds=seat.stall_seconds(now),
            reported_at=float(now.unix),
        )
