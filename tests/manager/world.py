"""A made-up node around a real board: a kubelet, routers, engines and a checkpointer that are obedient.

Time is a number that only ``tick`` moves. The world checks the board's invariants after every message.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kybernate.config import Profile
from kybernate.machine import Gpu
from kybernate.messages import (
    ActivateSeat,
    AskJobs,
    Command,
    CommandReply,
    DrainAck,
    JobProgress,
    JobReply,
    JobStatus,
    OrderCommand,
    OrderStatus,
    Presence,
    SeatEvent,
    SeatProgress,
    SwitchJob,
    TrafficSignal,
)
from kybernate.policy import KybBalanced, Policy
from kybernate.seat import COMING, SeatState
from kybernate.topology import Group, group_key, seat_id
from services.gpu_manager.core import obstacles, recovery, view
from services.gpu_manager.core.board import Board, broken_invariants
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    EngineSeen,
    JobAnswered,
    JobsReported,
    Now,
    Recovered,
    RecoveryBegun,
    SeatTicket,
    StartCall,
    StartCalls,
    StartTicket,
    Tick,
    WallTime,
)
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.phases import Stage
from services.gpu_manager.core.riders import operations
from services.gpu_manager.core.riders.operations import drain_on
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeSetup, NodeState
from services.gpu_manager.http import why_answer
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.live_policy import GuardedPolicy
from tests.facts import contradictions
from tests.granted import against
from tests.manager.texts import of_effects, with_ids

GIB = 2**30
C = TypeVar("C", bound=Command)
T = TypeVar("T")


def make_gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}", index, f"0000:0{index}:00.0", "Fake", 80 * GIB, 0)


def make_group(name: str, indices: Iterable[int], seats: int, slots: int = 1, *, rebalance: bool = False) -> Group:
    gpus = tuple(make_gpu(index) for index in indices)
    key = group_key([gpu.uuid for gpu in gpus])
    profile = Profile(
        name=f"gpu-{len(gpus)}x-seat",
        resource=f"kyb.ai/gpu-{len(gpus)}x-seat",
        group_size=len(gpus),
        seats_per_group=seats,
        active_slots=slots,
        rebalance=rebalance,
    )
    return Group(name, key, profile, gpus, tuple(seat_id(len(gpus), key, n) for n in range(seats)), slots)


@dataclass
class World:
    """One node. ``effects`` keeps all that the board ever returned."""

    groups: tuple[Group, ...] = field(default_factory=lambda: (make_group("G0", [0], 3), make_group("G23", [2, 3], 2)))
    policy: Policy = field(default_factory=KybBalanced)
    warmup: bool = True
    wall: float = 1000.0
    effects: list[object] = field(default_factory=list)
    pods: dict[str, SeatPod] = field(default_factory=dict)
    calls: dict[str, StartCall] = field(default_factory=dict)
    started: int = 0
    unix_offset: float = 0.0
    """By how much the clock of the machine was set, in seconds."""
    routers: dict[str, str] = field(default_factory=dict)
    """By op: the seat that the checkpointer activates instead of the one that the job names."""

    def __post_init__(self) -> None:
        self.board = self.new_board()

    def new_board(self) -> Board:
        return Board(NodeSetup("n1", self.groups, self.policy, warmup=self.warmup, drain_seconds=60.0))

    @property
    def node(self) -> NodeState:
        return self.board.node

    def configure(self, **changes: object) -> None:
        """Change what the node is configured to be, also in the middle of a test."""
        self.node.setup = replace(self.node.setup, **changes)  # type: ignore[arg-type]

    @property
    def now(self) -> Now:
        return Now(wall=self.wall, model=self.wall, unix=1.8e9 + self.unix_offset + self.wall)

    def receive(self, message: object) -> list[object]:
        drained = {group.name for group in self.groups if drain_on(self.node, group) is not None}
        coming = {seat.id for seat in self.node.seats.values() if seat.state in COMING}
        unhindered = self._unhindered() if isinstance(message, Tick) else set()
        effects: list[object] = list(self.board.handle(message, self.now))
        if drained:
            self._starts_nothing(drained & {*self.node.groups}, coming, effects)
        self.effects += effects
        assert broken_invariants(self.node) == {}
        assert not (found := [*contradictions(self.node), *against()]), found
        assert not unhindered or not unhindered & self._unhindered(), "nothing forbids it, and it waits"
        assert not (ids := with_ids(of_effects(effects))), ids
        return effects

    def _unhindered(self) -> set[str]:
        """Seats that ask and have no obstacle on their group: they are granted it with the next tick."""
        node, now = self.node, self.now
        asking = [seat for seat in node.seats.values() if node.recovered and view.wanted(node, seat, now)]
        lists = {seat.id: obstacles.obstacles(node, seat, seat.group, now) for seat in asking}
        return {seat for seat, found in lists.items() if obstacles.first(found) is None}

    def _starts_nothing(self, drained: set[str], coming: set[str], effects: list[object]) -> None:
        """No ticket and no new activation on groups that were drained before the message and still are."""
        drained = {name for name in drained if drain_on(self.node, self.node.groups[name].group) is not None}
        sent = {effect.op for effect in self.effects if isinstance(effect, SwitchJob)}
        for effect in effects:
            if isinstance(effect, StartTicket):
                assert (effect.group or self.managed(effect.seat).home.name) not in drained, effect
            if isinstance(effect, SwitchJob) and effect.op not in sent and effect.activate is not None:
                assert effect.group not in drained or effect.activate.seat in coming, effect

    def tick(self, seconds: float = 1.0) -> list[object]:
        self.wall += seconds
        return self.receive(Tick())

    def later(self, seconds: float = 1.0, times: int = 1) -> None:
        """Time passes, and the routers say that they are still there."""
        for _ in range(times):
            self.tick(seconds)
            self.beat()

    def seat(self, group: int, number: int) -> str:
        return self.groups[group].seat_ids[number]

    def managed(self, seat: str) -> ManagedSeat:
        return self.node.seats[seat]

    def moved(self, seat: str) -> bool:
        """Whether the seat is on another group than its home."""
        return self.managed(seat).group.name != self.managed(seat).home.name

    def state(self, seat: str) -> SeatState:
        return self.node.seats[seat].state

    def last(self, kind: type[T]) -> T:
        return next(effect for effect in reversed(self.effects) if isinstance(effect, kind))

    def sent(self, kind: type[T], seat: str) -> list[T]:
        """All tickets, or jobs that end processes, of this seat."""
        return [one for one in self.effects if isinstance(one, kind) and getattr(one, "target", one).seat == seat]

    def asked(self) -> list[str]:
        """The seats whose processes the checkpointer is asked about now."""
        questions = view.checkpointer_questions(self.node, self.now, self.now.wall)
        return [target.seat for question in questions for target in question.targets]

    def events(self, seat: str) -> list[SeatEvent]:
        return [effect for effect in self.effects if isinstance(effect, SeatEvent) and effect.seat == seat]

    # --- the node's life ----------------------------------------------------------------------------------------

    def boot(self) -> None:
        """A fresh node: bus up, nothing known, one router."""
        self.receive(BusChanged(True))
        begun = RecoveryBegun(Owners(), recovery.ledger(self.new_board().node, ""))
        self.receive(Recovered(begun, JobReply(accepted=True)))
        self.router("router-0")
        self.tick(5.0)

    def router(self, name: str, incarnation: str = "a") -> None:
        self.routers[name] = incarnation
        self.receive(Presence(cause="p", component="router", instance=name, incarnation=incarnation))

    def beat(self) -> None:
        for name, incarnation in self.routers.items():
            self.receive(Presence(cause="p", component="router", instance=name, incarnation=incarnation))

    def pod(self, seat: str, model: str, **annotations: str) -> None:
        notes = {"kyb.ai/model": model, "kyb.ai/backend": "fake"} | {
            f"kyb.ai/{key}": value for key, value in annotations.items()
        }
        self.pods[seat] = SeatPod(seat, "default", model, f"uid-{model}", "engine", ip="127.0.0.9", annotations=notes)
        self.look()

    def shows(self, seat: str, *, looks: int = 1, **fields: Any) -> None:
        """Its pod is read with these fields changed."""
        self.pods[seat] = replace(self.pods[seat], **fields)
        self.look(looks)

    def annotate(self, seat: str, **annotations: str) -> None:
        """Change annotations of the pod, and let the board see it."""
        notes = {f"kyb.ai/{key}": value for key, value in annotations.items()}
        self.shows(seat, annotations=self.pods[seat].annotations | notes)

    def owners(self) -> Owners:
        return Owners(tuple(self.pods.values()), frozenset(pod.uid for pod in self.pods.values()))

    def used_tickets(self) -> tuple[SeatTicket, ...]:
        """What seat folders keep of starts that are long over."""
        over = WallTime(0.0)
        return tuple(SeatTicket(seat, "over", pod.uid, 0, over, age_seconds=4000.0) for seat, pod in self.pods.items())

    def look(self, times: int = 1) -> list[object]:
        """The pods are read; returns what the last read brings. One that misses a pod proves nothing, two do."""
        return [self.receive(self.owners()) for _ in range(times)][-1]

    def delete(self, seat: str) -> None:
        """Its pod is in deletion."""
        self.shows(seat, deleting=True)

    def vanish(self, seat: str) -> None:
        """Its pod is deleted by force."""
        del self.pods[seat]
        self.look(2)

    def call(self, seat: str, *, inside: bool = False) -> list[object]:
        """Kubelet asks the start gate for this seat, or kyb-run from ``inside`` its container."""
        self.started += 1
        self.calls[seat] = StartCall(f"call-{self.started}", self.now.unix, self.now.unix + 25, inside)
        return self.receive(StartCalls(dict(self.calls)))

    def start(self, seat: str) -> None:
        """The container, or an engine in it, starts: needs a ticket for its call, which is used up."""
        ticket = next(e for e in reversed(self.effects) if isinstance(e, StartTicket) and e.seat == seat)
        call = self.calls.pop(seat)
        assert call.call == ticket.call
        self.receive(StartCalls(dict(self.calls)))
        if call.inside:
            self.look_at(seat, "active")
            return
        self.started += 1
        self.shows(seat, container_id=f"process://{self.started}", running=True)

    def at_gate(self, seat: str, model: str, **annotations: str) -> None:
        """The container of a new pod waits at the start gate, or has its ticket."""
        self.pod(seat, model, **annotations)
        self.call(seat)

    def loads(self, seat: str, model: str, **annotations: str) -> None:
        """Its container runs, by a ticket that it gets at once; its engine is not healthy yet."""
        self.at_gate(seat, model, **annotations)
        self.start(seat)

    def healthy(self, seat: str) -> None:
        self.receive(EngineSeen(seat, self.managed(seat).durable.container_id or "", True))

    def come_up(self, seat: str) -> None:
        """Its container starts once the gate lets it, after the switches that this needs, and is healthy."""
        self.call(seat)
        self.finish()
        self.start(seat)
        self.healthy(seat)

    def serve(self, seat: str, model: str, **annotations: str) -> None:
        """From nothing to active."""
        self.pod(seat, model, **annotations)
        self.come_up(seat)
        assert self.state(seat) is SeatState.ACTIVE

    def fill(self, *models: str, group: int = 0, **annotations: str) -> list[str]:
        """Start these models one after another in a group; the last one stays active."""
        seats = []
        for number, model in enumerate(models):
            seat = self.seat(group, number)
            self.pod(seat, model, **annotations)
            self.come_up(seat)
            seats.append(seat)
        return seats

    def exit(self, seat: str) -> None:
        self.shows(seat, running=False, ended="exited with code 1")

    # --- traffic ------------------------------------------------------------------------------------------------

    def traffic(
        self,
        seat: str,
        *,
        waiting: int = 0,
        in_flight: int = 0,
        oldest: float = 0.0,
        cause: str = "req-1",
        ttl: float = 1e9,
    ) -> None:
        """A level that holds for ``ttl`` seconds; without it, as of a source that repeats it for ever."""
        signal = TrafficSignal(
            cause=cause,
            source="router-0",
            model=self.managed(seat).model,
            seat=seat,
            waiting=waiting,
            in_flight=in_flight,
            oldest_wait_seconds=oldest if waiting else None,
        )
        self.receive(signal.model_copy(update={"ttl_seconds": ttl}))  # a single message holds for 300 s at most

    def command(self, kind: type[C], seat: str, **extra: object) -> CommandReply:
        effects = self.receive(kind(cause="op-1", node="n1", seat=seat, **{"actor": "operator", **extra}))
        return next(effect for effect in effects if isinstance(effect, CommandReply))

    def order(self, kind: type[OrderCommand], **fields: object) -> CommandReply:
        """Order something, or take it away."""
        effects = self.receive(kind(cause="c", node="n1", actor="alice", **fields))  # type: ignore[arg-type]
        return next(effect for effect in effects if isinstance(effect, CommandReply))

    def ordering(self, kind: type[OrderCommand], **fields: object) -> OrderStatus:
        """Order something, or again; returns how far it is."""
        found = self.order(kind, **fields).order
        assert found is not None
        return found

    def ordered(self, target: str = "G0") -> OrderStatus:
        """How far the drain of a group (empty: the node), or the move of a seat, is."""
        return next(one for one in operations.statuses(self.node, self.now) if one.target == target)

    def stage(self, seat: str) -> Stage:
        """What a seat waits for."""
        return obstacles.stage(self.node, self.managed(seat), self.now)

    def why(self) -> dict[str, Any]:
        """What ``GET /v1/why`` says, by group and by seat."""
        answer = why_answer(self.node, GuardedPolicy(self.policy, "kyb-balanced"), self.now)
        found = {group["group"]: group for group in answer["groups"]}
        return found | {seat["seat"]: seat for group in answer["groups"] for seat in group["seats"]}

    def wish(self, seat: str) -> CommandReply:
        return self.command(ActivateSeat, seat)

    # --- a switch, step by step ---------------------------------------------------------------------------------

    def draining(self) -> tuple[str, str]:
        """Seats a and b of one group: b serves, and drains for a, for which a request waits."""
        a, b = self.fill("a", "b")
        self.later(10)
        self.traffic(a, waiting=1)
        assert self.state(b) is SeatState.DRAINING
        return a, b

    def drained_switch(self) -> tuple[str, str]:
        """Seats a and b of one group: b served and is drained for a, so that the job of the switch is sent."""
        a, b = self.draining()
        self.quiet(b)
        return a, b

    def announce(self, seat: str) -> None:
        self.receive(DrainAnnounced(seat, self.managed(seat).epoch))

    def ack(self, seat: str, in_flight: int = 0, router: str = "router-0", epoch: int | None = None) -> None:
        self.receive(
            DrainAck(
                cause="d",
                node="n1",
                seat=seat,
                instance=router,
                incarnation=self.routers.get(router, "a"),
                epoch=self.managed(seat).epoch if epoch is None else epoch,
                in_flight=in_flight,
            )
        )

    def answered(self, seat: str, in_flight: int = 0) -> None:
        """The roster says that it drains, and the first router has acknowledged it."""
        self.announce(seat)
        self.ack(seat, in_flight=in_flight)

    def idle(self, seat: str, running: int | None = 0) -> None:
        self.receive(EngineSeen(seat, self.managed(seat).durable.container_id or "", True, running, asked_at=self.wall))

    def quiet(self, seat: str) -> None:
        """All that a drain needs from the first router: the roster says it, nothing in flight, the engine idle."""
        self.answered(seat)
        self.idle(seat)

    def switch(self, victim: str, incoming: str, **traffic: Any) -> SwitchJob:
        """A request waits for a seat, and the holder that leaves for it is drained. Returns the job."""
        self.traffic(incoming, **{"waiting": 1, **traffic})
        self.quiet(victim)
        return self.job()

    def leaves(self, victim: str) -> None:
        """A holder that drains is drained, and the job is done."""
        self.quiet(victim)
        self.progress(self.job())

    def drains_end(self) -> None:
        for switch in list(self.node.switches.values()):
            if switch.phase == "draining" and switch.victim:
                self.quiet(switch.victim)

    def job(self) -> SwitchJob:
        return self.last(SwitchJob)

    def journaled(self) -> SwitchJob:
        """The last job, which the checkpointer has taken."""
        job = self.job()
        self.receive(JobAnswered(job, JobReply(accepted=True)))
        return job

    def job_of(self, op: str) -> SwitchJob:
        return next(e for e in reversed(self.effects) if isinstance(e, SwitchJob) and e.op == op)

    def settle(self) -> None:
        """Only carry on what is under way; what the policy begins anew meanwhile may stay unfinished."""
        begun = {switch.op for switch in self.node.switches.values()}
        for _ in range(200):
            left = [o for o in self.node.switches.values() if o.op in begun]
            if not left:
                return
            self.later(0.5)
            for switch in left:
                if switch.phase == "draining" and switch.victim:
                    self.quiet(switch.victim)
                elif switch.phase == "job":
                    self.progress(self.job_of(switch.op))
        raise AssertionError(f"switches that do not end: {self.node.switches}")

    def progress(
        self, job: SwitchJob, park: str = "parked", activate: str = "active", *, done: bool = True, failed: bool = False
    ) -> None:
        found = status(job, park, activate, done=done, failed=failed)
        self.receive(JobProgress(cause=job.cause, node="n1", status=found))

    def finish(self) -> None:
        """Carry every switch under way to a good end, as well-behaved neighbours would."""
        for _ in range(30):
            for switch in list(self.node.switches.values()):
                if switch.phase == "draining" and switch.victim:
                    self.announce(switch.victim)
                    self.beat()
                    for router in self.routers:
                        self.ack(switch.victim, router=router)
                    self.idle(switch.victim)
                elif switch.phase == "cutting":
                    self.tick(2.5)
                elif switch.phase == "job":
                    self.carry_out(self.job_of(switch.op))
            if not self.node.switches:
                return
        raise AssertionError(f"switches that do not end: {self.node.switches}")

    def carry_out(self, job: SwitchJob) -> None:
        """The checkpointer does the whole of a job."""
        self.receive(JobAnswered(job, JobReply(accepted=True)))
        self.progress(job)

    def end_processes(self, seat: str) -> None:
        """The checkpointer finds nothing of this seat any more."""
        self.look_at(seat, "gone", keeper=False)

    def wait(self, seconds: float) -> None:
        """Time passes, and kubelet answers."""
        end = self.wall + seconds
        while self.wall < end:
            self.tick(min(5.0, end - self.wall))
            self.look()

    def seen(self, seat: str, outcome: str, *gpus: str, **fields: object) -> SeatProgress:
        """What the checkpointer finds of the processes of a seat, and where."""
        target = self.managed(seat).target()
        own = {"seat": seat, "pod_uid": target.pod_uid, "container_id": target.container_id, "gpus": gpus}
        return SeatProgress.model_validate({**own, "outcome": outcome, **fields})

    def look_at(
        self, seat: str, outcome: str, *gpus: str, keeper: bool = True, asked: float = 0.0, **fields: object
    ) -> None:
        """The checkpointer tells what the processes of a seat do, and whether kyb-run lives. ``asked``: so long ago."""
        seen = self.seen(seat, outcome, *gpus, keeper=keeper, **fields)
        self.receive(JobsReported(JobReply(accepted=True, seats=(seen,)), asked_at=self.wall - asked))

    def question(self, ledger: Ledger, **known: Any) -> AskJobs:
        """The next manager begins with this ledger: what it asks the checkpointer."""
        self.board = self.new_board()
        self.receive(BusChanged(True))
        begun = self.receive(RecoveryBegun(self.owners(), ledger, **known))
        return next(effect for effect in begun if isinstance(effect, AskJobs))

    def next_manager(
        self,
        ledger: Ledger | None = None,
        *seen: SeatProgress,
        jobs: tuple[JobStatus, ...] = (),
        tickets: tuple[SeatTicket, ...] = (),
    ) -> None:
        """The next manager begins, with the ledger of this one if none is given, and what the checkpointer tells."""
        kept = recovery.ledger(self.node, "boot") if ledger is None else ledger
        self.board = self.new_board()
        self.receive(BusChanged(True))
        begun = RecoveryBegun(self.owners(), kept, tickets=tickets)
        self.receive(Recovered(begun, JobReply(accepted=True, jobs=jobs, seats=seen)))


def status(
    job: SwitchJob, park: str = "parked", activate: str = "active", *, done: bool = True, failed: bool = False
) -> JobStatus:
    """``failed``: a step of the activation."""

    def progress(target: object, outcome: str, wanted: str) -> SeatProgress:
        return SeatProgress(
            seat=target.seat,  # type: ignore[attr-defined]
            pod_uid=target.pod_uid,  # type: ignore[attr-defined]
            container_id=target.container_id,  # type: ignore[attr-defined]
            outcome=outcome,  # type: ignore[arg-type]
            reason="" if outcome in (wanted, "pending", "started") else f"made {outcome}",
            seconds={"checkpoint": 0.5, "verify": 0.1},
            vram_bytes=40 * GIB,
            last_call_at=1.8e9,
        )

    return JobStatus(
        op=job.op,
        epoch=job.epoch,
        group=job.group,
        park=tuple(progress(target, park, "parked") for target in job.park),
        activate=progress(job.activate, activate, "active").model_copy(update={"failed": failed})
        if job.activate
        else None,
        done=done,
    )


def booted(*groups: Group, **more: Any) -> World:
    """A fresh node with these groups, else with those of ``World``."""
    world = World(groups=groups, **more) if groups else World(**more)
    world.boot()
    return world


def pooled(number: int = 2, seats: int = 2, **more: Any) -> World:
    """Groups of one GPU each between which seats may move."""
    return booted(*(make_group(f"G{n}", [n], seats, rebalance=True) for n in range(number)), **more)


def nested(seats: int = 2, **more: Any) -> World:
    """Two GPUs sold singly (G0, G1) and as a pair (G01)."""
    groups = (make_group("G0", [0], seats), make_group("G1", [1], seats), make_group("G01", [0, 1], seats))
    return booted(*groups, **more)
