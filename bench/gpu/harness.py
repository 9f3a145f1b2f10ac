"""Parking as the checkpointer parks: its helpers, backend, procedure and fsynced journal; only the bus is left out."""

import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kybernate.dev.fakes.gpu.node import FakeHostMemory
from kybernate.messages import KillJob, SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends.driver import Backend, DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import open_host
from services.checkpointer.backends.reservations import Headroom
from services.checkpointer.core.refusals import Allowance
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.job_run import JobRun
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record

NODE = "bench"
GROUP = "g"
ALLOWED = frozenset({Allowance.SEVERAL_PROCESSES})
"""The bench parks trees of processes, which share no GPU memory."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HalfTimes:
    """Result and times of one half of a job."""

    outcome: str
    reason: str
    wall: float
    """Seconds from the job's arrival to its last journal record."""
    cpu: float
    """CPU seconds of this process and the helpers meanwhile."""
    seconds: dict[str, float]
    """By step."""
    vram_bytes: int
    records: int
    """Lines that were journaled."""
    fsyncs: int = 0
    """Number of waits for fsync."""
    journal: float = 0.0
    """Wall seconds spent in fsync."""

    @property
    def driver(self) -> float:
        """Wall seconds inside lock, checkpoint, restore and unlock, with the helper's round trip."""
        return sum(self.seconds.get(verb, 0.0) for verb in ("lock", "checkpoint", "restore", "unlock"))

    @property
    def beyond(self) -> float:
        """Wall seconds that are not the driver's."""
        return self.wall - self.driver


class TimedJournal(Journal):
    """The journal, with a clock around everything that waits for the disk."""

    spent = 0.0
    """Wall seconds so far."""
    fsyncs = 0
    """So far that were waited for: two of a new file."""

    async def begin(self, job: JobFile) -> None:
        """See Journal."""
        self.fsyncs += 2
        with self._timed():
            await super().begin(job)

    async def add(self, job: JobFile, record: Record) -> None:
        """See Journal."""
        with self._timed():
            await super().add(job, record)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began


@dataclass
class Checkpointer:
    """The checkpointer without its bus."""

    journal: TimedJournal
    pool: HelperPool
    backend: Backend
    folder: Path
    _epoch: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def park(self, target: SeatTarget) -> HalfTimes:
        """Take a seat out of VRAM."""
        epoch = next(self._epoch)
        job = SwitchJob(cause="bench", node=NODE, epoch=epoch, op=f"park-{epoch}", group=GROUP, park=(target,))
        return await self._run(Record(kind="switch", switch=job))

    async def activate(self, target: SeatTarget) -> HalfTimes:
        """Bring it back."""
        epoch = next(self._epoch)
        job = SwitchJob(cause="bench", node=NODE, epoch=epoch, op=f"activate-{epoch}", group=GROUP, activate=target)
        return await self._run(Record(kind="switch", switch=job))

    async def kill(self, target: SeatTarget) -> HalfTimes:
        """End its processes and prove that their memory is free."""
        return await self._run(
            Record(kind="kill", kill=KillJob(cause="b", node=NODE, epoch=next(self._epoch), target=target))
        )

    async def _run(self, record: Record) -> HalfTimes:
        file = JobFile([record])
        cpu, journal, fsyncs, began = self.cpu(), self.journal.spent, self.journal.fsyncs, time.perf_counter()
        await self.journal.begin(file)
        status = await JobRun(file, self.journal, {"cuda": self.backend, "fake": self.backend}, lambda _: None).run()
        wall = time.perf_counter() - began
        progress: SeatProgress = status.park[0] if status.park else status.activate or _none()
        return HalfTimes(
            outcome=progress.outcome,
            reason=progress.reason,
            wall=wall,
            cpu=self.cpu() - cpu,
            seconds=dict(progress.seconds),
            vram_bytes=progress.vram_bytes,
            records=len(file.records),
            fsyncs=self.journal.fsyncs - fsyncs,
            journal=self.journal.spent - journal,
        )

    def cpu(self) -> float:
        """CPU seconds of this process, to the microsecond, and of its helpers, to the clock tick."""
        ticks = 0
        for note in (self.folder / "helpers").iterdir():
            try:
                fields = Path(f"/proc/{note.name.partition('-')[0]}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / _TICKS


@asynccontextmanager
async def checkpointer(
    folder: Path, command: Sequence[str], *, lock_seconds: float = 60.0, speed: float = 1.0
) -> AsyncIterator[Checkpointer]:
    """One with its state under ``folder``. ``lock_seconds``: how long work may take. Raises HelperDiedError."""
    journal = TimedJournal(folder)
    journal.load()
    timeouts = Timeouts(lock_seconds=lock_seconds, speed=speed)
    try:
        async with HelperPool(command, folder / "helpers") as pool:
            await pool.warm(GROUP)  # as for every group of a checkpointer that has worked before
            fake = os.environ.get("KYB_FAKE_DRIVER")  # set around the stub: its GPUs' copies exist by name only
            host = open_host(None, timeouts.settle(), ALLOWED, fake_kubelet=True)
            if fake:  # not by open_host, which looks for an installation of the extra dev
                host = replace(host, headroom=Headroom(FakeHostMemory(Path(fake)), None), device_nodes=False)
            calls = DriverCalls(pool, timeouts)
            backend = DriverBackend(calls, host, Evidence(calls, host.freezer))
            yield Checkpointer(journal, pool, backend, folder)
    finally:
        journal.close()


def seat_of(pid: int, gpus: Sequence[str], vram_bytes: int = 0, *, name: str = "") -> SeatTarget:
    """The process (and its descendants) as a seat on these GPUs."""
    return SeatTarget(
        seat=name or f"bench.{pid}",
        pod_uid=f"uid-{pid}",
        container_id=f"process://{pid}",
        gpus=tuple(gpus),
        vram_bytes=vram_bytes,
        backend="cuda",
    )


def _none() -> SeatProgress:
    raise RuntimeError("the job named no seat")
