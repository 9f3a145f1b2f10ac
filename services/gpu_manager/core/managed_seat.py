"""One seat of the node as the manager knows it: who owns it, what it holds, what failed with it lately.

Pure data with one rule: facts and the group change together, in ``ManagedSeat.become``. Only what ``Board.handle``
calls changes anything; everything else reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from kybernate import deadlines
from kybernate.annotations import tier_problem
from kybernate.config import STANDARD, Tier
from kybernate.cuda import FREED_SHARE
from kybernate.engines import RESTART
from kybernate.messages import SeatProgress, SeatTarget
from kybernate.seat import COMING, WITHOUT_RUN, SeatState, container_of, start_inside
from kybernate.topology import Group
from services.gpu_manager.core.facts import Facts, Process, Residence, Ticket
from services.gpu_manager.core.inputs import ModelTime, Now, StartCall, UnixTime, WallTime
from services.gpu_manager.core.seat_pod import Reserved, SeatPod, not_its_own
from services.gpu_manager.ledger import Durable

FIRST_STAY_SECONDS, LONGEST_STAY_SECONDS = 15.0, 600.0
"""Wall: how long a seat that could not be moved is left where it is: twice the first, at most the last."""
REHEARSAL = "rehearsal-"
"""Begins the names of rehearsals' jobs."""
PARKED_NOWHERE = "nothing tells on which GPUs it was parked; it starts cold"
"""Why a parked seat ends: a restore without a map goes to these GPUs, which another seat may have by now."""


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
    """With the pod's own SLO."""
    tier_name: str = STANDARD
    """As annotated, also where no tier has this name."""
    model: str = ""
    pinned: bool = False
    problems: tuple[str, ...] = ()
    """Annotations that cannot be used and count as absent, each with its remedy."""
    refused: str = ""
    """Why its seat is not started: what is reserved for other namespaces."""

    @classmethod
    def of(cls, pod: SeatPod, tiers: Mapping[str, Tier], reserved: Reserved) -> "PodTerms":
        """The terms of a pod where these tiers are configured, and these names reserved."""
        notes = pod.notes
        if refused := not_its_own(pod, reserved):
            return cls(tier=tiers[STANDARD], model=pod.pod, problems=(refused,), refused=refused)  # no model's name
        bad_tier = tier_problem(notes.tier, tiers)
        tier = tiers[notes.tier if bad_tier is None else STANDARD]
        problems = notes.problems if bad_tier is None else (bad_tier, *notes.problems)
        return cls(
            tier=tier if notes.slo_seconds is None else tier.model_copy(update={"slo_seconds": notes.slo_seconds}),
            tier_name=notes.tier,
            model=pod.model,
            pinned=notes.pin,
            problems=tuple(problem.text(pod.pod) for problem in problems),
        )


@dataclass(slots=True)
class GateState:
    """A seat's call and its last ticket at the start gate (whose call got it is in ``Durable``)."""

    call: StartCall | None = None
    called: WallTime | None = None
    """The first call since the last ticket: each call is short, and kubelet calls again."""
    confirmed: int = 0
    """Reads of the pods since that call was received in which the owner was still the same."""
    given: WallTime = WallTime(0.0)
    """The last ticket; this and what follows, ``starts`` writes."""
    given_call: UnixTime = UnixTime(inf)
    """When the call began that got it; infinity: not known."""
    expires: WallTime = WallTime(0.0)
    """Its end where kyb-run looks at the clock; 0: a process of it was seen."""
    answered_seconds: float = 0.0
    """For how long kubelet has answered since."""


@dataclass(slots=True)
class Rehearsal:
    """The first sleep and wake-up of an engine, in one job, before its seat serves."""

    op: str
    epoch: int
    container_id: str
    sent: WallTime
    done: bool = False
    begun: WallTime = WallTime(0.0)
    """When it was first sent."""


@dataclass(slots=True)
class Usage:
    """When a seat last served requests, and whether an operator wants it active."""

    active_since: ModelTime = ModelTime(0.0)
    busy: ModelTime = ModelTime(0.0)
    """The last time that any request waited or was in flight."""
    has_requests: bool = False
    """Some waited or were in flight after the last message about the seat."""
    served: int = 0
    """Requests that it had answered by the last message."""
    proven: bool = False
    """Its engine has served since it was started."""
    yielded: bool = False
    """A start of it that requests had asked for has given way since it last served."""
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
    home: Group
    """The group of its ID, where its container starts."""
    group: Group
    """The group that it is on: whose GPUs it holds, or held when it was parked. Another one once it has moved."""
    memory_on: Group
    """The group that its memory is on. It differs from ``group`` only while the seat moves; where nothing tells where a
    seat is, its engine was started here."""
    terms: PodTerms
    before_move: tuple[str, str, float] = ("", "", 0.0)
    """``Durable.way``, ``came_from`` and ``waited`` before its last move began."""
    pod: SeatPod | None = None
    """The pod that owns it; ``NodeState.own`` sets it, with ``terms`` and ``model``."""
    model: str = ""
    """The model it serves; empty without an owner."""
    pod_misses: int = 0
    """Reads of the pods in a row in which the pod did not own the seat."""
    pod_seen: WallTime = WallTime(0.0)
    """The last read of the pods in which the pod owned the seat. One that only lists the pod tells nothing of it."""
    pod_ends: bool = False
    """The pod was seen in deletion: once it is not listed any more, kubelet has ended its containers."""
    durable: Durable = field(default_factory=Durable)
    """What survives a restart of the manager."""
    used_bytes: int = 0
    """VRAM over all its GPUs in which the driver lists its processes now; 0: in none."""
    facts: Facts = field(default_factory=Facts)
    """What is known of it; ``know`` keeps it, and what follows."""
    state: SeatState = SeatState.FREE
    acts_as: SeatState = SeatState.FREE
    """As in ``Facts``."""
    lease: bool = False
    """Its group's GPUs are reserved for it."""
    epoch: int = 0
    gate: GateState = field(default_factory=GateState)
    backoff: SeatBackoffs = field(default_factory=SeatBackoffs)
    usage: Usage = field(default_factory=Usage)
    records: dict[str, Any] = field(default_factory=dict)
    """What riders remember of it, by their names: ``Rider.of``; of others as the ledger has it."""
    rehearsal: Rehearsal | None = None
    """Of its present container, while it starts."""
    ended_here: bool | None = None
    """While RELEASING: the checkpointer ends its processes, so kubelet's signal waits; None: not known yet."""
    answered: str = ""
    """While STARTING: what its engine last answered to the question whether it is healthy."""
    unkilled: str = ""
    """The container that a kill could not end."""
    entered: UnixTime = UnixTime(0.0)
    """It entered its state then."""
    entered_wall: WallTime = WallTime(0.0)
    reason: str = ""
    cause: str = ""
    op: str = ""

    @property
    def name(self) -> str:
        """What texts call it."""
        return self.model or "a seat without a pod"

    @property
    def pinned(self) -> bool:
        """True while an operator or its pod pins it."""
        return self.durable.pinned or self.terms.pinned

    @property
    def default_cause(self) -> str:
        """The cause of messages about it that belong to no switch."""
        return self.cause or f"seat-{self.id}"

    def know(self, facts: Facts) -> None:
        """This is what is known of it."""
        self.facts, self.state, self.acts_as, self.lease = facts, facts.state, facts.acts_as, facts.holds

    def learn(self, **facts: Any) -> None:
        """Take in facts that leave it in its state; ``NodeState.transition`` changes that."""
        known = replace(self.facts, **facts)
        assert known.state is self.state, f"{self.id} is {self.facts} and would be {known}, without an event"
        self.know(known)

    def begins(self, container_id: str, restarts: int) -> None:
        """A container that was not known runs, or kyb-run has started in one: the ticket is used. A container starts
        at home, whatever was known of the one before."""
        if container_of(container_id) == container_id:
            self.group = self.memory_on = self.home
            self.durable.way = self.durable.came_from = ""
        self.durable.container_id, self.durable.restarts, self.usage.proven = container_id, restarts, False
        self.answered = ""
        self.learn(process=Process.LOADS, residence=Residence.VRAM, ticket=Ticket.NONE, unlisted=False)

    def become(self, facts: Facts, to: Group | None = None) -> SeatState:
        """Take in the facts after a transition; group and reservation follow the state. Return the state before.
        ``to``: the group that it moves to."""
        before, held = self.state, self.lease
        self.know(facts)
        durable = self.durable
        if to is not None:
            self.before_move = durable.way, durable.came_from, durable.waited
            durable.way, durable.came_from = "map" if self.state in COMING else "restart", self.group.name
            durable.waited, self.group = 0.0, to
        elif self.state is SeatState.PARKED and before is SeatState.MIGRATING:
            self.group = self.memory_on
            durable.way, durable.came_from, durable.waited = self.before_move
        if facts.at_home:
            self.group = self.home
            durable.way = durable.came_from = ""
            durable.residue_bytes, durable.measured = 0, False
        if self.state not in COMING and not facts.unlocated:
            self.memory_on = self.group
        if not self.lease:
            durable.reserved_bytes = None
        elif not held:
            durable.reserved_bytes = self.needed_bytes(self.group)
        if self.state is SeatState.STARTING:
            self.gate.called = None
        elif self.state is SeatState.ACTIVE:
            self.usage.wanted_since = None
        return before

    @property
    def starts_inside(self) -> bool:
        """kyb-run has a ticket for a start in its container, and nothing has shown a process of it yet."""
        mine = start_inside(self.durable.container_id, self.durable.ticket) == self.durable.container_id
        return self.facts.waits and not self.facts.alive and mine

    def stay(self, now: Now) -> None:
        """A move of it has failed: it is not moved again for a while."""
        self.backoff.move.fail(now, first=FIRST_STAY_SECONDS, longest=LONGEST_STAY_SECONDS)

    def failed(self, why: str, now: Now) -> None:
        """Its engine has ended without having served, or no process came by its ticket."""
        pod, known = self.pod, self.durable.failed
        ran = pod is not None and not pod.running and pod.exited is not None
        code, line = (pod.code, pod.line) if pod is not None and ran else (None, "")
        self.durable.failed = failed = known.ended(float(now.unix), now.wall - self.entered_wall, why, code, line)
        if failed.failing:
            self.usage.wanted_since = None  # an operator has asked once

    @property
    def rehearses(self) -> bool:
        """The checkpointer has, or gets, the job that parks and activates it once before it serves."""
        known = self.rehearsal
        return known is not None and not known.done and known.container_id == self.durable.container_id

    @property
    def told(self) -> str:
        """Why it is in its state, and what its engine has answered while it starts."""
        answered = self.answered if self.state is SeatState.STARTING and self.facts.alive else ""
        return "; ".join(filter(None, (self.reason, answered)))

    @property
    def starts_cold(self) -> str:
        """Why it is parked by restart: its container ends, and starts again at its gate; empty: it is not."""
        if self.durable.spilled or self.backend != RESTART:
            return self.durable.spilled
        inside = self.pod is not None and self.pod.restarts_inside
        return f"it is parked by restart{'' if inside else f', {WITHOUT_RUN}'}"

    @property
    def backend(self) -> str:
        """How it is parked: as its pod wants, or by what it was demoted to."""
        return self.durable.backend or (self.pod.notes.backend if self.pod is not None else "cuda")

    def learn_park(self, parked: SeatProgress) -> None:
        """Learn from a park what the seat takes and keeps."""
        durable = self.durable
        durable.vram_bytes = parked.vram_bytes or durable.vram_bytes
        durable.residue_bytes, durable.measured = parked.residue_bytes, True

    @property
    def known_bytes(self) -> int:
        """VRAM that it takes, as its last park measured it or as declared, if that is more; 0: neither is known."""
        return max(self.durable.vram_bytes, self.pod.vram_bytes if self.pod else 0)

    @property
    def size(self) -> int:
        """VRAM that it takes; where that is not known, all memory of its GPUs."""
        return self.known_bytes or sum(gpu.memory_bytes for gpu in self.group.gpus)

    def assume_residue(self) -> None:
        """Where its park was not measured it keeps as much as park evidence admits: a share of its size, or of all
        memory of its GPUs where seats share that and its size is not known."""
        if not self.durable.measured:
            size = self.size if self.group.profile.packs else self.known_bytes
            self.durable.residue_bytes = round(size * (1 - FREED_SHARE))

    def half_seconds(self, usual: float, pace: float) -> float:
        """Wall seconds after which the checkpointer gives a park or an activation up. ``usual``: what is learned of
        it."""
        return deadlines.half(self.size, len(self.group.gpus), usual, pace)

    def needed_bytes(self, group: Group) -> int:
        """VRAM that a lease of this group is to reserve over all its GPUs; 0: all of it, as for a pod that declares
        nothing where seats share memory."""
        if group.slots == 1 or (group.profile.packs and not (self.pod and self.pod.vram_bytes)):
            return 0
        return max(self.known_bytes, self.used_bytes if group.profile.packs else 0)

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
        pod = self.pod
        parked = self.state is SeatState.PARKED or self.state in COMING
        return SeatTarget(
            seat=self.id,
            pod_uid=pod.uid if pod else "",
            container_id=self.durable.container_id or (pod.container_id if pod else None) or "",
            gpus=(on or self.group).uuids,
            vram_bytes=self.durable.vram_bytes or (pod.vram_bytes if pod else 0),
            backend=self.backend,
            parked_on=self.memory_on.uuids if parked else (),
            endpoint=(pod.endpoint or "") if pod else "",
            engine_key=pod.engine_key if pod else "",
            verify=pod.notes.verify if pod else True,
        )
