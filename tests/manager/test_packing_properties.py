"""Whatever happens in whatever order: what is really on a GPU is never more than its memory without the reserve."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kybernate.messages import SwitchJob
from services.gpu_manager.core.inputs import ForeignProcessesSeen, StartTicket
from tests.manager.packed import PackedWorld, make_packed
from tests.manager.test_properties import SEATS, AnyLife


class AnyOrderPacked(AnyLife):
    """Packed groups inside each other; pods declare what they use, or say nothing."""

    world: PackedWorld

    def __init__(self) -> None:
        super().__init__()
        groups = (make_packed("G0", [0], 5), make_packed("G1", [1], 2), make_packed("G01", [0, 1], 3))
        self.world = PackedWorld(groups=groups)
        self.world.boot()
        self.pods = 0

    @rule(number=SEATS, gib=st.sampled_from([10, 20, 26, 40, 75]), keeps=st.integers(0, 1), declared=st.booleans())
    def own(self, number: int, gib: int, keeps: int, declared: bool) -> None:
        seat = self.some(number)
        if seat not in self.world.pods:
            self.pods += 1
            self.world.own(seat, f"m{self.pods}", gib, keeps, declared=declared)

    @rule(number=SEATS)
    def come_up(self, number: int) -> None:
        """Kubelet asks the gate, starts what has a ticket, and the engine gets healthy."""
        seat = self.some(number)
        pod = self.world.pods.get(seat)
        if pod is None:
            return
        if not pod.running and seat not in self.world.calls:
            self.world.call(seat)
        ticket = next((e for e in reversed(self.world.effects) if isinstance(e, StartTicket) and e.seat == seat), None)
        call = self.world.calls.get(seat)
        if ticket is not None and call is not None and ticket.call == call.call:
            self.world.start(seat)
            self.world.healthy(seat)

    @rule(number=SEATS, share=st.sampled_from([0.5, 1.0, 1.04]))
    def an_undeclared_engine_is_measured(self, number: int, share: float) -> None:
        seat = self.some(number)
        there, container = self.world.truth.get(seat), self.world.managed(seat).durable.container_id
        if there is not None and not there.parked and self.world.managed(seat).pod is not None:
            peak = round(there.uses * len(there.gpus) * share)
            self.world.receive(ForeignProcessesSeen((), {container: peak}))

    @rule(group=st.integers(0, 2))
    def drained(self, group: int) -> None:
        switch = self.world.node.switches.get(self.world.groups[group].name)
        if switch is not None and switch.victim and switch.phase == "draining":
            self.world.beat()
            self.world.quiet(switch.victim)

    @precondition(lambda self: any(isinstance(e, SwitchJob) for e in self.world.effects[-40:]))
    @rule(group=st.integers(0, 2), halves=st.integers(1, 2), succeeds=st.booleans(), tells=st.booleans())
    def checkpointer_works(self, group: int, halves: int, succeeds: bool, tells: bool) -> None:
        """It takes the newest job of a group and does one or both halves; the board hears of it now or later."""
        name = self.world.groups[group].name
        job = next((e for e in reversed(self.world.effects) if isinstance(e, SwitchJob) and e.group == name), None)
        if job is None or name not in self.world.node.switches:
            return
        self.world.take(self.world.job_of(job.op))
        for half in range(halves):
            self.world.work(job.op, succeeds=succeeds or half == 0)
        if tells and self.world.node.switches[name].op == job.op:
            self.world.report(job.op)

    @rule()
    def the_manager_restarts(self) -> None:
        self.world.restart()

    @invariant()
    def memory_is_never_oversubscribed(self) -> None:
        self.world.check()
        assert not self.world.node.violations


TestAnyOrderPacked = AnyOrderPacked.TestCase
TestAnyOrderPacked.settings = settings(stateful_step_count=60)
