"""Seats that move while anything fails: no GPU ever has memory of more seats than may be there.

The node here is physical: it knows where each seat's memory is, and jobs act on it only when they are carried out. Jobs
may come late, also those of a manager that is gone; reports may be lost; managers die between any two messages.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kybernate.messages import (
    ActivateSeat,
    AskJobs,
    Command,
    DrainNode,
    JobProgress,
    JobReply,
    JobStatus,
    MigrateSeat,
    OrderCommand,
    ParkSeat,
    PinSeat,
    ResumeNode,
    SeatProgress,
    SeatTarget,
    SwitchJob,
    UnpinSeat,
)
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import JobAnswered, Recovered, StartTicket
from tests.manager.pulling import Pulls
from tests.manager.world import World, make_group

UNFINISHED = ("pending", "started")


@dataclass
class Work:
    """A job as the checkpointer has it."""

    job: SwitchJob
    park: dict[str, str] = field(default_factory=dict)
    activate: str = "pending"
    refused: bool = False
    done: bool = False

    @property
    def unfinished(self) -> set[str]:
        coming = {self.job.activate.seat} if self.job.activate is not None and self.activate in UNFINISHED else set()
        return coming | {target.seat for target in self.job.park if self.park.get(target.seat) is None}


@dataclass
class Node:
    """Where memory is, and the checkpointer's journal."""

    memory: dict[str, str] = field(default_factory=dict)
    """GPU by seat that has memory there."""
    parked: dict[str, str] = field(default_factory=dict)
    """GPU by seat that was parked there."""
    works: dict[str, Work] = field(default_factory=dict)
    epochs: Counter[str] = field(default_factory=Counter)

    def occupy(self, seat: str, gpu: str) -> None:
        there = [other for other, on in self.memory.items() if on == gpu and other != seat]
        assert not there, f"{seat} comes to {gpu}, where {there} still has memory"
        self.parked.pop(seat, None)
        self.memory[seat] = gpu

    def end(self, seat: str) -> None:
        """Its processes are gone."""
        self.memory.pop(seat, None)
        self.parked.pop(seat, None)

    def take(self, job: SwitchJob) -> JobReply:
        targets = [*job.park, *([job.activate] if job.activate is not None else [])]
        gpus = {gpu for target in targets for gpu in target.gpus}
        highest = max(self.epochs.values(), default=0)
        if job.op in self.works:
            return JobReply(accepted=True, highest_epoch=highest, jobs=(self.status(self.works[job.op]),))
        if job.epoch < max((self.epochs[gpu] for gpu in gpus), default=0):
            return JobReply(accepted=False, code="stale-epoch", highest_epoch=highest)
        for work in self.open:
            if self._gpus(work) & gpus or work.unfinished & {target.seat for target in targets}:
                return JobReply(accepted=False, code="busy", highest_epoch=highest)
        self.epochs.update({gpu: job.epoch - self.epochs[gpu] for gpu in gpus})
        self.works[job.op] = Work(job)
        return JobReply(accepted=True, highest_epoch=job.epoch, jobs=(self.status(self.works[job.op]),))

    def fence(self, job: AskJobs) -> None:
        for gpu in {*job.gpus, *(gpu for target in job.targets for gpu in target.gpus)}:
            self.epochs[gpu] = max(self.epochs[gpu], job.epoch)

    def _gpus(self, work: Work) -> set[str]:
        return {g for t in (*work.job.park, work.job.activate) if t is not None for g in t.gpus}

    @property
    def open(self) -> list[Work]:
        return [work for work in self.works.values() if not work.done]

    def step(self, work: Work, *, fails: bool) -> None:
        """One half of a job, or its end. ``fails``: the driver refuses it."""
        park = next((target for target in work.job.park if work.park.get(target.seat) is None), None)
        if park is not None:
            self._park(work, park, fails)
        elif work.job.activate is not None and work.activate in UNFINISHED and self._made_room(work):
            self._activate(work, work.job.activate, fails)
        else:
            work.done = True

    def _made_room(self, work: Work) -> bool:
        return all(outcome in ("parked", "gone") for outcome in work.park.values())

    def _park(self, work: Work, target: SeatTarget, fails: bool) -> None:
        seat = target.seat
        if seat not in self.memory:
            work.park[seat] = "parked" if seat in self.parked else "gone"
        elif fails:
            work.park[seat] = "active"
        else:
            self.parked[seat] = self.memory.pop(seat)
            work.park[seat] = "parked"

    def _activate(self, work: Work, target: SeatTarget, fails: bool) -> None:
        (gpu,) = target.gpus
        if target.seat not in self.parked:
            work.activate = "active" if target.seat in self.memory else "gone"
        elif fails:
            work.activate, work.refused = "parked", self.parked[target.seat] != gpu
        else:
            self.occupy(target.seat, gpu)
            work.activate = "active"

    def status(self, work: Work) -> JobStatus:
        activate = work.job.activate
        return JobStatus(
            op=work.job.op,
            epoch=work.job.epoch,
            group=work.job.group,
            park=tuple(self._progress(target, work.park.get(target.seat, "started")) for target in work.job.park),
            activate=None if activate is None else self._progress(activate, work.activate, refused=work.refused),
            done=work.done,
        )

    def _progress(self, target: SeatTarget, outcome: str, *, refused: bool = False) -> SeatProgress:
        return SeatProgress(
            seat=target.seat,
            pod_uid=target.pod_uid,
            container_id=target.container_id,
            outcome=outcome,  # type: ignore[arg-type]
            move_refused="seat" if refused else "",
        )

    def look(self, target: SeatTarget) -> SeatProgress:
        """What the seat's processes do."""
        seat = target.seat
        busy = any(seat in {t.seat for t in (*w.job.park, w.job.activate) if t is not None} for w in self.open)
        on = self.memory.get(seat) or self.parked.get(seat)
        outcome = "active" if seat in self.memory else "parked" if seat in self.parked else "gone"
        reported = self._progress(target, "started" if busy else outcome)
        known = on is not None and (not busy or seat in self.parked)
        return reported.model_copy(update={"gpus": (on,) if known else ()})


SEATS = st.integers(0, 4)


class AnyMove(RuleBasedStateMachine):
    """Two GPUs, five seats, one brain that likes to move them."""

    def __init__(self) -> None:
        super().__init__()
        groups = (make_group("G0", [0], 3, rebalance=True), make_group("G1", [1], 2, rebalance=True))
        self.world = World(groups=groups, policy=Pulls(busy_seconds=1.0))
        self.world.boot()
        self.world.fill("a", "b", "c")
        self.world.fill("d", "e", group=1)
        self.seats = [seat for group in groups for seat in group.seat_ids]
        self.node = Node()
        for seat in self.seats:
            gpu = self.world.managed(seat).home.gpus[0].uuid
            (self.node.memory if self.world.state(seat) is S.ACTIVE else self.node.parked)[seat] = gpu
        self.collected = len(self.world.effects)
        self.letters: list[tuple[object, SwitchJob]] = []
        """Jobs that are on their way, with the board that sent them."""
        self.world.tick(20)

    def collect(self) -> None:
        """The effects since the last time: jobs wait to be delivered, tickets are used by kubelet."""
        effects, self.collected = self.world.effects[self.collected :], len(self.world.effects)
        self.letters += [(self.world.board, effect) for effect in effects if isinstance(effect, SwitchJob)]

    @rule(group=st.integers(0, 1), choice=st.integers(0, 2), how=st.sampled_from(["asked", "drained", "done"]))
    def hot(self, group: int, choice: int, how: str) -> None:
        """The holder of one group is busy and a parked seat there has demand; no other seat has any."""
        here = [row for row in self.world.node.seats.values() if row.group.name == self.world.groups[group].name]
        parked = [row.id for row in here if row.state is S.PARKED]
        self.world.beat()
        for seat in self.seats:
            self.world.traffic(seat, in_flight=int(seat in {row.id for row in here if row.state is S.ACTIVE}))
        if parked:
            self.world.traffic(parked[choice % len(parked)], waiting=2, oldest=5.0)
        if how == "drained":
            self.drains_end()
        elif how == "done":
            self.all_is_carried_out(fails=False)

    @rule(number=SEATS)
    def more_traffic(self, number: int) -> None:
        self.world.beat()
        self.world.traffic(self.seats[number], waiting=1, oldest=1.0)

    @rule(number=SEATS, kind=st.sampled_from([PinSeat, UnpinSeat, ParkSeat, ActivateSeat]))
    def an_operator_wants(self, number: int, kind: type[Command]) -> None:
        self.world.command(kind, self.seats[number])

    @rule(number=SEATS, to=st.sampled_from(["G0", "G1"]))
    def an_operator_moves(self, number: int, to: str) -> None:
        self.world.order(MigrateSeat, seat=self.seats[number], to=to)

    @rule(group=st.sampled_from(["G0", "G1"]), kind=st.sampled_from([DrainNode, ResumeNode]))
    def an_operator_drains_or_resumes(self, group: str, kind: type[OrderCommand]) -> None:
        self.world.order(kind, group=group)

    @rule(seconds=st.sampled_from([0.1, 1.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)
        self.world.beat()

    @rule()
    def drains_end(self) -> None:
        self.world.drains_end()

    @precondition(lambda self: self.letters)
    @rule(last=st.booleans(), answered=st.booleans())
    def job_arrives(self, last: bool, answered: bool) -> None:
        board, job = self.letters.pop(-1 if last else 0)
        reply = self.node.take(job)
        if board is self.world.board:
            self.world.receive(JobAnswered(job, reply if answered else None))

    @precondition(lambda self: self.node.open)
    @rule(last=st.booleans(), fails=st.sampled_from([False, False, False, True]), reported=st.booleans())
    def job_goes_on(self, last: bool, fails: bool, reported: bool) -> None:
        work = self.node.open[-1 if last else 0]
        self.node.step(work, fails=fails)
        if reported:
            self.tell(work)

    @rule(fails=st.sampled_from([False, False, True]))
    def all_is_carried_out(self, fails: bool) -> None:
        """Whatever was decided, from its drain to its end."""
        for _ in range(4):
            self.drains_end()
            self.collect()
            while self.letters:
                self.job_arrives(last=False, answered=True)
            for work in self.node.open:
                self.node.step(work, fails=fails)
                self.tell(work)

    @rule()
    def manager_asks(self) -> None:
        for work in list(self.node.works.values()):
            self.tell(work)

    @rule(number=SEATS)
    def engine_dies(self, number: int) -> None:
        seat = self.seats[number]
        if self.world.pods[seat].running:
            self.node.end(seat)
            self.world.exit(seat)

    @rule(number=SEATS)
    def kubelet_starts_it(self, number: int) -> None:
        seat = self.seats[number]
        if self.world.pods[seat].running:
            return
        call = self.world.calls.get(seat)
        if call is None or not any(isinstance(e, StartTicket) and e.call == call.call for e in self.world.effects):
            self.world.call(seat)
        else:
            self.node.occupy(seat, self.world.managed(seat).home.gpus[0].uuid)
            self.world.start(seat)
            self.world.healthy(seat)

    @rule()
    def manager_dies(self) -> None:
        """What it sent before its death may still arrive; the next one knows the ledger, and asks."""
        ledger = recovery.ledger(self.world.node, "boot")
        self.world.board = board = self.world.new_board()
        board.node.epoch = ledger.epoch
        epoch = board.node.next_epoch(self.world.now)
        targets = tuple(self.targets(board))
        gpus = tuple(gpu.uuid for group in self.world.groups for gpu in group.gpus)
        self.node.fence(AskJobs(cause="r", node="n1", epoch=epoch, targets=targets, gpus=gpus))
        jobs = tuple(self.node.status(work) for work in self.node.open)
        seats = tuple(self.node.look(target) for target in targets)
        reply = JobReply(accepted=True, highest_epoch=epoch, jobs=jobs, seats=seats)
        self.world.receive(Recovered(self.world.owners(), ledger, reply))
        self.world.beat()
        self.collect()
        self.letters = [(sender, job) for sender, job in self.letters if sender is board or job.epoch < epoch]

    def targets(self, board: object) -> Iterator[SeatTarget]:
        for pod in self.world.pods.values():
            if pod.container_id:
                yield SeatTarget(seat=pod.seat, pod_uid=pod.uid, container_id=pod.container_id, gpus=())

    def tell(self, work: Work) -> None:
        self.world.receive(JobProgress(cause="c", node="n1", status=self.node.status(work)))

    @invariant()
    def jobs_are_collected(self) -> None:
        self.collect()

    @invariant()
    def leases_follow_memory(self) -> None:
        """A seat with memory on a GPU and in no job holds a lease of this GPU's group. None is quarantined."""
        assert all(row.state is not S.QUARANTINED for row in self.world.node.seats.values())
        busy = {seat for work in self.node.open for seat in work.unfinished}
        for seat, gpu in self.node.memory.items():
            row = self.world.managed(seat)
            if seat not in busy and row.state is S.ACTIVE:
                assert row.lease
                assert row.group.gpus[0].uuid == gpu, f"{seat} is on {gpu} and not in {row.group.name}"

    def teardown(self) -> None:
        """Let everybody behave from now on: every switch under way ends, and so does every job."""
        for seat in self.seats:
            self.world.command(UnpinSeat, seat)
            self.world.traffic(seat)
        for _ in range(60):
            self.collect()
            self.drains_end()
            while self.letters:
                self.job_arrives(last=False, answered=True)
            for work in self.node.open:
                self.node.step(work, fails=False)
            self.manager_asks()
            if not self.world.node.switches and not self.node.open:
                self.all_is_known()
                return
            self.time_passes(1.5)
        raise AssertionError(f"switches that do not end: {self.world.node.switches}")

    def all_is_known(self) -> None:
        """No seat is half way, and each seat with memory holds the group that it is on."""
        for seat in self.seats:
            row, gpu = self.world.managed(seat), self.node.memory.get(seat)
            assert row.state not in (S.DRAINING, S.PARKING, S.ACTIVATING, S.MIGRATING), (
                f"{seat} is {row.state} for good"
            )
            assert gpu is None or (row.lease and row.group.gpus[0].uuid == gpu), (
                f"{seat} has memory, and is {row.state}"
            )


TestAnyMove = AnyMove.TestCase
TestAnyMove.settings = settings(stateful_step_count=50)


def test_a_victim_that_its_job_found_gone_is_not_quarantined_by_a_new_manager() -> None:
    """The checkpointer does not look at the seats of a job under way, so it still says "started" of the victim."""
    state = AnyMove()
    state.an_operator_drains_or_resumes(group="G0", kind=DrainNode)
    state.hot(choice=0, group=0, how="drained")
    state.engine_dies(number=4)
    state.jobs_are_collected()
    state.job_arrives(last=True, answered=False)
    state.job_goes_on(last=False, fails=False, reported=False)
    victim = state.node.open[0].job.park[0].seat
    assert state.node.status(state.node.open[0]).park[0].outcome == "gone"

    state.manager_dies()

    state.leases_follow_memory()
    assert state.world.managed(victim).state is S.BACKOFF
    state.teardown()
