"""Groups whose seats share memory, and what is really on their GPUs, apart from the board's books.

A container that starts takes all its memory at once. The checkpointer works on its own, and its reports may come late.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kybernate.messages import JobProgress, JobReply, JobStatus, SeatProgress, SwitchJob
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core.inputs import JobAnswered, StartCalls
from tests.manager.world import GIB, World, make_group, status

RESERVE = 2 * GIB


def make_packed(name: str, indices: Iterable[int], seats: int) -> Group:
    """A group whose seats share memory, 2 GiB of each GPU in reserve."""
    group = make_group(name, indices, seats, slots=seats)
    changes = {"packing": "memory", "memory_reserve": RESERVE}
    return replace(group, profile=group.profile.model_copy(update=changes))


@dataclass
class Truth:
    """One seat's container as it is."""

    uses: int
    """Bytes on each GPU of its group while it runs."""
    keeps: int
    """Bytes on each GPU while it is parked."""
    gpus: tuple[str, ...] = ()
    parked: bool = False

    @property
    def bytes(self) -> int:
        return self.keeps if self.parked else self.uses


@dataclass
class PackedWorld(World):
    """``started`` containers and jobs change ``truth`` at once; the board learns of jobs by ``report`` only."""

    truth: dict[str, Truth] = field(default_factory=dict)
    """By seat: its container that exists."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By seat: (bytes per GPU, residue per GPU) of the containers that its pod starts."""
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    """By op: what the checkpointer has done so far."""

    def own(self, seat: str, model: str, gib: int, keeps_gib: int = 0, *, declared: bool = True) -> None:
        """A pod for this seat that uses so much VRAM of each GPU."""
        self.sizes[seat] = (gib * GIB, keeps_gib * GIB)
        gpus = len(self.managed(seat).home.gpus)
        self.pod(seat, model, **({"vram": f"{gib * gpus}GiB"} if declared else {}))

    def asks(self, seat: str, gib: int) -> None:
        """The container of such a pod waits at the start gate."""
        self.own(seat, f"m-{seat}", gib)
        self.call(seat)

    def up(self, seat: str, gib: int, keeps: int = 0, *, declared: bool = True) -> None:
        """From nothing to active."""
        self.own(seat, f"m-{seat}", gib, keeps, declared=declared)
        self.come_up(seat)
        assert self.state(seat) is SeatState.ACTIVE

    def serving(self, *sizes: int | tuple[int, int], declared: bool = True) -> list[str]:
        """Seats of the first group come up one after another; by GiB that they use, and keep while they are parked."""
        seats = list(self.groups[0].seat_ids[: len(sizes)])
        for seat, size in zip(seats, sizes, strict=True):
            gib, keeps = size if isinstance(size, tuple) else (size, 0)
            self.up(seat, gib, keeps, declared=declared)
        return seats

    def start(self, seat: str) -> None:
        """The container starts and takes its memory."""
        super().start(seat)
        self.truth[seat] = Truth(*self.sizes[seat], self.managed(seat).home.uuids)
        self.check()

    def exit(self, seat: str) -> None:
        """The container ends."""
        self.truth.pop(seat, None)
        super().exit(seat)

    def end_processes(self, seat: str) -> None:
        self.truth.pop(seat, None)
        super().end_processes(seat)

    def take(self, job: SwitchJob) -> None:
        """The checkpointer has the job on disk."""
        pending = status(job, "pending", "pending", done=False)
        self.jobs.setdefault(job.op, pending)

    def work(self, op: str) -> None:
        """The checkpointer does the next half of a job, without a report."""
        known = self.jobs[op]
        if any(one.outcome == "pending" for one in known.park):
            park = tuple(self._park(one) for one in known.park)
            self.jobs[op] = known.model_copy(update={"park": park, "done": known.activate is None})
        elif not known.done:
            assert known.activate is not None
            done = {"activate": self._activate(known.activate), "done": True}
            self.jobs[op] = known.model_copy(update=done)
        self.check()

    def report(self, op: str) -> None:
        """The board hears how far a job is."""
        self.receive(JobAnswered(self.job_of(op), JobReply(accepted=True)))
        self.receive(JobProgress(cause="j", node="n1", status=self.jobs[op]))

    def inherit(self, seat: str, gib: int, *, heir: int) -> None:
        """A pod that declares ``gib`` gets a ticket and goes before its container starts; its heir declares another
        size."""
        self.asks(seat, gib)
        assert self.state(seat) is SeatState.STARTING
        self.calls.pop(seat)
        self.receive(StartCalls({}))
        self.own(seat, "heir", heir)
        self.look(2)

    def restart(self) -> None:
        """The manager starts anew: with its ledger, and with what the checkpointer tells."""
        known = (self.jobs.get(switch.op) for switch in self.node.switches.values())
        open_ = tuple(one for one in known if one is not None and not one.done)
        concerned = {one.seat for job in open_ for one in (*job.park, job.activate) if one is not None}
        seats = []
        for seat in (seat for seat, pod in self.pods.items() if pod.container_id):
            there = self.truth.get(seat)
            outcome = "gone" if there is None else "parked" if there.parked else "active"
            own = {"pod_uid": self.pods[seat].uid, "container_id": self.pods[seat].container_id}
            seats.append(self.seen(seat, "started" if seat in concerned else outcome, **own))
        self.next_manager(None, *seats, jobs=open_)
        self.beat()

    def carry_out(self, job: SwitchJob) -> None:
        self.take(job)
        self.work(job.op)
        self.report(job.op)

    def check(self) -> None:
        """What is really on each GPU fits, the reserve left alone; and no two groups run on one GPU."""
        for gpu in {gpu.uuid: gpu for group in self.groups for gpu in group.gpus}.values():
            there = [one for one in self.truth.values() if gpu.uuid in one.gpus]
            running = [one for one in there if not one.parked]
            used = sum(one.bytes for one in there)
            assert used <= gpu.memory_bytes - RESERVE, f"{gpu.uuid}: {used / GIB} GiB in use"
            assert len({one.gpus for one in running}) <= 1, f"{gpu.uuid}: seats of two groups run"

    def _park(self, one: SeatProgress) -> SeatProgress:
        there = self.truth.get(one.seat)
        if there is None:
            return one.model_copy(update={"outcome": "gone"})
        there.parked = True
        sizes = {"vram_bytes": there.uses * len(there.gpus), "residue_bytes": there.keeps * len(there.gpus)}
        return one.model_copy(update={"outcome": "parked", **sizes})

    def _activate(self, one: SeatProgress) -> SeatProgress:
        there = self.truth.get(one.seat)
        if there is None:
            return one.model_copy(update={"outcome": "gone"})
        there.parked = False
        return one.model_copy(update={"outcome": "active"})
