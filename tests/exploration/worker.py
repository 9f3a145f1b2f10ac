"""The real worker, journal and node socket of a checkpointer on virtual time, with seats that are played.

Real: ``CheckpointWorker``, ``JobRun``, ``Journal`` with its files and threads, both ends of ``NodeSocket``. Played: the
seats' processes, whose steps take their time, and a manager that sends switches, changes of their second half, kills,
releases and fences, some of them twice or with an old epoch. What goes wrong: an fsync is slow (the disk hangs for
seconds) or fails, a record finds the disk full, a connection is lost, the checkpointer is killed between any two steps.

What must hold: no step is made that is not in its job's file, and no half has an outcome whose steps are not on disk;
one job at a time touches a GPU; no job below a fence is taken; in the end every job that was taken is done, the manager
has its report, and what the checkpointer says of a seat and keeps on record of it is true.
"""

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

from kybernate import files
from kybernate.bus.node_socket import NodeSocket, connecting, listening
from kybernate.bus.port import BusError
from kybernate.messages import (
    AskJobs,
    Job,
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    ReleaseJob,
    SeatTarget,
    SwitchJob,
)
from services.checkpointer.backends.driver import Backend
from services.checkpointer.backends.port import Ending, Member, NoProcessError, Note, SeatProcesses
from services.checkpointer.core.failures import JobGoal
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.processes import ProcessIdentity
from services.checkpointer.records import JobFile, Record
from services.checkpointer.worker import CheckpointWorker
from tests.exploration.machine import ViolationError
from tests.exploration.virtual import VirtualTime, run

FAULTS = ("slow", "sync", "full", "cut", "kill", "kill")
SLOW_SECONDS = 6.0
SEATS: Mapping[str, tuple[str, ...]] = {"a": ("G0",), "b": ("G0",), "c": ("G1",), "d": ("G1",), "wide": ("G0", "G1")}
ASK_SECONDS = 2.0
CALM_SECONDS = 60.0
_ENDS = ("active", "parked", "lost", "gone", "quarantined")


# --- the disk ---------------------------------------------------------------------------------------------------------


class DyingThread(ThreadPoolExecutor):
    """A thread of the journal. Virtual time stands still while it works; what it has not begun when the process is
    killed is never done."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__(1)
        self._clock, self._loop, self.dead = clock, asyncio.get_running_loop(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        def work() -> Any:
            if self.dead:
                raise OSError(errno.EIO, "the process was killed")
            return fn(*args, **kwargs)

        self._loop.call_soon_threadsafe(self._count, 1)
        future = super().submit(work)
        future.add_done_callback(lambda _: self._over())
        return future

    def _count(self, change: int) -> None:
        self._clock.working += change

    def _over(self) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended
            self._loop.call_soon_threadsafe(self._count, -1)


class FaultyJournal(Journal):
    """A journal on a disk that hangs, is full, or loses what it was given."""

    def __init__(self, folder: Path, clock: VirtualTime) -> None:
        super().__init__(folder, folder / "witness.json")
        self._clock = clock
        self._writer, self._syncer = DyingThread(clock), DyingThread(clock)
        self.slow = self.fails = False
        self.on_disk: dict[Path, int] = {}
        """Bytes of each file that are fsynced."""

    def die(self) -> None:
        """SIGKILL."""
        for thread in (self._writer, self._syncer):
            cast(DyingThread, thread).dead = True

    def _do(self, thread: ThreadPoolExecutor, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        done = super()._do(thread, work)
        self._clock.working += 1  # until the loop has received of it
        done.add_done_callback(lambda _: setattr(self._clock, "working", self._clock.working - 1))
        return done

    def _sync(self, file: Any) -> None:
        slow, fails, self.slow, self.fails = self.slow, self.fails, False, False
        if slow:
            self._clock.now += SLOW_SECONDS
        if fails:
            raise OSError(errno.EIO, "lost")
        size = os.fstat(file.handle).st_size
        super()._sync(file)
        self.on_disk[file.path] = size


# --- the seats --------------------------------------------------------------------------------------------------------


@dataclass
class Seat:
    """What is true of one seat's processes."""

    name: str
    state: str = "parked"
    container: int = 1

    def target(self) -> SeatTarget:
        return SeatTarget(
            seat=self.name, pod_uid=f"uid-{self.name}", container_id=f"{self.name}-{self.container}",
            gpus=SEATS[self.name], vram_bytes=100,
        )  # fmt: skip


@dataclass
class PlayedBackend:
    """Parks and activates at once or after seconds, one journaled step after the other."""

    node: "CheckpointerShell"
    keeps_processes: ClassVar[bool] = True

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        seat = self._seat(target)
        if seat.state == "gone":
            raise NoProcessError("it has ended")
        who = ProcessIdentity(pid=os.getpid(), start=1)
        sizes = dict.fromkeys(target.gpus, 100 // len(target.gpus))
        return SeatProcesses(
            target=target, group=group, epoch=epoch, root=who, members=(Member(who=who, gpu_bytes=sizes),),
            parked_on=target.gpus if seat.state == "parked" else (),
        )  # fmt: skip

    def container(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        return SeatProcesses(target=target, group=group, epoch=epoch, members=())

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        return seat

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        now = self._seat(seat.target)
        if now.state == "active" and self.node.rng.random() < 0.1:
            return Ending("active", "refused", gpus=seat.at)
        if now.state == "active":
            await self._step(seat, "park", "lock", note, lambda: None)
            await self._step(seat, "park", "checkpoint", note, lambda: setattr(now, "state", "parked"))
        return self._ending(seat)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        now = self._seat(seat.target)
        others = [one for one in self.node.seats.values() if one is not now and {*SEATS[one.name]} & {*seat.at}]
        if now.state == "parked" and any(one.state == "active" for one in others):
            return Ending("parked", "no room", gpus=seat.at)
        if now.state == "parked":
            await self._step(seat, "activate", "restore", note, lambda: setattr(now, "state", "active"))
            await self._step(seat, "activate", "unlock", note, lambda: None)
        return self._ending(seat)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        return await {JobGoal.PARKED: self.park, JobGoal.ACTIVE: self.activate, JobGoal.DEAD: self.kill}[intent](
            seat, note
        )

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        now = self._seat(seat.target)
        if now.state != "gone":
            await self._step(seat, "kill", "kill", note, lambda: setattr(now, "state", "gone"))
        return self._ending(seat)

    async def state(self, seat: SeatProcesses) -> Ending:
        return self._ending(seat)

    async def thaw(self, seat: SeatProcesses) -> None: ...

    async def probe(self) -> str | None:
        return None

    def host_bytes(self, seat: SeatProcesses) -> int | None:
        return None

    def ends_released(self) -> bool:
        return True

    def keeps(self, _: SeatTarget) -> bool:
        return False

    def _seat(self, target: SeatTarget) -> Seat:
        seat = self.node.seats[target.seat]
        return seat if target.container_id == f"{seat.name}-{seat.container}" else Seat(seat.name, "gone", 0)

    def _ending(self, seat: SeatProcesses) -> Ending:
        state = self._seat(seat.target).state
        return Ending(cast(Any, state), gpus=seat.at if state != "gone" else ())

    async def _step(self, seat: SeatProcesses, half: str, verb: str, note: Note, change: Callable[[], None]) -> None:
        await note(verb, 1)
        with self.node.touching(seat, half, verb):
            try:
                await asyncio.sleep(self.node.rng.choice((0.0, 0.05, 1.0)))
            except asyncio.CancelledError:  # killed: the call may have taken effect
                if self.node.rng.random() < 0.5:
                    change()
                raise
            change()


class NoHelpers:
    """The pool of the helpers: there are none."""

    async def warm(self, key: str) -> None: ...

    async def close(self, key: str) -> None: ...


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointerShell:
    """One checkpointer after the other, a manager, and what is true beside them."""

    folder: Path
    clock: VirtualTime
    rng: random.Random
    seats: dict[str, Seat] = field(default_factory=lambda: {name: Seat(name) for name in SEATS})
    epoch: int = 1
    ops: int = 0
    taken: dict[str, SwitchJob] = field(default_factory=dict)
    """Switches that were accepted."""
    received: dict[str, JobStatus] = field(default_factory=dict)
    """The last report of each."""
    fences: dict[str, int] = field(default_factory=dict)
    """Highest epoch by GPU of fences that were answered."""
    at_work: dict[str, str] = field(default_factory=dict)
    """By GPU: the job whose step is being made."""
    broken: list[str] = field(default_factory=list)
    before: frozenset[str] = frozenset()
    """Jobs that ended in an earlier life: the manager has to ask for them."""
    released: set[str] = field(default_factory=set)
    """Seats whose pods are deleted: in no further job until a new one starts."""
    lives: int = 0
    full: bool = False
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    journal: FaultyJournal | None = None
    server: NodeSocket | None = None

    def __post_init__(self) -> None:
        self.seats["a"].state = self.seats["c"].state = "active"

    # --- what must hold ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def touching(self, seat: SeatProcesses, half: str, verb: str) -> Any:
        """A step of a job is made now."""
        op, journal = seat.group.partition("#")[0], self.journal
        assert journal is not None
        if op != "ask" and not any(
            one.step == verb and one.half == half for one in self._records(op, seat.target.seat)
        ):
            self.broken.append(f"{verb} of {seat.target.seat} is not in the file of {op}")
        others = {self.at_work[gpu] for gpu in seat.target.gpus if self.at_work.get(gpu, op) != op}
        if others and op != "ask":
            self.broken.append(f"{op} touches {seat.target.gpus}, where {others} are at work")
        if op != "ask":  # a release, which no job waits for
            self.at_work |= dict.fromkeys(seat.target.gpus, op)
        try:
            yield
        finally:
            for gpu in seat.target.gpus if op != "ask" else ():
                self.at_work.pop(gpu, None)

    def _records(self, op: str, seat: str = "") -> list[Record]:
        found = []
        for path in (self.folder / "journal").glob("*.jsonl"):
            lines = [Record.model_validate_json(line) for line in path.read_bytes().split(b"\n")[:-1]]
            if lines and JobFile(lines).op == op:
                found += [one for one in lines if seat in ("", one.seat)]
        return found

    def _reported(self, status: JobStatus) -> None:
        self.received[status.op] = status
        journal = self.journal
        assert journal is not None
        job = journal.jobs.get(status.op)
        if job is None or status.op not in self.taken:
            return
        data = job.path.read_bytes()
        records = [Record.model_validate_json(line) for line in data.split(b"\n")[:-1]]
        if status.done and not any(one.kind == "done" for one in records):
            self.broken.append(f"{status.op} is reported as done, and its file has no end")
        for one in status.park:
            if one.outcome not in _ENDS or not any(r.kind == "step" and r.seat == one.seat for r in records):
                continue
            if not any(r.kind == "end" and r.seat == one.seat and r.half == "park" for r in records):
                self.broken.append(
                    f"{status.op}: {one.seat} is reported as {one.outcome}, and its file does not say so"
                )
            lines = data.splitlines(keepends=True)
            mine = b'"seat":"%s"' % one.seat.encode()
            steps = [line for line in lines if b'"kind":"step"' in line and b'"half":"park"' in line and mine in line]
            last = max((data.index(line) + len(line) for line in steps), default=0)
            if job.written_at is not None and journal.on_disk.get(job.path, 0) < last:
                self.broken.append(f"{status.op}: {one.seat} is reported as {one.outcome} before its steps are on disk")

    # --- the checkpointer -------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Checkpointers, each until it is killed or ends of a fault."""
        while True:
            self.lives += 1
            self.journal = journal = FaultyJournal(self.folder, self.clock)
            journal.load()
            self.before = frozenset(op for op, job in journal.jobs.items() if job.done)
            async with listening(self.folder / "bus.sock") as self.server:
                backends = {"cuda": cast(Backend, PlayedBackend(self))}
                pool = cast(HelperPool, NoHelpers())
                worker = CheckpointWorker("n1", self.server, journal, pool, backends, cast(Any, None))
                serving = asyncio.create_task(worker.serve())
                self.killed.clear()
                dying = asyncio.create_task(self.killed.wait())
                try:
                    await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not serving.done():
                        journal.die()
                    for task in (*worker._tasks, serving, dying):
                        task.cancel()
                    await asyncio.gather(*worker._tasks, serving, dying, return_exceptions=True)
                    for link in self.server.links:
                        link.transport.abort()
            journal.close()
            error = None if serving.cancelled() else serving.exception()
            if error is not None and not _of_the_disk(error):
                raise ViolationError(f"the worker ended: {error!r}") from error
            await asyncio.sleep(0.5)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The manager's end of the node socket."""
        async with (
            connecting(self.folder / "bus.sock") as bus,
            bus.subscribe(JobProgress.pattern(node="n1")) as reports,
        ):
            self.bus = bus

            async def listen() -> None:
                async for report in reports:
                    assert isinstance(report, JobProgress)
                    self._reported(report.status)

            hearing = asyncio.create_task(listen())
            try:
                yield
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)

    # --- the manager ------------------------------------------------------------------------------------------------

    async def _ask(self, job: Job) -> JobReply | None:
        with contextlib.suppress(BusError):
            return await self.bus.request(job, JobReply, timeout=ASK_SECONDS)
        return None

    def _switch(self) -> SwitchJob:
        self.ops += 1
        owned = [one for one in self.seats.values() if one.name not in self.released]
        incoming = self.rng.choice(owned or [*self.seats.values()])
        victims = [
            one.target() for one in owned
            if one is not incoming and one.state == "active" and {*SEATS[one.name]} & {*SEATS[incoming.name]}
        ]  # fmt: skip
        op = f"op-{self.ops}"
        return SwitchJob(
            cause=op, node="n1", epoch=self._epoch(), op=op, group=op, park=tuple(victims), activate=incoming.target()
        )

    def _epoch(self) -> int:
        self.epoch += 1
        return self.epoch if self.rng.random() < 0.85 else max(1, self.epoch - self.rng.randrange(8))

    async def _order(self, job: SwitchJob) -> None:
        fences = dict(self.fences)
        again = job.op in self.taken
        reply = await self._ask(job)
        if reply is None or not reply.accepted:
            return
        gpus = {gpu for one in (*job.park, *((job.activate,) if job.activate else ())) for gpu in one.gpus}
        if (
            not again
            and job.op not in self.received
            and job.epoch < max((fences.get(gpu, 0) for gpu in gpus), default=0)
        ):
            self.broken.append(f"{job.op} of epoch {job.epoch} was taken, and {fences} were fenced before")
        self.taken[job.op] = job

    async def _fence(self) -> None:
        epoch = self.epoch = self.epoch + 1
        gpus = tuple(self.rng.sample(["G0", "G1"], self.rng.choice((1, 2))))
        reply = await self._ask(AskJobs(cause="f", node="n1", epoch=epoch, gpus=gpus))
        if reply is not None and reply.accepted:
            self.fences |= {gpu: max(epoch, self.fences.get(gpu, 0)) for gpu in gpus}

    async def act(self) -> None:
        """One random action, then some virtual time."""
        rng, journal = self.rng, self.journal
        assert journal is not None
        loop, seat = asyncio.get_running_loop(), rng.choice([*self.seats.values()])
        match rng.choice(("switch",) * 8 + ("again", "kill-seat", "release", "fence", "start") + FAULTS):
            case "switch":
                loop.create_task(self._order(self._switch()))
            case "again" if self.taken:
                loop.create_task(self._order(rng.choice([*self.taken.values()])))
            case "kill-seat" if seat.name not in self.released:
                loop.create_task(self._ask(KillJob(cause="k", node="n1", epoch=self._epoch(), target=seat.target())))
            case "release":
                self.released.add(seat.name)
                loop.create_task(self._ask(ReleaseJob(cause="r", node="n1", epoch=self._epoch(), target=seat.target())))
            case "fence":
                loop.create_task(self._fence())
            case "start" if seat.state == "gone" and not self.at_work:
                self._start(seat)
            case "slow":
                journal.slow = True
            case "sync":
                journal.fails = True
            case "full":
                self.full = True
            case "cut":
                end = rng.choice([one for one in (self.bus, self.server) if one is not None])
                for link in end.links:
                    link.transport.abort()
            case "kill":
                self.killed.set()
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.3, 2.0, 12.0)))
        if self.broken:
            raise ViolationError(self.broken[0])

    def _start(self, seat: Seat) -> None:
        """Its container starts again where nothing else is active."""
        others = (one for one in self.seats.values() if one is not seat and {*SEATS[one.name]} & {*SEATS[seat.name]})
        if all(one.state != "active" for one in others):
            seat.container, seat.state = seat.container + 1, "active"
            self.released.discard(seat.name)

    def append(self, handle: int, line: bytes) -> None:
        """``files.append``, on a disk that may be full."""
        full, self.full = self.full, False
        if full:
            raise OSError(errno.ENOSPC, "no space left")
        _append(handle, line)

    async def settle(self) -> None:
        """Nothing goes wrong any more: every job ends, and and the manager knows it."""
        assert self.journal is not None
        self.full = self.journal.slow = self.journal.fails = False
        await asyncio.sleep(CALM_SECONDS)
        self.full = self.journal.slow = self.journal.fails = False
        targets = tuple(seat.target() for seat in self.seats.values())
        reply = await self._ask(AskJobs(cause="s", node="n1", epoch=0, ops=tuple(self.taken), targets=targets))
        if reply is None or not reply.accepted:
            raise ViolationError(f"the checkpointer does not answer: {reply}")
        known = {one.op: one for one in reply.jobs}
        for op in self.taken:
            if op not in known or not known[op].done:
                raise ViolationError(f"{op} was taken, and in the end is {known.get(op)}")
            if op not in self.before and self.received.get(op) != known[op]:
                raise ViolationError(f"{op} ended as {known[op]}, and the manager received {self.received.get(op)}")
        for one in reply.seats:
            seat = self.seats[one.seat]
            if one.outcome != seat.state:
                raise ViolationError(f"{one.seat} is {seat.state}, and the checkpointer says {one.outcome}")
            record = self.journal.parked.get(one.seat)
            if record is not None and seat.state == "active" and record.target.container_id == one.container_id:
                raise ViolationError(f"{one.seat} is {seat.state}, and on record as parked")
        if self.broken:
            raise ViolationError(self.broken[0])


def _of_the_disk(error: BaseException) -> bool:
    return (
        all(map(_of_the_disk, error.exceptions))
        if isinstance(error, BaseExceptionGroup)
        else isinstance(error, OSError)
    )


_append = files.append


def explore(seed: int, folder: Path, actions: int = 80) -> int:
    """One run, and how many checkpointers it had. Raises ViolationError."""

    async def work(clock: VirtualTime) -> int:
        shell = CheckpointerShell(folder, clock, random.Random(seed))
        life = asyncio.create_task(shell.live())
        try:
            with mock.patch.object(files, "append", shell.append):
                async with shell.open():
                    while not shell.bus.connected:
                        await asyncio.sleep(0.01)
                    for _ in range(actions):
                        await shell.act()
                        if life.done():
                            await life
                    await shell.settle()
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        return shell.lives

    return run(work)
