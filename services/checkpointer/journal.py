"""The durable state of the checkpointer: jobs and their steps, parked processes, the highest epochs.

A job is written before it is accepted and a step before it is executed, and both are fsynced beside what follows: on
disk before the outcome of a half is written. A killed checkpointer loses nothing that it wrote; fsync protects against
a crash of the machine, which ends the processes too.

Under ``<state_dir>``: ``journal/<epoch>-<op>.jsonl``, one file per job, one line per record, a torn last line ignored;
``journal/next``, made beforehand and on disk with its name, which the next job's file is renamed from;
``parked/<seat>.json``, the processes of a parked seat, which the driver's lists no longer show; ``epochs.json``, the
highest epoch by GPU of jobs whose file is removed. A witness
under ``run_dir``, which no back-up of the state holds, has the highest epochs of this boot: files that do not know them
were put back, and are set aside instead of replayed. One thread writes and another fsyncs, so that a slow disk blocks
no event loop and no step.
"""

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kybernate import files
from kybernate.envelope import slug
from kybernate.lifecycle import boot_id
from kybernate.logs import get_logger
from kybernate.messages import SeatTarget
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.records import History, JobFile, Record, hung_recently, read_records

R = TypeVar("R")

NEXT = "next"
BRIEF_SECONDS = 0.002
"""Wall: how long the loop itself waits for a write. Most take 0.2 ms; to leave the loop costs ten times that."""
STALLED_SECONDS = 5.0
"""Wall seconds after which a disk that does not answer is named."""
KEPT_JOBS = 200
"""Finished jobs kept on disk for AskJobs; jobs in which a call hung are kept for a day."""
REMOVED_JOBS = 20
"""How many more there are before the oldest are removed, which takes two fsyncs and a look at all records."""


@dataclass(eq=False, slots=True)
class _OpenFile:
    """The file of a job under way, and how much of it is on disk."""

    handle: int
    path: Path
    written: int = 0
    """Writes whose fsync was asked for."""
    synced: int = 0
    """Those of them that are on disk."""
    error: Exception | None = None
    """Why it cannot be fsynced. It stays: the kernel may have dropped what it could not write."""


class Journal:
    """The journal files under one state folder; this checkpointer is their only writer."""

    def __init__(self, folder: Path, witness: Path | None = None) -> None:
        """``witness``: the file of the highest epochs of this boot; None: there is none."""
        self._witness = witness
        self._jobs = folder / "journal"
        self._parked = folder / "parked"
        self._epochs_file = folder / "epochs.json"
        self._writer = ThreadPoolExecutor(1, "journal")
        self._syncer = ThreadPoolExecutor(1, "journal-sync")
        self._under_way: dict[asyncio.Future[Any], float] = {}
        """Work of these threads that the event loop hears of, and when it was given; monotonic seconds."""
        self._syncing_since: float | None = None
        """When the fsync under way beside a job was begun; monotonic seconds."""
        self._open: dict[str, _OpenFile] = {}
        """By op; entered and removed by the writer."""
        self._next: int | None = None
        """The file made beforehand; only the writer uses it."""
        self.epochs: dict[str, int] = {}
        """Highest epoch by GPU."""
        self._filed: dict[str, int] = {}
        """Those of them that the files have; only the thread that fsyncs uses it."""
        self.parked: dict[str, SeatProcesses] = {}
        """Processes of parked seats, by seat."""
        self._parked_changes: deque[Callable[[], object]] = deque()
        """Changes of their files that the writer has not made yet."""
        self.jobs: dict[str, JobFile] = {}
        """Jobs on disk by op, oldest first."""
        self.history = History()
        """Hangs and failures by seat, derived from the records."""
        self.observe_fsync: Callable[[float], None] = lambda _: None
        """Called in the thread of the fsync of a record, with its wall seconds."""

    @property
    def waiting_seconds(self) -> float:
        """Wall seconds for which the oldest write or fsync under way has waited for the disk; 0: there is none."""
        since = [*self._under_way.values(), *([] if self._syncing_since is None else [self._syncing_since])]
        return time.monotonic() - min(since) if since else 0.0

    def stalled(self) -> str | None:
        """Why jobs get no outcome; None while the disk answers."""
        seconds = self.waiting_seconds
        if seconds < STALLED_SECONDS:
            return None
        return f"the journal waits for its disk for {seconds:.0f} s, and no job gets an outcome: is the disk broken?"

    def load(self) -> None:
        """Read all files. An unreadable one is renamed and logged, never fatal."""
        for folder in (self._jobs, self._parked):
            folder.mkdir(parents=True, exist_ok=True)
        if self._epochs_file.exists():
            known = _parse(self._epochs_file, lambda text: {str(k): int(v) for k, v in json.loads(text).items()})
            self.epochs = known or {}
        for path in sorted(self._parked.glob("*.json")):
            processes = _parse(path, SeatProcesses.model_validate_json)
            if processes is not None:
                self.parked[processes.target.seat] = processes
        next_file = self._jobs / NEXT
        if next_file.exists():  # a crash of the machine may have undone the renaming of a job's file
            if b"\n" in next_file.read_bytes():
                next_file.rename(self._jobs / f"{time.time_ns()}.jsonl")
            else:
                next_file.unlink()
        for path in sorted(self._jobs.glob("*.jsonl")):
            if b"\n" not in path.read_bytes():  # the machine crashed before the job was on disk
                path.unlink()
                get_logger().info("journal.never_on_disk", file=str(path))
                continue
            job = _parse(path, read_records)
            if job is not None:
                job.path = path
                self.jobs[job.op] = job
                _raise(self.epochs, job.gpus, job.epoch)
                for record in job.records:
                    self.history.add(job, record)

        self._set_aside_if_rolled_back()
        self._filed = dict(self.epochs)

    def _set_aside_if_rolled_back(self) -> None:
        """Files that do not know an epoch of this boot are older than it: what they call unfinished was finished since,
        and what they call parked may run. They count as lost, and the epochs of the witness as seen. Up to the epoch of
        an unreadable job it is that job which is missing."""
        try:
            seen = json.loads(self._witness.read_text()) if self._witness is not None else {}
            epochs = (
                {str(gpu): int(epoch) for gpu, epoch in seen["epochs"].items()} if seen.get("boot") == boot_id() else {}
            )
        except FileNotFoundError:
            return
        except (ValueError, KeyError, AttributeError) as error:
            get_logger().error("journal.witness_unreadable", file=str(self._witness), error=str(error))
            return
        names = [path.name.partition("-")[0] for path in self._jobs.glob("*.unreadable-*")]
        lost = max((int(name) for name in names if name.isdigit()), default=0)
        self.epochs |= {gpu: epoch for gpu, epoch in epochs.items() if self.epochs.get(gpu, 0) < epoch <= lost}
        newer = {gpu: epoch for gpu, epoch in epochs.items() if epoch > self.epochs.get(gpu, 0)}
        if not newer:
            return
        for folder in (self._jobs, self._parked):
            if any(folder.iterdir()):
                folder.rename(folder.with_name(f"{folder.name}.rolled-back-{time.time_ns()}"))
                folder.mkdir()
        self.jobs, self.parked, self.history = {}, {}, History()
        self.epochs |= newer
        files.replace(self._epochs_file, json.dumps(self.epochs), durable=True, mode=0o600)
        get_logger().error("journal.rolled_back", file=str(self._jobs), highest=max(newer.values()))

    def _attest(self, gpus: Collection[str], epoch: int) -> None:
        """Called after the journal has this epoch, by the thread that fsyncs; no job waits for it."""
        _raise(self._filed, gpus, epoch)
        if self._witness is None:
            return
        try:
            text = json.dumps({"boot": boot_id(), "epochs": self._filed})
            files.replace(self._witness, text, durable=False, mode=0o600)
        except OSError as error:
            get_logger().error("journal.witness_unwritable", file=str(self._witness), error=str(error))

    @property
    def highest_epoch(self) -> int:
        """Over all GPUs."""
        return max(self.epochs.values(), default=0)

    def seen_epoch(self, gpus: Collection[str]) -> int:
        """The highest epoch of any job that named one of these GPUs."""
        return max((self.epochs.get(gpu, 0) for gpu in gpus), default=0)

    def on_record(self, target: SeatTarget) -> SeatProcesses | None:
        """The processes of the target's container, if it was parked here."""
        known = self.parked.get(target.seat)
        return known if known is not None and known.target.container_id == target.container_id else None

    async def begin(self, job: JobFile) -> None:
        """Create a job's file; job and epoch survive a kill of the checkpointer when this returns, and are on disk
        before the job has an outcome."""
        job.path = self._jobs / f"{job.epoch:020d}-{slug(job.op)}.jsonl"
        line, gpus, epoch = job.records[0].line(), job.gpus, job.epoch
        _raise(self.epochs, gpus, epoch)
        self.jobs[job.op] = job

        def write() -> None:
            made, self._next = self._next, None
            if made is None:
                self._open[job.op] = _OpenFile(_create(job.path, line), job.path)
                return
            with files.named(job.path):
                files.append(made, line)
            os.rename(self._jobs / NEXT, job.path)
            self._open[job.op] = _OpenFile(made, job.path)
            self._sync_beside(self._open[job.op])

        await self._do(self._writer, write)
        self._syncer.submit(self._attest, gpus, epoch)
        job.written_at = time.time()

    async def add(self, job: JobFile, record: Record) -> None:
        """Append a record next to which no process is touched: those before it are on disk when this returns. It is
        written, so that it survives a kill of the checkpointer, and fsynced together with the next record."""
        await self._synced(job)
        await self._record(job, record)

    async def add_step(self, job: JobFile, record: Record) -> None:
        """Append the record of a step; it survives a kill of the checkpointer when this returns, and is fsynced beside
        the step. Raises OSError also for a step before it that could not be fsynced."""
        self._raise_failed(job)
        await self._record(job, record, then=self._sync_beside)

    def _sync_beside(self, file: _OpenFile) -> None:
        """Have what was written to it fsynced, once for all writes before the fsync begins; called by the writer."""
        file.written += 1
        self._syncer.submit(self._sync_unsynced, file)

    def _sync_unsynced(self, file: _OpenFile) -> None:
        written = file.written
        if file.synced == written or file.error is not None:
            return
        self._syncing_since = time.monotonic()
        try:
            self._sync(file)
            file.synced = written
        except Exception as error:
            file.error = error
        self._syncing_since = None

    def _raise_failed(self, job: JobFile) -> None:
        file = self._open.get(job.op)
        if file is not None and file.error is not None:
            raise file.error

    async def _synced(self, job: JobFile) -> None:
        """Wait until the job and all its steps are on disk. Raises OSError."""
        file = self._open.get(job.op)
        if file is not None and file.synced != file.written:
            await self._do(self._syncer, lambda: self._sync_unsynced(file))  # after all that was asked for
        self._raise_failed(job)

    async def _record(self, job: JobFile, record: Record, then: Callable[[_OpenFile], None] | None = None) -> None:
        """Append a record, and do ``then`` in the writer's thread."""
        job.records.append(record)
        self.history.add(job, record)

        def write() -> None:
            if job.op not in self._open:
                self._open[job.op] = _OpenFile(_reopen(job.path), job.path)
            file = self._open[job.op]
            self._change_parked()
            with files.named(job.path):
                files.append(file.handle, record.line())
            if then is not None:
                then(file)

        await self._do(self._writer, write)

    async def finish(self, job: JobFile, record: Record) -> None:
        """Append the last record, close the file, and now and then remove the oldest finished jobs."""

        def close(file: _OpenFile) -> None:
            self._sync(file)
            os.close(file.handle)
            del self._open[job.op]

        await self._synced(job)
        await self._record(job, record, then=close)
        if len(self.jobs) >= KEPT_JOBS + REMOVED_JOBS:
            await self._remove_old()
        self._writer.submit(self._make_next)

    async def _remove_old(self) -> None:
        """Remove the oldest finished jobs beyond KEPT_JOBS, once they are REMOVED_JOBS."""
        now = time.time()
        finished = [job for job in self.jobs.values() if job.done and not hung_recently(job, now)]
        if len(finished) < KEPT_JOBS + REMOVED_JOBS:
            return
        old = finished[: len(finished) - KEPT_JOBS]
        for job in old:
            del self.jobs[job.op]
        epochs = json.dumps(self.epochs)

        def remove() -> None:
            # First: a removed job's epoch must not be forgotten.
            files.replace(self._epochs_file, epochs, durable=True, mode=0o600)
            for job in old:
                job.path.unlink(missing_ok=True)

        await self._do(self._writer, remove)

    def _make_next(self) -> None:
        """Make the next job's file while nothing waits for it; without one the job makes its own."""
        if self._next is None:
            with contextlib.suppress(OSError):
                self._next = _create(self._jobs / NEXT, b"")

    async def fence(self, gpus: Collection[str], epoch: int) -> None:
        """Refuse jobs below this epoch on these GPUs from now on, also after a restart."""
        _raise(self.epochs, gpus, epoch)
        epochs = json.dumps(self.epochs)
        await self._do(self._writer, lambda: files.replace(self._epochs_file, epochs, durable=True, mode=0o600))
        await self._do(self._syncer, lambda: self._attest(gpus, epoch))

    def remember(self, processes: SeatProcesses) -> None:
        """Keep the processes of a parked seat; their file is written before the next record. Not fsynced: they do not
        survive a crash of the machine either."""
        seat = processes.target.seat
        self.parked[seat] = processes
        text = processes.model_dump_json()
        self._parked_changes.append(lambda: files.replace(self._parked_file(seat), text, durable=False, mode=0o600))

    def forget(self, seat: str) -> None:
        """Drop the processes of a seat that is no longer parked; their file is removed before the next record."""
        if self.parked.pop(seat, None) is not None:
            self._parked_changes.append(lambda: self._parked_file(seat).unlink(missing_ok=True))

    async def write_parked(self) -> None:
        """Have the files written and removed now, without a record."""
        await self._do(self._writer, self._change_parked)

    def _do(self, thread: ThreadPoolExecutor, work: Callable[[], R]) -> "asyncio.Future[R]":
        """Have it done, in order, also if the caller is cancelled meanwhile: what was recorded must be on disk."""
        done = thread.submit(work)
        with contextlib.suppress(TimeoutError):
            brief = asyncio.get_running_loop().create_future()
            if (error := done.exception(BRIEF_SECONDS)) is None:
                brief.set_result(done.result())
            else:
                brief.set_exception(error)
            return brief
        awaited = asyncio.wrap_future(done)
        self._under_way[awaited] = time.monotonic()
        awaited.add_done_callback(self._under_way.pop)
        return asyncio.shield(awaited)

    def _change_parked(self) -> None:
        while self._parked_changes:
            self._parked_changes[0]()  # one that fails stays first: no later record may be written without it
            self._parked_changes.popleft()

    def close(self) -> None:
        """Wait for pending writes and close the files."""
        self._writer.shutdown()
        self._syncer.shutdown()
        for handle in (*(file.handle for file in self._open.values()), *([] if self._next is None else [self._next])):
            os.close(handle)
        self._open.clear()

    def _sync(self, file: _OpenFile) -> None:
        began = time.perf_counter()
        with files.named(file.path):
            os.fdatasync(file.handle)
        self.observe_fsync(time.perf_counter() - began)

    def _parked_file(self, seat: str) -> Path:
        return self._parked / f"{slug(seat)}.json"


def _raise(epochs: dict[str, int], gpus: Collection[str], epoch: int) -> None:
    for gpu in gpus:
        epochs[gpu] = max(epoch, epochs.get(gpu, 0))


def _parse(path: Path, read: Callable[[str], R]) -> R | None:
    try:
        return read(path.read_text())
    except (ValueError, ValidationError, KeyError, AttributeError) as error:
        aside = path.with_name(f"{path.name}.unreadable-{time.time_ns()}")
        path.rename(aside)
        get_logger().error("journal.unreadable", file=str(path), kept_as=str(aside), error=str(error))
        return None


def _create(path: Path, line: bytes) -> int:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    with files.named(path):
        files.append(handle, line)
        os.fsync(handle)
        files.sync_folder(path.parent)
    return handle


def _reopen(path: Path) -> int:
    """Open for appending and cut off a torn last line."""
    data = path.read_bytes()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.ftruncate(handle, data.rfind(b"\n") + 1)
    return handle
