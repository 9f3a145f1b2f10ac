"""Takes jobs from the node bus, runs one at a time per GPU, and reports their progress."""

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from kybernate.bus.port import BusError, LocalBus
from kybernate.lifecycle import spawn
from kybernate.logs import get_logger
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
from services.checkpointer.backends.port import Ending, NoMemberError, NoProcessError
from services.checkpointer.core.failures import StepFailedError
from services.checkpointer.engine_http import AnswerCheck
from services.checkpointer.helper_pool import HelperDiedError, HelperPool
from services.checkpointer.job_run import JobRun, find_processes, progress_of
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record, kill_op

GRACE_SECONDS = 1.0
"""Time that jobs get at shutdown; the next checkpointer replays the rest."""

REPEATED_JOBS = 64
"""Number of recent jobs that are reported again when a manager connects; their last reports may have been lost."""

REPEATED_RELEASES = 256
"""Number of recent releases that are recognised when they are asked for again."""

log = get_logger()


class Reporter:
    """Publishes job statuses, each in the turn of the event loop that makes it: a job never waits for the bus.

    What is reported during an outage is not sent; the last report of each job follows it.
    """

    def __init__(self, bus: LocalBus, node: str) -> None:
        self._bus, self._node = bus, node
        self._last: OrderedDict[str, JobProgress] = OrderedDict()
        bus.on_change(self._bus_changed)

    def report(self, status: JobStatus, cause: str) -> None:
        """Publish the status of a job."""
        progress = JobProgress(cause=cause, node=self._node, status=status)
        self._publish(progress)
        self._last[status.op] = progress
        self._last.move_to_end(status.op)
        while len(self._last) > REPEATED_JOBS:
            self._last.popitem(last=False)

    def _publish(self, progress: JobProgress) -> None:
        with contextlib.suppress(BusError):
            self._bus.publish_nowait(progress)

    def _bus_changed(self, connected: bool) -> None:
        if connected:
            for progress in self._last.values():
                self._publish(progress)


class CheckpointWorker:
    """Owns the jobs. Handlers reply within milliseconds; jobs run in separate tasks that no bus handler cancels."""

    def __init__(
        self,
        node: str,
        bus: LocalBus,
        journal: Journal,
        pool: HelperPool,
        backends: Mapping[str, Backend],
        check: AnswerCheck,
    ) -> None:
        self._node, self._bus, self._journal, self._pool, self._backends = node, bus, journal, pool, backends
        self._check = check
        self.reporter = Reporter(bus, node)
        self.running: dict[str, JobRun] = {}
        """Jobs under way by op."""
        self.replaying: set[str] = set()
        """Ops of running jobs that a crash interrupted."""
        self._releases: dict[tuple[str, str, str], None] = {}
        """Seats by (seat, pod UID, container ID) that are being released, or whose release ended their processes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Replay interrupted jobs and serve until cancelled. Raises the unexpected error of a job."""
        for file in list(self._journal.jobs.values()):
            if not file.done:
                log.warning("job.replayed", op=file.op, epoch=file.epoch, records=len(file.records))
                self.replaying.add(file.op)
                run = self.running[file.op] = self._run_of(file)
                self._spawn(self._run(run), f"job {file.op}")
        self._spawn(self._warm(), "warm")
        handlers: dict[type[Job], Callable[[Any], Awaitable[JobReply]]] = {
            SwitchJob: self.switch,
            ReleaseJob: self.release,
            KillJob: self.kill,
            AskJobs: self.ask,
        }
        try:
            async with contextlib.AsyncExitStack() as stack:
                for kind, handler in handlers.items():
                    await stack.enter_async_context(self._bus.serve(kind.pattern(node=self._node), handler))
                await self._crashed
        finally:
            # They have GRACE_SECONDS to end, and are cancelled then; the next start replays them from the journal.
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=GRACE_SECONDS)
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=GRACE_SECONDS / 2)

    async def switch(self, job: SwitchJob) -> JobReply:
        """Journal a switch and begin it; a repeated op gets its status."""
        known = self._journal.jobs.get(job.op)
        if known is not None:
            return self._taken(self._status(known))
        file = JobFile([Record(kind="switch", switch=job)])
        if not file.targets:
            return self._refused("empty", "the job names no seat")
        return self._refusal(file.targets, file.gpus, job.epoch) or self._busy(file) or await self._take(file)

    async def release(self, job: ReleaseJob) -> JobReply:
        """End a parked seat whose pod is deleted and drop its record, after the job that has the seat, if any.

        A repetition is answered at once and does nothing: the answer to the first one may have been too late.
        """
        target = job.target
        key = (target.seat, target.pod_uid, target.container_id)
        if key not in self._releases:
            refusal = self._refusal((target,), target.gpus, job.epoch)
            if refusal is not None:
                return refusal
            self._releases[key] = None
            await self._guarded(self._journal.fence(target.gpus, job.epoch))
            self._spawn(self._release(target, key), f"release {target.seat}")
        return self._taken().model_copy(update={"ends": self._backends[target.backend].ends_released()})

    async def kill(self, job: KillJob) -> JobReply:
        """Journal a kill and begin it after the job that has the seat, if any. It is not refused for a backend that
        this node lacks: no engine is asked to end."""
        known = self._journal.jobs.get(kill_op(job))
        if known is not None:
            return self._taken(self._status(known))
        file = JobFile([Record(kind="kill", kill=job)])
        return self._refusal((), file.gpus, job.epoch) or await self._take(file)

    async def ask(self, job: AskJobs) -> JobReply:
        """Statuses of jobs, and the present states of seats by evidence.

        The epoch fences the GPUs that the request names: older jobs are refused from now on, so that jobs of the
        previous manager cannot arrive late. One that is not above all that they have seen would not, and is refused.
        """
        gpus = {gpu for target in job.targets for gpu in target.gpus} | {*job.gpus}
        if gpus and job.epoch:
            seen = self._journal.seen_epoch(gpus)
            if job.epoch <= seen:
                return self._refused("stale-epoch", f"epoch {job.epoch} fences nothing: these GPUs have seen {seen}")
            await self._guarded(self._journal.fence(gpus, job.epoch))
        known = {op: self._journal.jobs[op] for op in job.ops if op in self._journal.jobs}
        known |= {op: run.file for op, run in self.running.items() if run.file.switch is not None}
        statuses = tuple(self._status(file) for file in known.values())
        seats = []
        for target in job.targets:
            ending = await self._state_of(target)
            ending.keeper = self._backends[target.backend].keeps(target)
            seats.append(progress_of(target, ending))
        return self._taken(*statuses).model_copy(update={"seats": tuple(seats)})

    # --- taking and running jobs ---------------------------------------------------------------------------------

    def _refusal(self, targets: tuple[SeatTarget, ...], gpus: Collection[str], epoch: int) -> JobReply | None:
        """The refusal of a job, whatever is under way; None if it can be taken.

        Epochs fence GPUs: a job older than the newest on one of its GPUs is refused.
        """
        seen = self._journal.seen_epoch(gpus)
        if epoch < seen:
            return self._refused("stale-epoch", f"epoch {epoch} is below {seen}, which these GPUs have seen; go above")
        for target in targets:
            if target.backend not in self._backends:
                known = ", ".join(sorted(self._backends))
                return self._refused("unsupported", f"this node has no backend {target.backend!r}; it has {known}")
        return None

    def _busy(self, file: JobFile) -> JobReply | None:
        """The refusal of a switch while other jobs are under way with its GPUs or seats: until "done" is reported, and
        not until their files are closed, as the manager may send the next job at once."""
        others = [(op, run) for op, run in self.running.items() if not run.file.done]
        busy = [op for op, run in others if run.file.gpus & file.gpus or run.unfinished & file.seats]
        if not busy:
            return None
        text = f"{', '.join(busy)} is under way on these GPUs or with this seat; ask again when it is done"
        return self._refused("busy", text)

    async def _take(self, file: JobFile) -> JobReply:
        run = self.running[file.op] = self._run_of(file)
        try:
            await self._guarded(self._journal.begin(file))
        except BaseException:
            self.running.pop(file.op, None)
            raise
        self._spawn(self._run(run), f"job {file.op}")
        log.info("job.journaled", op=file.op, epoch=file.epoch)
        return self._taken(run.status)

    def _run_of(self, file: JobFile) -> JobRun:
        cause = file.command.cause
        return JobRun(
            file,
            self._journal,
            self._backends,
            lambda status: self.reporter.report(status, cause),
            self._check,
        )

    async def _run(self, run: JobRun) -> None:
        op = run.file.op
        if run.file.switch is None:
            await self._until_free(run.file.gpus, run.file.seats, op)
        status = await run.run()
        # Report "done" only now: the manager may send the next job at once, which this one must not refuse as busy.
        self.running.pop(op, None)
        self.replaying.discard(op)
        self._ended.set()
        self.reporter.report(status, run.file.command.cause)
        if run.file.switch is None:
            await self._pool.close(run.file.group)

    async def _release(self, target: SeatTarget, key: tuple[str, str, str]) -> None:
        """Release a seat; what did not end its processes is done again when it is asked for again."""
        await self._until_free(frozenset(target.gpus), frozenset({target.seat}), "")
        ending = await self._end_released(target)
        if ending is None or ending.outcome != "gone":
            self._releases.pop(key, None)
        while len(self._releases) > REPEATED_RELEASES:
            del self._releases[next(iter(self._releases))]
        outcome = {} if ending is None else {"outcome": ending.outcome, "reason": ending.reason}
        log.info("seat.released", seat=target.seat, **outcome)

    async def _end_released(self, target: SeatTarget) -> Ending | None:
        """End the processes of a seat whose pod is deleted; None: kubelet's signal ends them."""
        backend = self._backends[target.backend]
        known = self._journal.on_record(target)
        if known is None or known.nothing:
            seat = backend.container(target, "ask", 0)
            await backend.thaw(seat)  # stopped by something else: let it end
            if not backend.ends_released():
                return None
            with contextlib.suppress(NoProcessError, NoMemberError, StepFailedError):
                seat = await backend.discover(target, "ask", 0)
            return await backend.kill(seat, _not_journaled)
        # Killed and not thawed: a SIGTERM handler of a checkpointed process blocks in the driver until the grace period
        # is over. The record goes last: after a crash the manager asks the next checkpointer for the same again.
        ending = await backend.kill(known.model_copy(update={"group": "ask"}), _not_journaled)
        if ending.outcome == "gone":
            self._journal.forget(target.seat)
            await self._journal.write_parked()
        return ending

    async def _until_free(self, gpus: frozenset[str], seats: frozenset[str], besides: str) -> None:
        """Wait until no earlier job uses these GPUs, or these seats elsewhere. Waiting jobs run in order of arrival."""
        while any(
            self.running[op].file.gpus & gpus or self.running[op].unfinished & seats
            for op in itertools.takewhile(lambda op: op != besides, self.running)
        ):
            self._ended.clear()
            await self._ended.wait()

    # --- answers ------------------------------------------------------------------------------------------------

    async def _state_of(self, target: SeatTarget) -> Ending:
        for op, run in self.running.items():
            if not run.file.done and target.seat in run.file.seats:  # a driver call would block until the transfer ends
                known = self._journal.parked.get(target.seat)
                return Ending("started", f"{op} is under way", gpus=known.memory_on if known is not None else ())
        backend = self._backends[target.backend]
        alone = self._journal.history.left_alone(target.seat, target.container_id, time.time())
        if alone is not None and backend.container(target, "ask", 0).root is not None:
            return Ending("quarantined", alone)
        try:
            ending = await backend.state(await find_processes(self._journal, backend, target, "ask", 0))
        except NoProcessError:
            return Ending("gone")
        except NoMemberError as error:
            known = self._journal.on_record(target)
            nothing = known is not None and known.nothing
            ending = Ending("parked" if nothing else "active", "" if nothing else str(error), no_context=True)
        except StepFailedError as error:
            ending = Ending("quarantined", f"its state is not known: {error}")
        else:
            if ending.outcome == "parked" and self._journal.on_record(target) is None:
                ending.gpus = ()  # learned from the driver: only the manager may know where it was parked
        if target.backend not in self._backends and ending.outcome != "gone":
            has = ", ".join(sorted(self._backends))
            return Ending("quarantined", f"its pod wants backend {target.backend!r}; this node has {has}: delete it")
        return ending

    def _status(self, file: JobFile) -> JobStatus:
        run = self.running.get(file.op)
        return (run or self._run_of(file)).status

    def _taken(self, *statuses: JobStatus) -> JobReply:
        return JobReply(accepted=True, highest_epoch=self._journal.highest_epoch, jobs=statuses)

    def _refused(self, code: str, reason: str) -> JobReply:
        return JobReply(accepted=False, code=code, reason=reason, highest_epoch=self._journal.highest_epoch)

    # --- tasks --------------------------------------------------------------------------------------------------

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Await a journal write. If it fails the process ends: nothing may go on that was not written."""
        try:
            await work
        except (OSError, RuntimeError) as error:
            self._crash(error)
            raise

    async def _warm(self) -> None:
        """Start helpers for the groups of the journaled jobs."""
        for key in dict.fromkeys([file.group for file in self._journal.jobs.values() if file.switch] + ["ask"]):
            with contextlib.suppress(HelperDiedError):
                await self._pool.warm(key)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        spawn(self._tasks, work, name).add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        if not self._crashed.done():
            self._crashed.set_exception(error)


async def _not_journaled(step: str, pid: int | None, detail: str = "") -> None:
    """Note of a kill whose interruption needs no replay."""
