"""Whatever happens in whatever order: the invariants hold, and every switch ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kybernate.messages import (
    ActivateSeat,
    DrainNode,
    JobReply,
    KillJob,
    OrderCommand,
    ParkSeat,
    PinSeat,
    ReleaseJob,
    ResumeNode,
    UnpinSeat,
)
from kybernate.seat import HOLDING
from kybernate.seat import SeatState as S
from services.gpu_manager.core.board import broken_invariants
from services.gpu_manager.core.inputs import BusChanged, JobAnswered, StartTicket
from tests.manager.world import World, make_group

NUMBERS = st.integers(0, 2)
GROUPS = st.integers(0, 6)
SEATS = st.integers(0, 41)
"""Both modulo how many there are."""


class AnyLife(RuleBasedStateMachine):
    """What pods, callers and operators do, on whichever node."""

    world: World

    def some(self, number: int) -> str:
        seats = [*self.world.node.seats]
        return seats[number % len(seats)]

    @rule(number=SEATS)
    def crash(self, number: int) -> None:
        seat = self.some(number)
        if (pod := self.world.pods.get(seat)) is not None and pod.running:
            self.world.exit(seat)

    @rule(number=SEATS)
    def delete(self, number: int) -> None:
        seat = self.some(number)
        self.world.pods.pop(seat, None)
        self.world.calls.pop(seat, None)
        self.world.look(2)

    @rule(number=SEATS)
    def processes_end(self, number: int) -> None:
        seat = self.some(number)
        asked = any(isinstance(e, KillJob | ReleaseJob) and e.target.seat == seat for e in self.world.effects)
        if asked and self.world.state(seat) in (S.RELEASING, S.LOST):
            self.world.end_processes(seat)

    @rule(number=SEATS, waiting=st.integers(0, 2), in_flight=st.integers(0, 2))
    def traffic(self, number: int, waiting: int, in_flight: int) -> None:
        seat = self.some(number)
        if self.world.managed(seat).model:  # a signal without a model is no message
            self.world.traffic(seat, waiting=waiting, in_flight=in_flight, ttl=20)

    @rule(number=SEATS, kind=st.sampled_from([ActivateSeat, ParkSeat, PinSeat, UnpinSeat]))
    def command(self, number: int, kind: type[ActivateSeat]) -> None:
        self.world.command(kind, self.some(number))

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.later(seconds)


class AnyOrder(AnyLife):
    """A node whose neighbours do what they like, within what they can do."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(groups=(make_group("G0", [0], 3), make_group("G23", [2, 3], 3, slots=2)))
        self.world.boot()
        self.pods = 0

    def seat(self, group: int, number: int) -> str:
        return self.world.seat(group % len(self.world.groups), number)

    @rule(group=GROUPS, number=NUMBERS)
    def own(self, group: int, number: int) -> None:
        seat = self.seat(group, number)
        if seat not in self.world.pods:
            self.pods += 1
            self.world.pod(seat, f"m{self.pods}", vram="100GiB")

    @rule(group=GROUPS, number=NUMBERS)
    def ask_gate(self, group: int, number: int) -> None:
        seat = self.seat(group, number)
        pod = self.world.pods.get(seat)
        if pod is not None and not pod.running:
            self.world.call(seat)

    @rule(group=GROUPS, number=NUMBERS)
    def start(self, group: int, number: int) -> None:
        seat = self.seat(group, number)
        tickets = [e for e in self.world.effects if isinstance(e, StartTicket) and e.seat == seat]
        call = self.world.calls.get(seat)
        if tickets and call is not None and tickets[-1].call == call.call and seat in self.world.pods:
            self.world.start(seat)

    @rule(group=GROUPS, number=NUMBERS)
    def healthy(self, group: int, number: int) -> None:
        seat = self.seat(group, number)
        if (pod := self.world.pods.get(seat)) is not None and pod.running:
            self.world.healthy(seat)

    @rule(group=GROUPS, kind=st.sampled_from([DrainNode, ResumeNode]), node=st.booleans())
    def drain_or_resume(self, group: int, kind: type[OrderCommand], node: bool) -> None:
        """The world checks that a drained group starts nothing."""
        name = "" if node else self.world.groups[group % len(self.world.groups)].name
        self.world.order(kind, group=name)

    @rule(group=GROUPS)
    def routers_are_quiet(self, group: int) -> None:
        switch = self.world.node.switches.get(self.world.groups[group % len(self.world.groups)].name)
        if switch is not None and switch.victim:
            self.world.announce(switch.victim)
            self.world.beat()
            self.world.ack(switch.victim)

    @rule(group=GROUPS, running=st.sampled_from([0, 0, 1, None]))
    def engine_answers(self, group: int, running: int | None) -> None:
        switch = self.world.node.switches.get(self.world.groups[group % len(self.world.groups)].name)
        if switch is not None and switch.victim:
            self.world.idle(switch.victim, running)

    @precondition(lambda self: any(o.phase == "job" for o in self.world.node.switches.values()))
    @rule(
        park=st.sampled_from(["pending", "started", "parked", "parked", "active", "lost", "gone", "quarantined"]),
        activate=st.sampled_from(["pending", "started", "active", "active", "parked", "lost", "gone", "quarantined"]),
    )
    def checkpointer_reports(self, park: str, activate: str) -> None:
        switch = next(o for o in self.world.node.switches.values() if o.phase == "job")
        job = self.world.job_of(switch.op)
        if park not in ("parked", "gone"):
            activate = "pending"
        ended = park not in ("pending", "started") and (activate not in ("pending", "started") or job.activate is None)
        ended = ended or park in ("active", "lost", "quarantined")
        self.world.progress(job, park, activate, done=ended)

    @precondition(lambda self: any(o.phase == "job" for o in self.world.node.switches.values()))
    @rule(code=st.sampled_from(["", "busy", "stale-epoch", "unsupported", "silence"]))
    def checkpointer_answers(self, code: str) -> None:
        switch = next(o for o in self.world.node.switches.values() if o.phase == "job")
        reply = JobReply(accepted=not code, code=code, reason=code, highest_epoch=self.world.board.epoch + 5)
        answer = None if code == "silence" else reply
        self.world.receive(JobAnswered(self.world.job_of(switch.op), answer))

    @rule(up=st.booleans())
    def bus(self, up: bool) -> None:
        self.world.receive(BusChanged(up))

    @invariant()
    def leases_and_states_agree(self) -> None:
        assert broken_invariants(self.world.node) == {}
        for row in self.world.node.seats.values():
            if row.state is not S.RELEASING:
                assert row.lease == (row.state in HOLDING), f"{row.id} {row.state} {row.lease}"
            assert (row.pod is None) == (row.state is S.FREE)

    @invariant()
    def epochs_only_rise(self) -> None:
        for row in self.world.node.seats.values():
            epochs = [event.epoch for event in self.world.events(row.id)]
            assert epochs == sorted(epochs)

    def teardown(self) -> None:
        """Let the neighbours behave from now on: every switch under way must end."""
        self.world.receive(BusChanged(True))
        self.world.tick(5)
        for switch in list(self.world.node.switches.values()):
            for seat in (switch.victim, switch.incoming):
                if seat is not None:
                    self.world.traffic(seat)
        self.world.settle()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=60)
