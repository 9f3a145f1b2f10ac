"""The journal's records: those of one job, and what all of them say about a seat's container. Pure."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kybernate.messages import JobStatus, KillJob, SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.failures import MAX_HANGS

HalfName = Literal["park", "activate", "kill"]


class Record(BaseModel):
    """One line of a job's file. Which fields are set depends on ``kind``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["switch", "kill", "retarget", "half", "step", "end", "done"]
    at: float = Field(default_factory=time.time)
    """Unix seconds."""
    switch: SwitchJob | None = None
    kill: KillJob | None = None
    epoch: int | None = None
    """retarget: the epoch of the second half from now on."""
    activate: SeatTarget | None = None
    """retarget: the new second half; none drops it."""
    half: HalfName | None = None
    seat: str | None = None
    unit: SeatProcesses | None = None
    """half: what is about to be touched."""
    step: str | None = None
    pid: int | None = None
    detail: str | None = None
    """step: how it is done, where that is not obvious; of ``hung``: which call."""
    progress: SeatProgress | None = None
    """end: how the half ended for this seat."""
    failed: bool | None = None
    """end: the backend failed, which a refusal beforehand is not; None where nothing was begun."""
    status: JobStatus | None = None
    """done: how the job ended."""

    def line(self) -> bytes:
        """As it stands in the file."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


@dataclass
class JobFile:
    """One job as its records tell it."""

    records: list[Record]
    path: Path = field(default_factory=Path)
    on_disk_at: float | None = None
    """Unix seconds at which the first record was on disk; None when an earlier checkpointer wrote it."""

    @property
    def switch(self) -> SwitchJob | None:
        """The switch, unless this is a kill."""
        return self.records[0].switch

    @property
    def kill(self) -> KillJob | None:
        """The kill, unless this is a switch."""
        return self.records[0].kill

    @property
    def op(self) -> str:
        """Its name; a kill is named after its seat and epoch."""
        if self.switch is not None:
            return self.switch.op
        assert self.kill is not None
        return kill_op(self.kill)

    @property
    def group(self) -> str:
        """Whose helper works for it."""
        return self.switch.group if self.switch is not None else self.op

    @property
    def epoch(self) -> int:
        """The highest epoch that it carries."""
        first = self.switch or self.kill
        assert first is not None
        return max([first.epoch, *(record.epoch for record in self.records if record.epoch is not None)])

    @property
    def activate(self) -> SeatTarget | None:
        """The second half as it stands now."""
        for record in reversed(self.records):
            if record.kind == "retarget":
                return record.activate
        return self.switch.activate if self.switch is not None else None

    @property
    def targets(self) -> tuple[SeatTarget, ...]:
        """All seats that it names."""
        if self.kill is not None:
            return (self.kill.target,)
        assert self.switch is not None
        return self.switch.park + ((self.activate,) if self.activate is not None else ())

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it touches."""
        return tuple(dict.fromkeys(gpu for target in self.targets for gpu in target.gpus))

    @property
    def status(self) -> JobStatus | None:
        """How it ended; None while it has not."""
        return self.records[-1].status

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self.status is not None

    def begun(self, half: HalfName, seat: str) -> SeatProcesses | None:
        """What a half was about to touch when it was journaled; None when it was not."""
        for record in reversed(self.records):
            if record.kind == "half" and record.half == half and record.seat == seat:
                return record.unit
        return None

    def stepped(self, half: HalfName, seat: str, step: str) -> bool:
        """Whether a step was journaled in this half."""
        return any(r.kind == "step" and (r.half, r.seat, r.step) == (half, seat, step) for r in self.records)

    def ended(self, half: HalfName, seat: str) -> SeatProgress | None:
        """How a half ended for a seat, if it did."""
        for record in reversed(self.records):
            if record.kind == "end" and record.half == half and record.seat == seat:
                return record.progress
        return None


def kill_op(job: KillJob) -> str:
    """Name of a kill in reports."""
    return f"kill-{job.target.seat}-{job.epoch}"


def read_records(path: Path, text: str) -> JobFile:
    """A job from its file; a torn last line is ignored. Raises ValueError when the first line is no job."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    job = JobFile([Record.model_validate_json(line) for line in lines], path)
    if not job.records or (job.switch is None and job.kill is None):
        raise ValueError("the first line is neither a switch nor a kill")
    return job


REMEMBERED_SECONDS = 24 * 3600.0
"""Hangs older than this count no more."""
QUARANTINE_SECONDS = 600.0
"""So long at least a seat that hung too often is left alone, whatever the driver says about it."""
DEMOTE_AFTER = 2
"""Failures in a row after which a person is told to take another backend (research/checkpoint.md §7)."""
HUNG = "hung"
"""The step that stands in the journal for a call that hung."""


def hung_of_late(job: JobFile, now: float) -> bool:
    """Whether a hang stands in this job that still counts. ``now``: Unix seconds."""
    return any(r.kind == "step" and r.step == HUNG and now - r.at < REMEMBERED_SECONDS for r in job.records)


@dataclass
class _Past:
    """One container's."""

    container_id: str
    hung_at: list[float] = field(default_factory=list)
    failures: int = 0


class History:
    """All seats' pasts."""

    def __init__(self) -> None:
        self._pasts: dict[str, _Past] = {}

    def hear(self, job: JobFile, record: Record) -> None:
        """A record was written or read; in the order of the journal."""
        container_id = next((t.container_id for t in job.targets if t.seat == record.seat), None)
        if record.seat is None or container_id is None:
            return
        past = self._pasts.get(record.seat)
        if past is None or past.container_id != container_id:
            past = self._pasts[record.seat] = _Past(container_id)
        if record.kind == "step" and record.step == HUNG:
            past.hung_at.append(record.at)
        elif record.kind == "end" and record.failed is not None:
            past.failures = past.failures + 1 if record.failed else 0

    def hangs(self, seat: str, container_id: str, now: float) -> int:
        """How often driver calls about this container hung of late. ``now``: Unix seconds."""
        past = self._past(seat, container_id)
        return sum(now - at < REMEMBERED_SECONDS for at in past.hung_at)

    def failures(self, seat: str, container_id: str) -> int:
        """How many halves of this container failed in a row."""
        return self._past(seat, container_id).failures

    def left_alone(self, seat: str, container_id: str, now: float) -> str | None:
        """Why nobody should ask the driver about this container now; None when it may be asked."""
        past = self._past(seat, container_id)
        count = self.hangs(seat, container_id, now)
        if count <= MAX_HANGS or now - past.hung_at[-1] > QUARANTINE_SECONDS:
            return None
        minutes = QUARANTINE_SECONDS / 60
        return (
            f"driver calls about it hung {count} times, so it is left alone for {minutes:.0f} minutes; "
            "see the kernel log, or delete its pod"
        )

    def _past(self, seat: str, container_id: str) -> _Past:
        past = self._pasts.get(seat)
        return past if past is not None and past.container_id == container_id else _Past(container_id)
