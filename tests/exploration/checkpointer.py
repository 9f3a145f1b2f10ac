"""A model of the checkpointer's shell around the real procedure: fencing, journal, jobs, reports.

Written from docs/dev/checkpointer.md, docs/dev/bus.md and decision 004. Each method call is one step between two of
which the process may crash: a journal record, a driver call, a report. What is durable is in ``Disk`` and outlives the
process.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.exploration.kubelet import Clock
from tests.exploration.machine import DriverError, Engine, Machine, ViolationError
from tests.exploration.product import (
    GPU_BYTES,
    AskJobs,
    End,
    JobGoal,
    JobReply,
    JobStatus,
    KillJob,
    Procedure,
    ProcessState,
    ReleaseJob,
    SeatProgress,
    SeatTarget,
    Step,
    StepTrouble,
    SwitchJob,
    Verb,
    container_of,
)

P = ProcessState
MAX_HANGS = 1
LEFT_ALONE_SECONDS = 600.0
_GOALS = {"park": JobGoal.PARKED, "activate": JobGoal.ACTIVE, "kill": JobGoal.DEAD}


@dataclass(frozen=True)
class Members:
    """The GPU processes of a container, as journaled before a half or kept while parked."""

    cid: str
    count: int
    gpus: tuple[str, ...]
    """Where their memory is, or was when they were parked."""
    known_size: bool = True
    """False: found again without a record. Such a seat is only restored on GPUs that are idle."""


@dataclass
class DiskJob:
    """One job in the journal."""

    op: str
    epoch: int
    command: SwitchJob | KillJob
    activate: SeatTarget | None
    begun: dict[str, Members] = field(default_factory=dict)
    """By half and seat."""
    ended: dict[str, SeatProgress] = field(default_factory=dict)
    done: JobStatus | None = None

    @property
    def first(self) -> tuple[tuple[str, SeatTarget], ...]:
        if isinstance(self.command, KillJob):
            return (("kill", self.command.target),)
        return tuple(("park", target) for target in self.command.park)

    @property
    def targets(self) -> tuple[SeatTarget, ...]:
        return (*(target for _, target in self.first), *((self.activate,) if self.activate is not None else ()))

    @property
    def gpus(self) -> set[str]:
        return {gpu for target in self.targets for gpu in target.gpus}

    @property
    def group(self) -> str:
        return self.command.group if isinstance(self.command, SwitchJob) else self.op


@dataclass
class Disk:
    """The state folder. ``journal`` and ``parked`` can be lost each alone."""

    jobs: dict[str, DiskJob] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    hung: dict[str, list[float]] = field(default_factory=dict)
    """Container → when its calls hung (day clock)."""
    parked: dict[str, Members] = field(default_factory=dict)
    """By seat."""

    def lose_journal(self) -> None:
        self.jobs, self.epochs, self.hung = {}, {}, {}


@dataclass
class Run:
    """A job under way: where it is, and what it does in the half under way."""

    job: DiskJob
    half: str = ""
    target: SeatTarget | None = None
    members: Members | None = None
    procedure: Procedure | None = None
    step: Step | None = None
    """Journaled and not executed yet."""
    outcome: SeatProgress | None = None
    """Of the half under way, not journaled yet."""
    kept: bool = False
    """The processes of that half are remembered or forgotten already."""
    progress: dict[str, SeatProgress] = field(default_factory=dict)


class FenceTruth:
    """What really happened to jobs and drains, kept apart from the checkpointer's own books."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.fence = 0
        """The youngest manager whose question after its start was answered."""
        self.closed: dict[str, float] = {}
        """Seat → when routers were informed of it."""

    def fenced(self, sender: int) -> None:
        self.fence = max(self.fence, sender)

    def accepted(self, op: str, sender: int) -> None:
        """Promise 4: no job of a manager before the one that has asked is taken."""
        if sender < self.fence:
            raise ViolationError(f"job {op} of manager {sender} is taken after manager {self.fence} had fenced")

    def closed_for(self, seat: str) -> float:
        return self._clock.wall - self.closed.get(seat, self._clock.wall)


@dataclass
class Checkpointer:
    """One incarnation."""

    machine: Machine
    disk: Disk
    clock: Clock
    truth: FenceTruth
    runs: dict[str, Run] = field(default_factory=dict)
    releases: list[SeatTarget] = field(default_factory=list)
    reserved: dict[str, str] = field(default_factory=dict)
    """GPU → seat."""
    reports: list[JobStatus] = field(default_factory=list)
    """Not sent yet."""
    trouble: StepTrouble | None = None
    """The next driver call fails so; ``lands``: although it takes effect."""
    lands: bool = False

    def __post_init__(self) -> None:
        for job in self.disk.jobs.values():
            if job.done is None:
                self.runs[job.op] = self._run_of(job)

    # --- requests -------------------------------------------------------------------------------------------------

    def answer(self, job: object, sender: int) -> JobReply:
        """``sender``: the incarnation of the manager that sent it."""
        match job:
            case SwitchJob():
                return self._take(DiskJob(job.op, job.epoch, job, job.activate), sender, wait=False)
            case KillJob():
                op = f"kill-{job.target.seat}-{job.epoch}"
                return self._take(DiskJob(op, job.epoch, job, None), sender, wait=True)
            case ReleaseJob():
                refusal = self._refusal((job.target,), set(job.target.gpus), job.epoch, wait=True)
                if refusal is None:
                    self._raise(set(job.target.gpus), job.epoch)
                    self.releases.append(job.target)
                return refusal or self._reply()
            case AskJobs():
                return self._ask(job, sender)
        raise TypeError(f"unknown job {job!r}")

    def _take(self, job: DiskJob, sender: int, *, wait: bool) -> JobReply:
        known = self.disk.jobs.get(job.op)
        if known is not None:
            return self._reply(self.status(known))
        refusal = self._refusal(job.targets, job.gpus, job.epoch, wait=wait)
        if refusal is not None:
            return refusal
        self.truth.accepted(job.op, sender)
        self._raise(job.gpus, job.epoch)
        self.disk.jobs[job.op] = job
        self.runs[job.op] = self._run_of(job)
        return self._reply(self.status(job))

    def _ask(self, job: AskJobs, sender: int) -> JobReply:
        gpus = {gpu for target in job.targets for gpu in target.gpus} | set(job.gpus)
        if gpus and job.epoch:
            if job.epoch <= max(self.disk.epochs.get(gpu, 0) for gpu in gpus):
                return self._reply(code="stale-epoch")
            self._raise(gpus, job.epoch)
        if job.cause == "recovery":
            self.truth.fenced(sender)
        named = [self.disk.jobs[op] for op in job.ops if op in self.disk.jobs]
        under_way = [run.job for run in self.runs.values() if isinstance(run.job.command, SwitchJob)]
        jobs = named if job.ops else under_way
        seats = tuple(self.seat_state(target) for target in job.targets)
        return self._reply(*(self.status(one) for one in jobs)).model_copy(update={"seats": seats})

    def _refusal(self, targets: tuple[SeatTarget, ...], gpus: set[str], epoch: int, *, wait: bool) -> JobReply | None:
        seen = max((self.disk.epochs.get(gpu, 0) for gpu in gpus), default=0)
        if epoch < seen:
            return self._reply(code="stale-epoch")
        seats = {target.seat for target in targets}
        for run in self.runs.values():
            if not wait and (run.job.gpus & gpus or self._unfinished(run) & seats):
                return self._reply(code="busy")
        return None

    def _unfinished(self, run: Run) -> set[str]:
        first = {target.seat for half, target in run.job.first if f"{half} {target.seat}" not in run.job.ended}
        return first | ({run.job.activate.seat} if run.job.activate is not None else set())

    def _raise(self, gpus: set[str], epoch: int) -> None:
        for gpu in gpus:
            self.disk.epochs[gpu] = max(epoch, self.disk.epochs.get(gpu, 0))

    def _reply(self, *jobs: JobStatus, code: str = "") -> JobReply:
        highest = max(self.disk.epochs.values(), default=0)
        return JobReply(accepted=not code, code=code, reason=code, highest_epoch=highest, jobs=jobs)

    # --- what it knows --------------------------------------------------------------------------------------------

    def status(self, job: DiskJob) -> JobStatus:
        if job.done is not None:
            return job.done
        run = self.runs[job.op]
        park = tuple(run.progress[target.seat] for _, target in job.first)
        activate = None
        if job.activate is not None:
            activate = run.progress.get("activate") or _progress(job.activate, "pending")
        return JobStatus(op=job.op, epoch=job.epoch, group=job.group, park=park, activate=activate)

    def seat_state(self, target: SeatTarget) -> SeatProgress:
        """The present state of a seat's processes, by evidence."""
        for run in self.runs.values():
            if target.seat in {one.seat for one in run.job.targets}:
                return _progress(target, "started")
        engine = self.machine.engine(target.container_id)
        if engine is None:
            keeper = container_of(target.container_id) in self.machine.keepers
            return _progress(target, "gone").model_copy(update={"keeper": keeper})
        if self._left_alone(target.container_id):
            return _progress(target, "quarantined", reason="hung too often")
        if self.machine.wall < self.machine.silent_until.get(container_of(target.container_id), 0.0):
            return _progress(target, "quarantined", reason="its state is not known: the driver does not answer")
        known = self.disk.parked.get(target.seat)
        known = known if known is not None and known.cid == target.container_id else None
        if not engine.loaded:
            return _progress(target, "active", no_context=True)
        states = set(engine.members)
        if states == {P.RUNNING} and not engine.frozen:
            return _progress(target, "active", gpus=engine.gpus)
        if states == {P.CHECKPOINTED}:
            return _progress(target, "parked", gpus=known.gpus if known is not None else ())
        return _progress(target, "lost", reason="its processes are " + ", ".join(sorted(states)))

    def _left_alone(self, cid: str) -> bool:
        hung = self.disk.hung.get(cid, [])
        return len(hung) > MAX_HANGS and self.clock.unix - hung[-1] < LEFT_ALONE_SECONDS

    # --- jobs, step by step ---------------------------------------------------------------------------------------

    def ready(self) -> list[str]:
        """Ops that can take a step. A kill waits for the jobs before it on its GPUs and of its seat."""
        found = []
        for op, run in self.runs.items():
            if isinstance(run.job.command, KillJob) and self._earlier(op, run.job.gpus, run.job.command.target.seat):
                continue
            found.append(op)
        return found

    def _earlier(self, op: str, gpus: set[str], seat: str) -> bool:
        for other, run in self.runs.items():
            if other == op:
                return False
            if run.job.gpus & gpus or seat in {target.seat for target in run.job.targets}:
                return True
        return False

    def release(self) -> bool:
        """Thaw a seat whose pod is deleted and forget it, after the jobs that have it."""
        for target in self.releases:
            if not self._earlier("", set(target.gpus), target.seat):
                self.releases.remove(target)
                engine = self.machine.engine(target.container_id)
                if engine is not None:
                    engine.frozen = False
                known = self.disk.parked.get(target.seat)
                if known is not None and known.cid == target.container_id:
                    del self.disk.parked[target.seat]
                return True
        return False

    def step(self, op: str) -> bool:
        """One step of a job."""
        run = self.runs.get(op)
        if run is None:
            return False
        if run.target is None and not self._next_half(run):
            self._finish(run)
        elif run.outcome is not None:
            self._close(run)
        elif run.procedure is None:
            self._begin(run)
        elif run.step is not None:
            self._execute(run, run.step)
        else:
            following = run.procedure.next()
            if isinstance(following, End):
                self._end(run, following)
            else:
                run.step = following  # on disk, where it changes something
        return True

    def _run_of(self, job: DiskJob) -> Run:
        run = Run(job)
        for half, target in job.first:
            run.progress[target.seat] = job.ended.get(f"{half} {target.seat}") or _progress(target, "pending")
        if job.activate is not None and f"activate {job.activate.seat}" in {*job.begun, *job.ended}:
            run.progress["activate"] = job.ended.get(f"activate {job.activate.seat}") or _progress(
                job.activate, "started"
            )
        return run

    def _halves(self, job: DiskJob) -> Iterator[tuple[str, SeatTarget]]:
        yield from job.first
        room = all(
            (ended := job.ended.get(f"{half} {target.seat}")) is not None and ended.outcome in ("parked", "gone")
            for half, target in job.first
        )
        if job.activate is not None and room and isinstance(job.command, SwitchJob):
            yield "activate", job.activate

    def _next_half(self, run: Run) -> bool:
        for half, target in self._halves(run.job):
            if f"{half} {target.seat}" not in run.job.ended:
                run.half, run.target = half, target
                return True
        return False

    def _begin(self, run: Run) -> None:
        """Find the processes and journal them; after a crash they are in the journal."""
        target, half = run.target, run.half
        assert target is not None
        key = f"{half} {target.seat}"
        begun = run.job.begun.get(key)
        if begun is None:
            found = self._find(target, half)
            if isinstance(found, SeatProgress):
                run.outcome = found
                return
            run.job.begun[key] = found
        run.members = begun or run.job.begun[key]
        self._progressed(run, _progress(target, "started"))
        hangs = len(self.disk.hung.get(run.members.cid, []))
        engine = self.machine.engine(run.members.cid)
        states, frozen = self._observe(run.members, engine)
        moving = half == "activate" and tuple(run.members.gpus) != tuple(target.gpus)
        run.procedure = Procedure(
            JobGoal.DEAD if _restarts(target, half) else _GOALS[half],
            states,
            frozen=frozen,
            replaying=begun is not None,
            hangs=hangs,
            moving=moving,
        )

    def _find(self, target: SeatTarget, half: str) -> Members | SeatProgress:
        known = self.disk.parked.get(target.seat)
        if known is not None and known.cid == target.container_id:
            return known
        engine = self.machine.engine(target.container_id)
        if engine is None:
            return _progress(target, "gone", reason="no process")
        if not engine.loaded:
            if half == "kill" or _restarts(target, half):
                return Members(target.container_id, 0, engine.gpus)
            return _progress(target, "active" if half == "park" else "lost", reason="no process uses a GPU")
        known_size = engine.holds or target.vram_bytes > 0  # the manager remembers it, or the pod declares it
        return Members(target.container_id, len(engine.members), engine.gpus, known_size=known_size)

    def _observe(self, members: Members, engine: Engine | None) -> tuple[list[ProcessState], bool]:
        """A frozen process that the driver does not list is CHECKPOINTED; the others have to be asked."""
        if engine is None:
            return [P.GONE] * members.count, False
        frozen = engine.frozen
        states = [P.CHECKPOINTED if frozen and s is P.CHECKPOINTED else P.UNKNOWN for s in engine.members]
        return states[: members.count], frozen

    def _execute(self, run: Run, step: Step) -> None:
        procedure, run.step = run.procedure, None
        assert procedure is not None
        trouble, self.trouble = self.trouble, None
        try:
            if trouble is None or self.lands:
                seen, killed = self._do(run, step, dying=procedure.goal is JobGoal.DEAD)
            if trouble is not None:
                raise DriverError(trouble)
        except DriverError as error:
            if error.trouble is StepTrouble.HUNG and run.members is not None:
                self.disk.hung.setdefault(run.members.cid, []).append(self.clock.unix)
            procedure.failed(step, error.trouble, "")
        else:
            procedure.done(step, seen, killed)

    def _do(self, run: Run, step: Step, *, dying: bool) -> tuple[ProcessState | None, int]:
        """Execute one step on the machine. Returns (state that was read, processes that were killed)."""
        members, target, machine = run.members, run.target, self.machine
        assert members is not None
        assert target is not None
        engine = machine.engine(members.cid)
        if step.member is not None:
            closed = 1e9 if dying or run.half != "park" else self.truth.closed_for(target.seat)
            if step.verb is Verb.RESTORE and any(self.reserved.get(gpu) != target.seat for gpu in target.gpus):
                raise DriverError(StepTrouble.REFUSED)
            gpus = target.gpus if run.half == "activate" else members.gpus
            return machine.call(members.cid, step.verb, step.member, gpus, closed_for=closed), 0
        match step.verb:
            case Verb.EVIDENCE if engine is None or set(engine.members) != {P.CHECKPOINTED}:
                raise DriverError(StepTrouble.REFUSED)
            case Verb.FREEZE if engine is not None:
                if set(engine.members) != {P.CHECKPOINTED}:
                    raise ViolationError(f"{engine.seat} is frozen with processes {engine.members}")
                engine.frozen = True
            case Verb.THAW if engine is not None:
                engine.frozen = False
            case Verb.ROOM:
                self._reserve(run, engine, members, target)
            case Verb.VERIFY if engine is None or not engine.running:
                raise DriverError(StepTrouble.REFUSED)
            case Verb.KILL:
                existed = engine is not None
                machine.end(members.cid)
                return None, int(existed)
            case _:
                pass
        return None, 0

    def _reserve(self, run: Run, engine: Engine | None, members: Members, target: SeatTarget) -> None:
        gpus = target.gpus if run.half == "activate" else members.gpus
        for gpu in gpus:
            owner = self.reserved.get(gpu)
            if owner not in (None, target.seat) and self.machine.slots[self.machine.group_of_gpus[tuple(gpus)]] == 1:
                raise DriverError(StepTrouble.REFUSED)
            self.reserved[gpu] = target.seat
        size = engine.size - engine.residue if engine is not None else 0
        for gpu in gpus:
            used = self.machine.used(gpu)
            if used + size > GPU_BYTES or (not members.known_size and used > GPU_BYTES // 20):
                raise DriverError(StepTrouble.REFUSED)

    def _end(self, run: Run, end: End) -> None:
        """The half is over: what it reports."""
        assert run.target is not None
        assert run.members is not None
        outcome = end.outcome
        if outcome == "lost" and (run.half == "kill" or _restarts(run.target, run.half)):
            outcome = "gone" if run.half == "kill" else "parked"
        engine = self.machine.engine(run.members.cid)
        gpus = engine.gpus if engine is not None and outcome in ("active", "parked") else ()
        run.outcome = _progress(run.target, outcome, reason=end.reason, gpus=gpus)
        if outcome == "parked" and engine is not None and engine.residue:
            sizes = {"vram_bytes": engine.size * len(gpus), "residue_bytes": engine.residue * len(gpus)}
            run.outcome = run.outcome.model_copy(update=sizes)
        for gpu in [gpu for gpu, seat in self.reserved.items() if seat == run.target.seat]:
            del self.reserved[gpu]

    def _close(self, run: Run) -> None:
        """Remember or forget the processes, journal the end, report."""
        target, outcome = run.target, run.outcome
        assert target is not None
        assert outcome is not None
        if not run.kept:
            run.kept = True
            self._keep(run, target, outcome)
            return
        run.job.ended[f"{run.half} {target.seat}"] = outcome
        self._progressed(run, outcome)
        run.half, run.target, run.members, run.procedure, run.outcome, run.kept = "", None, None, None, None, False

    def _keep(self, run: Run, target: SeatTarget, outcome: SeatProgress) -> None:
        if outcome.outcome == "parked" and run.members is not None and not _restarts(target, run.half):
            gpus = outcome.gpus or run.members.gpus
            kept = Members(run.members.cid, run.members.count, gpus, known_size=run.members.known_size)
            self.disk.parked[target.seat] = kept
        elif outcome.outcome not in ("parked", "quarantined"):
            self.disk.parked.pop(target.seat, None)

    def _progressed(self, run: Run, progress: SeatProgress) -> None:
        run.progress["activate" if run.half == "activate" else progress.seat] = progress
        self.reports.append(self.status(run.job))

    def _finish(self, run: Run) -> None:
        job = run.job
        job.done = self.status(job).model_copy(update={"done": True})
        del self.runs[job.op]
        self.reports.append(job.done)
        finished = [op for op, one in self.disk.jobs.items() if one.done is not None]
        for op in finished[:-50]:
            del self.disk.jobs[op]


def _restarts(target: SeatTarget, half: str) -> bool:
    """A park that ends the processes, and leaves no copy."""
    return half == "park" and target.backend == "restart"


def _progress(
    target: SeatTarget, outcome: str, *, reason: str = "", gpus: tuple[str, ...] = (), no_context: bool = False
) -> SeatProgress:
    return SeatProgress(
        seat=target.seat,
        pod_uid=target.pod_uid,
        container_id=target.container_id,
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        gpus=gpus,
        no_context=no_context,
    )
