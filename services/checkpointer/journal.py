"""What this checkpointer must not forget: jobs and their steps, parked processes, the highest epochs.

Whatever must be on disk before something is done is fsynced first. A killed checkpointer loses nothing that it wrote;
fsync is for the machine's end, and that ends the processes too.

Under ``<state_dir>``: ``journal/<epoch>-<op>.jsonl``, one file per job, one line per record, a torn last line ignored;
``parked/<seat>.json``, the processes of a parked seat, which the driver's lists no longer show; ``epochs.json``, the
highest epoch by GPU of jobs whose file is gone. Writing runs in one thread so that a slow disk stops nobody.
"""

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kybernate import files
from kybernate.logs import get_logger
from kybernate.slugs import slug
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.records import History, JobFile, Record, hung_of_late, read_records

R = TypeVar("R")

KEPT_JOBS = 200
"""Finished jobs that stay on disk so that their outcome can be asked for; those in which a call hung stay for a day."""


class Journal:
    """The files under one state folder. One writer: this checkpointer."""

    def __init__(self, folder: Path) -> None:
        self._jobs = folder / "journal"
        self._parked = folder / "parked"
        self._epochs_file = folder / "epochs.json"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._open: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        """Highest epoch by GPU."""
        self.parked: dict[str, SeatProcesses] = {}
        """Remembered processes by seat."""
        self.jobs: dict[str, JobFile] = {}
        """Jobs on disk by op, oldest first."""
        self.history = History()
        """What the records say about each seat's past."""

    def load(self) -> None:
        """Read everything. An unreadable file is set aside and said, never fatal."""
        for folder in (self._jobs, self._parked):
            folder.mkdir(parents=True, exist_ok=True)
        if self._epochs_file.exists():
            known = _parse(self._epochs_file, lambda text: {str(k): int(v) for k, v in json.loads(text).items()})
            self.epochs = known or {}
        for path in sorted(self._parked.glob("*.json")):
            processes = _parse(path, SeatProcesses.model_validate_json)
            if processes is not None:
                self.parked[processes.target.seat] = processes
        for path in sorted(self._jobs.glob("*.jsonl")):
            job = _parse(path, lambda text, path=path: read_records(path, text))  # type: ignore[misc]
            if job is not None:
                self.jobs[job.op] = job
                self._raise_epochs(job.gpus, job.epoch)
                for record in job.records:
                    self.history.hear(job, record)

    @property
    def highest_epoch(self) -> int:
        """Over all GPUs."""
        return max(self.epochs.values(), default=0)

    def seen_epoch(self, gpus: tuple[str, ...]) -> int:
        """The highest epoch that any of these GPUs has seen."""
        return max((self.epochs.get(gpu, 0) for gpu in gpus), default=0)

    async def begin(self, job: JobFile) -> None:
        """Create a job's file; when this returns, job and epoch are on disk."""
        job.path = self._jobs / f"{job.epoch:020d}-{slug(job.op)}.jsonl"
        self._raise_epochs(job.gpus, job.epoch)
        self.jobs[job.op] = job
        line = job.records[0].line()
        self._open[job.op] = await self._in_thread(lambda: _create(job.path, line))
        job.on_disk_at = time.time()

    async def add(self, job: JobFile, record: Record, *, put_off: bool = False) -> None:
        """Append a record; it is on disk when this returns.

        ``put_off``: it is in the file then, which a killed checkpointer leaves as it is, and on disk together with the
        next one. For records before which and after which nothing is touched.
        """
        job.records.append(record)
        self.history.hear(job, record)
        self._raise_epochs(job.gpus, job.epoch)

        def write() -> None:
            if job.op not in self._open:
                self._open[job.op] = _reopen(job.path)
            handle = self._open[job.op]
            _append(handle, record.line())
            if not put_off:
                os.fdatasync(handle)

        await self._in_thread(write)

    async def finish(self, job: JobFile, record: Record) -> None:
        """Append the last record, and remove the oldest finished jobs beyond those that are kept."""
        await self.add(job, record)
        now = time.time()
        finished = [old for old in self.jobs.values() if old.done and not hung_of_late(old, now)]
        old = finished[: max(0, len(finished) - KEPT_JOBS)]
        for one in old:
            del self.jobs[one.op]
        epochs = json.dumps(self.epochs)

        def close() -> None:
            os.close(self._open.pop(job.op))
            if old:
                files.replace(
                    self._epochs_file, epochs, durable=True
                )  # first: a removed job's epoch must not be forgotten
            for one in old:
                one.path.unlink(missing_ok=True)

        await self._in_thread(close)

    async def fence(self, gpus: tuple[str, ...], epoch: int) -> None:
        """Refuse anything below this epoch on these GPUs from now on, also after a restart."""
        self._raise_epochs(gpus, epoch)
        epochs = json.dumps(self.epochs)
        await self._in_thread(lambda: files.replace(self._epochs_file, epochs, durable=True))

    async def remember(self, processes: SeatProcesses) -> None:
        """Keep the processes of a parked seat. Not fsynced: they do not outlive the machine either."""
        seat = processes.target.seat
        self.parked[seat] = processes
        text = processes.model_dump_json()
        await self._in_thread(lambda: files.replace(self._parked_file(seat), text, durable=False))

    async def forget(self, seat: str) -> None:
        """The seat is not parked any more."""
        if self.parked.pop(seat, None) is not None:
            await self._in_thread(lambda: self._parked_file(seat).unlink(missing_ok=True))

    def close(self) -> None:
        """Wait for what is being written and close the files."""
        self._writer.shutdown(wait=True)
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def _parked_file(self, seat: str) -> Path:
        return self._parked / f"{slug(seat)}.json"

    def _raise_epochs(self, gpus: tuple[str, ...], epoch: int) -> None:
        for gpu in gpus:
            self.epochs[gpu] = max(epoch, self.epochs.get(gpu, 0))

    async def _in_thread(self, write: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._writer, write)


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
    _append(handle, line)
    os.fsync(handle)
    files.sync_folder(path.parent)
    return handle


def _append(handle: int, line: bytes) -> None:
    """All of it or nothing: a full disk takes a part and says so, and the next line would be glued to that."""
    before = os.fstat(handle).st_size
    if os.write(handle, line) != len(line):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "journal")


def _reopen(path: Path) -> int:
    """Open for appending, after a torn last line was cut off."""
    data = path.read_bytes()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.ftruncate(handle, data.rfind(b"\n") + 1)
    return handle
