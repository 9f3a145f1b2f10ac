"""Host memory as a budget: reserved before a copy is made; without room the seat expected back last has none."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kybernate.messages import (
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    SeatProgress,
    SeatTarget,
    SwitchJob,
    TrafficSignal,
)
from kybernate.seat import SeatState as S
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.facts import Promise
from services.gpu_manager.core.inputs import (
    ForeignProcessesSeen,
    JobAnswered,
    StartTicket,
)
from services.gpu_manager.core.recovery import ledger
from services.gpu_manager.core.riders import host_memory, rehearsal
from services.gpu_manager.core.state import Drain, GroupSwitch, SwitchPhase, SwitchTimes
from services.gpu_manager.ledger import Ledger
from tests.manager.test_properties import SEATS, AnyLife
from tests.manager.world import GIB, World, make_group, status

VRAM = 40
"""GiB that a park of the tests' world reports."""
SIZE = f"{VRAM}GiB"


@dataclass
class HostWorld(World):
    """A node with a budget, and the copies that are really in its memory."""

    gib: int = 100
    copies: dict[str, int] = field(default_factory=dict)
    """By seat: bytes of the copy that exists."""
    arrived: dict[str, int] = field(default_factory=dict)
    signals: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.boot()

    def new_board(self) -> Board:
        board = super().new_board()
        board.node.setup = replace(board.node.setup, host_bytes=self.gib * GIB)
        return board

    def progress(self, job: SwitchJob, park: str = "parked", activate: str = "active", *, done: bool = True) -> None:
        """The checkpointer does the job: a copy comes with a park, unless a restart parks the seat, and goes again."""
        found = status(job, park, activate, done=done)
        targets = {target.seat: target for target in job.park}
        parked = tuple(self._copied(one, targets[one.seat]) for one in found.park)
        if job.activate is not None and activate == "active":
            self.copies.pop(job.activate.seat, None)
        self.check()
        self.receive(JobProgress(cause="j", node="n1", status=found.model_copy(update={"park": parked})))
        for one in parked:
            if one.outcome == "parked" and targets[one.seat].backend == "restart":
                self.exit(one.seat)

    def _copied(self, one: SeatProgress, target: SeatTarget) -> SeatProgress:
        if one.outcome != "parked" or target.backend == "restart":
            return one
        pod = self.pods.get(one.seat)
        if pod is None or not pod.running or pod.container_id != target.container_id:
            return one.model_copy(update={"outcome": "gone"})  # what has ended leaves no copy
        self.copies[one.seat] = VRAM * GIB
        return one.model_copy(update={"host_bytes": VRAM * GIB})

    def exit(self, seat: str) -> None:
        self.copies.pop(seat, None)
        super().exit(seat)

    def end_processes(self, seat: str) -> None:
        self.copies.pop(seat, None)
        super().end_processes(seat)

    def begins(self, victim: str) -> None:
        """What the rider does when the drain of a seat begins."""
        now = self.now
        switch = GroupSwitch(
            "op", 1, "G0", victim, None, "c", SwitchPhase.DRAINING, Drain(now.model), SwitchTimes(now.wall, now.wall)
        )
        host_memory.reserve(self.node, switch, self.managed(victim), now)

    def dropped(self) -> list[str]:
        """The seats whose copies the checkpointer was asked to drop; it does so now."""
        seats = [
            e.target.seat
            for e in self.effects
            if isinstance(e, KillJob) and self.managed(e.target.seat).facts.promise is Promise.DROPS
        ]
        for seat in dict.fromkeys(seats):
            self.exit(seat)
        return seats

    def check(self) -> None:
        """What is really there is on the accounts, and all of it fits."""
        assert sum(self.copies.values()) <= self.gib * GIB
        for seat, size in self.copies.items():
            assert host_memory.account(self.managed(seat)).taken_bytes >= size, seat

    def visit(self, seat: str) -> None:
        """A request for this seat takes the group to it, and is answered."""
        self.tick(30)
        self.traffic(seat, waiting=1, ttl=20)
        self.finish()
        if self.state(seat) is not S.ACTIVE:
            self.come_up(seat)
        self.traffic(seat)
        assert self.state(seat) is S.ACTIVE

    def expect(self, seat: str, requests: int) -> None:
        """So many requests have just come for it."""
        self.traffic(seat)
        signal = TrafficSignal(cause="c", source="router-0", model=self.managed(seat).model, seat=seat)
        self.arrived[seat] = self.arrived.get(seat, 0) + requests
        self.signals += 1
        self.receive(
            signal.model_copy(update={"seq": self.signals, "arrived": self.arrived[seat], "arrivals": requests})
        )


@pytest.fixture
def world() -> HostWorld:
    """Room for two copies."""
    return HostWorld(groups=(make_group("G0", [0], 4), make_group("G1", [1], 1)), gib=90)


@pytest.mark.parametrize(
    ("written", "machine", "bytes_"),
    [("off", 64, None), (8 * GIB, 64, 8 * GIB), ("auto", 100, 90 * GIB), ("auto", 16, 12 * GIB)],
)
def test_the_budget_is_a_size_or_the_machine_without_a_reserve(
    written: int | str, machine: int, bytes_: int | None
) -> None:
    assert host_memory.budget(written, machine * GIB) == bytes_


def test_without_room_a_seat_is_parked_by_a_restart_that_says_why(world: HostWorld) -> None:
    a, b, c = world.fill("a", "b", "c", vram=SIZE)
    assert set(world.copies) == {a, b}
    world.at_gate(d := world.seat(0, 3), "d", vram=SIZE)
    world.finish()
    assert world.job().park[0].backend == "restart"
    assert set(world.copies) == {a, b}, "no copy of c was made, and none was dropped"
    assert world.managed(c).acts_as is S.WAITING
    assert "no room for the copy of" in str(world.why()[c]["spilled"])
    assert world.node.spills == 1
    world.start(d)
    world.healthy(d)

    world.visit(c)
    assert world.why()[c]["spilled"] == "", "it is decided anew at its next park"
    assert set(world.copies) == {a, b}, "and d was parked by a restart, too"


def test_a_failed_restart_without_room_counts_against_no_backend(world: HostWorld) -> None:
    _, _, c = world.fill("a", "b", "c", vram=SIZE)
    world.at_gate(world.seat(0, 3), "d", vram=SIZE)
    world.quiet(c)
    failed = status(world.job(), "active", "pending")
    parked = (failed.park[0].model_copy(update={"failed": True, "reason": "it lives"}),)
    world.receive(JobProgress(cause="j", node="n1", status=failed.model_copy(update={"park": parked})))
    assert (world.state(c), rehearsal.halves(world.managed(c)).failures) == (S.ACTIVE, 0)


def test_the_copy_of_a_seat_that_is_expected_back_later_is_dropped_for_one_that_is_expected_sooner(
    world: HostWorld,
) -> None:
    a, b, c = world.fill("a", "b", "c", vram=SIZE)
    for seat, requests in ((a, 3), (b, 1), (c, 9)):
        world.expect(seat, requests)
    world.at_gate(world.seat(0, 3), "d", vram=SIZE)
    switch = world.node.switches["G0"]
    world.quiet(c)
    assert switch.job.sent is None, "the job waits for the memory"
    assert world.stage(b).stage == "container"
    assert world.dropped() == [b]
    assert switch.job.sent is not None
    assert world.job().park[0].backend == "fake"
    world.finish()
    assert set(world.copies) == {a, c}
    assert world.managed(b).acts_as is S.WAITING
    assert "no room for the copy of c" in str(world.why()[b]["spilled"])


def test_a_copy_that_is_not_dropped_in_time_is_not_waited_for(world: HostWorld) -> None:
    c, _, _ = being_dropped(world)
    world.quiet(c)
    world.tick(host_memory.DROP_SECONDS)
    assert world.job().park[0].backend == "restart"


@pytest.mark.parametrize("needed_by", ["a request", "a pin"])
def test_a_copy_that_is_wanted_is_not_dropped(world: HostWorld, needed_by: str) -> None:
    a, b, c = world.fill("a", "b", "c", vram=SIZE)
    for seat in (b, c):
        world.expect(seat, 9)
    world.annotate(c, pin="true")
    if needed_by == "a pin":
        world.annotate(a, pin="true")
    else:
        world.traffic(a, waiting=1)
    assert not world.node.switches
    world.begins(c)
    assert not any(seat.facts.promise is Promise.DROPS for seat in world.node.seats.values())


def test_a_copy_that_cannot_be_dropped_stays(world: HostWorld) -> None:
    _, b, job = being_dropped(world)
    failed = world.seen(b, "quarantined", reason="no")
    reported = JobStatus(op="kill-b", epoch=job.epoch, group="G0", park=(failed,), done=True)
    world.receive(JobAnswered(job, JobReply(accepted=True, jobs=(reported,))))
    assert world.state(b) is S.PARKED
    assert not world.managed(b).starts_cold
    assert world.events(b)[-1].reason == "its copy was not dropped, it keeps its host memory: no"


@pytest.mark.parametrize("reply", [None, JobReply(accepted=False, code="stale-epoch", highest_epoch=2**60)])
def test_a_drop_that_was_not_taken_is_asked_for_again(world: HostWorld, reply: JobReply | None) -> None:
    _, b, job = being_dropped(world)
    world.effects.clear()
    world.receive(JobAnswered(job, reply))
    (again,) = (effect for effect in world.effects if isinstance(effect, KillJob))
    assert again.target.seat == b
    assert (again.epoch > job.epoch) == (reply is not None)


def test_a_drop_outlives_the_manager_that_decided_it(world: HostWorld) -> None:
    _, b, job = being_dropped(world)
    restarted(world, ledger(world.node, ""))
    world.tick()
    (again,) = (effect for effect in world.effects if isinstance(effect, KillJob))
    assert again.target == job.target.model_copy(update={"parked_on": again.target.parked_on})
    assert world.state(b) is S.PARKED


def being_dropped(world: HostWorld) -> tuple[str, str, KillJob]:
    """(seat c that drains, seat b whose copy is dropped for it, the job that does it)."""
    a, b, c = world.fill("a", "b", "c", vram=SIZE)
    for seat, requests in ((a, 3), (c, 9)):
        world.expect(seat, requests)
    world.at_gate(world.seat(0, 3), "d", vram=SIZE)
    job = world.last(KillJob)
    assert job.target.seat == b
    return c, b, job


def test_what_was_measured_counts_and_what_the_seat_has_grown_by(world: HostWorld) -> None:
    a, b = world.fill("a", "b")
    assert host_memory.account(world.managed(a)).taken_bytes == VRAM * GIB
    assert host_memory.needed_bytes(world.managed(b)) == round(1.1 * world.managed(b).group.gpus[0].memory_bytes)
    world.receive(ForeignProcessesSeen((), {world.managed(b).durable.container_id: 30 * GIB}))
    assert host_memory.needed_bytes(world.managed(b)) == 33 * GIB
    world.receive(ForeignProcessesSeen((), {world.managed(a).durable.container_id: 42 * GIB}))
    assert host_memory.needed_bytes(world.managed(a)) == 42 * GIB


@pytest.mark.parametrize(("backend", "gib"), [("cuda", 44), ("acme", 44), ("vllm-2", 0), ("unload", 0), ("restart", 0)])
def test_before_its_first_park_a_seat_counts_a_copy_unless_its_backend_keeps_none(
    world: HostWorld, backend: str, gib: int
) -> None:
    (seat,) = world.fill("v", vram=SIZE)
    world.managed(seat).durable.backend = backend
    assert host_memory.needed_bytes(world.managed(seat)) == gib * GIB
    host_memory.account(world.managed(seat)).parked_bytes = GIB
    assert (host_memory.needed_bytes(world.managed(seat)) == 0) == (backend == "restart"), "kyb-run's memory is no copy"


@pytest.mark.parametrize(("active_gib", "kept_gib"), [(58, 58), (0, 60)], ids=["measured", "not measured"])
def test_an_engine_that_pins_has_its_memory_reserved_before_it_starts_and_keeps_it(
    world: HostWorld, active_gib: int, kept_gib: int
) -> None:
    seat = world.seat(1, 0)
    world.at_gate(seat, "v", backend="vllm", vram="50GiB")
    assert host_memory.account(world.managed(seat)).taken_bytes == 55 * GIB
    world.start(seat)
    world.healthy(seat)
    job = world.job()
    done = status(job)
    parked, active = done.park[0].model_copy(update={"host_bytes": 60 * GIB}), done.activate
    active = active.model_copy(update={"host_bytes": active_gib * GIB})
    world.receive(
        JobProgress(cause="j", node="n1", status=done.model_copy(update={"park": (parked,), "activate": active}))
    )
    world.healthy(seat)
    assert world.state(seat) is S.ACTIVE
    assert host_memory.account(world.managed(seat)).taken_bytes == kept_gib * GIB
    parked, taken, *_ = host_memory.HostMemory().metrics(world.node, world.now)
    assert (parked.value, taken.value) == (0, kept_gib * GIB)
    assert host_memory.needed_bytes(world.managed(seat)) == 60 * GIB


def restarted(world: HostWorld, known: Ledger, *jobs: JobStatus) -> None:
    """The manager starts again with this ledger, and finds every seat as it was. ``jobs``: they are under way."""
    moving = {one.seat for job in jobs for one in (*job.park, job.activate) if one is not None}
    seen = []
    for seat in (seat for seat, pod in world.pods.items() if pod.running):
        outcome = "started" if seat in moving else "parked" if seat in world.copies else "active"
        seen.append(world.seen(seat, outcome, "GPU-0"))
    world.effects.clear()
    world.next_manager(known, *seen, jobs=jobs, tickets=world.used_tickets())


@pytest.mark.parametrize("ledger_is", ["lost", "from before there was a budget"])
def test_what_an_engine_has_pinned_is_on_its_account_also_without_a_record(world: HostWorld, ledger_is: str) -> None:
    (seat,) = world.fill("v", backend="sglang", vram=SIZE)
    world.managed(seat).durable.measured, host_memory.account(world.managed(seat)).active_bytes = True, 0
    known = Ledger(lost=True) if ledger_is == "lost" else ledger(world.node, "")
    restarted(world, known)
    assert world.state(seat) is S.ACTIVE
    assert host_memory.account(world.managed(seat)).taken_bytes == 44 * GIB, "1.1 x what it declares"


def test_a_switch_under_way_keeps_both_accounts_over_a_restart_of_the_manager(world: HostWorld) -> None:
    a, b = world.fill("a", "b", vram=SIZE)
    for seat in (a, b):
        host_memory.account(world.managed(seat)).active_bytes = 5 * GIB
    world.tick(30)
    world.switch(b, a)
    reserved = host_memory.account(world.managed(b)).taken_bytes
    assert reserved >= VRAM * GIB
    restarted(world, ledger(world.node, ""), status(world.job(), "started", "pending", done=False))
    assert (world.state(a), world.state(b)) == (S.PARKED, S.PARKING)
    assert host_memory.account(world.managed(b)).taken_bytes == reserved
    assert host_memory.account(world.managed(a)).taken_bytes == VRAM * GIB


@pytest.mark.parametrize("backend", ["fake", "sglang"])
@pytest.mark.parametrize("ends_by", ["demand", "a restart of the manager"])
def test_a_drain_that_is_called_off_gives_its_host_memory_back(world: HostWorld, backend: str, ends_by: str) -> None:
    a, b = world.fill("a", "b", vram=SIZE, backend=backend)
    world.tick(30)
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING
    assert host_memory.account(world.managed(b)).taken_bytes == 44 * GIB
    if ends_by == "demand":
        world.traffic(a)
        world.tick(1)
    else:
        restarted(world, ledger(world.node, ""))
    assert world.state(b) is S.ACTIVE
    assert host_memory.account(world.managed(b)).taken_bytes == 0
    assert host_memory.account(world.managed(a)).taken_bytes == VRAM * GIB


def test_what_an_engine_pinned_in_a_park_that_failed_stays_on_its_account(world: HostWorld) -> None:
    a, b = world.fill("a", "b", vram=SIZE, backend="sglang")
    world.tick(30)
    world.switch(b, a)
    failed = status(world.job(), "active", "pending")
    failed = failed.model_copy(update={"park": (failed.park[0].model_copy(update={"host_bytes": 20 * GIB}),)})
    world.receive(JobProgress(cause="j", node="n1", status=failed))
    assert world.state(b) is S.ACTIVE
    assert host_memory.account(world.managed(b)).taken_bytes == 20 * GIB


def test_an_engine_without_room_for_what_it_pins_does_not_rehearse(world: HostWorld) -> None:
    seat = world.seat(1, 0)
    world.loads(seat, "v", backend="vllm", vram="90GiB")
    world.healthy(seat)
    assert world.state(seat) is S.ACTIVE
    assert not any(isinstance(effect, SwitchJob) for effect in world.effects)
    assert host_memory.account(world.managed(seat)).taken_bytes == 0


class AnyOrder(AnyLife):
    """The same on two groups with a budget, where each seat has a pod at first."""

    world: HostWorld

    def __init__(self) -> None:
        super().__init__()
        self.world = HostWorld(groups=(make_group("G0", [0], 4), make_group("G1", [1], 3)), gib=170)
        for number, seat in enumerate([*self.world.node.seats]):
            self.world.pod(seat, f"m{number}", vram=SIZE)

    @rule(number=SEATS)
    def comes_up(self, number: int) -> None:
        seat, world = self.some(number), self.world
        if seat in world.pods and not world.pods[seat].running and seat not in world.calls:
            world.call(seat)
        ticket = next((e for e in reversed(world.effects) if isinstance(e, StartTicket) and e.seat == seat), None)
        if seat in world.calls and ticket is not None and ticket.call == world.calls[seat].call:
            world.start(seat)
            world.healthy(seat)

    @rule(number=SEATS, requests=st.integers(0, 20))
    def expect(self, number: int, requests: int) -> None:
        if self.some(number) in self.world.pods:
            self.world.expect(self.some(number), requests)

    @rule()
    def drops(self) -> None:
        self.world.dropped()

    @rule(group=st.integers(0, 1), park=st.sampled_from(["parked", "parked", "active"]))
    def works(self, group: int, park: str) -> None:
        """What the switch of a group waits for."""
        world, switch = self.world, self.world.node.switches.get(f"G{group}")
        if switch is None:
            return
        if switch.phase == "draining" and switch.victim:
            world.beat()
            world.quiet(switch.victim)
        elif switch.job.sent is not None:
            job = world.job_of(switch.op)
            world.receive(JobAnswered(job, JobReply(accepted=True)))
            world.progress(job, park=park)

    @invariant()
    def the_budget_is_never_exceeded(self) -> None:
        self.world.check()
        assert host_memory.taken_bytes(self.world.node) <= self.world.gib * GIB


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=50)
