"""The records of the journal: those of one job, and the past of a seat's container derived from all."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kybernate.messages import JobStatus, KillJob, SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.core.failures import MAX_HANGS, StepTrouble

HalfName = Literal["park", "activate", "kill"]


class Record(BaseModel):
    """One line of a job's file; ``kind`` determines which fields are set."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["switch", "kill", "retarget", "half", "step", "end", "done"]
    at: float = Field(default_factory=time.time)
    """Unix seconds."""
    switch: SwitchJob | None = None
    kill: KillJob | None = None
    epoch: int | None = None
    """retarget, which the release before wrote: the new epoch of the second half."""
    activate: SeatTarget | None = None
    """retarget: the new second half; None drops it."""
    half: HalfName | None = None
    seat: str | None = None
    unit: SeatProcesses | None = None
    """half: the processes that it is about to touch."""
    step: str | None = None
    pid: int | None = None
    detail: str | None = None
    """step: the means, for steps that have several; of ``hung`` and ``refused``: the verb of the call; ``attached``:
    the step is about all members without VRAM."""
    progress: SeatProgress | None = None
    """end: how the half ended for this seat."""
    status: JobStatus | None = None
    """done: how the job ended."""

    def line(self) -> bytes:
        """The line in the file."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


@dataclass
class JobFile:
    """One job, derived from its records."""

    records: list[Record]
    path: Path = field(default_factory=Path)
    written_at: float | None = None
    """Unix seconds at which the first record was written; None when an earlier checkpointer wrote it."""

    @property
    def command(self) -> SwitchJob | KillJob:
        """The message that began the job."""
        command = self.records[0].switch or self.records[0].kill
        assert command is not None
        return command

    @property
    def switch(self) -> SwitchJob | None:
        """The switch; None if this is a kill."""
        return self.records[0].switch

    @property
    def op(self) -> str:
        """Name of the job; a kill is named after its seat and epoch."""
        return self.command.op if isinstance(self.command, SwitchJob) else kill_op(self.command)

    @property
    def group(self) -> str:
        """Key of the helper that makes its driver calls."""
        return self.switch.group if self.switch is not None else self.op

    @property
    def epoch(self) -> int:
        """The highest epoch of its records."""
        return max([self.command.epoch, *(record.epoch for record in self.records if record.epoch is not None)])

    @property
    def activate(self) -> SeatTarget | None:
        """The target of the second half, after all retargets of the release before."""
        for record in reversed(self.records):
            if record.kind == "retarget":
                return record.activate
        return self.switch.activate if self.switch is not None else None

    @property
    def targets(self) -> tuple[SeatTarget, ...]:
        """Both halves' targets."""
        return self.first_targets + ((self.activate,) if self.activate is not None else ())

    @property
    def first_targets(self) -> tuple[SeatTarget, ...]:
        """The seats of its first half: those to be parked, or the one to be killed."""
        return self.command.park if isinstance(self.command, SwitchJob) else (self.command.target,)

    @property
    def gpus(self) -> frozenset[str]:
        """GPUs that no other job may touch meanwhile."""
        return frozenset(gpu for target in self.targets for gpu in target.gpus)

    @property
    def seats(self) -> frozenset[str]:
        """All seats that it names."""
        return frozenset(target.seat for target in self.targets)

    @property
    def status(self) -> JobStatus | None:
        """The final status; None before the end."""
        return self.records[-1].status

    @property
    def done(self) -> bool:
        """True if it ended."""
        return self.status is not None

    def begun(self, half: HalfName, seat: str) -> SeatProcesses | None:
        """The processes that a half was journaled with; None if it was not begun."""
        found = (r.unit for r in reversed(self.records) if (r.kind, r.half, r.seat) == ("half", half, seat))
        return next(found, None)

    def stepped(self, half: HalfName, seat: str, step: str | None = None) -> bool:
        """True if a step was journaled in this half. ``step``: which one; None: any."""
        steps = (r.step for r in self.records if (r.kind, r.half, r.seat) == ("step", half, seat))
        return any(step in (None, one) for one in steps)

    def ended(self, half: HalfName, seat: str) -> SeatProgress | None:
        """How a half ended for a seat; None before the end."""
        found = (r.progress for r in reversed(self.records) if (r.kind, r.half, r.seat) == ("end", half, seat))
        return next(found, None)


def kill_op(job: KillJob) -> str:
    """Name of a kill in reports."""
    return f"kill-{job.target.seat}-{job.epoch}"


def read_records(text: str) -> JobFile:
    """Parse a job's file; a torn last line is ignored. Raises ValueError if the first line is no job."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    job = JobFile([Record.model_validate_json(line) for line in lines])
    if not job.records or not (job.records[0].switch or job.records[0].kill):
        raise ValueError("the first line is neither a switch nor a kill")
    return job


REMEMBERED_SECONDS = 24 * 3600.0
"""Hangs older than this are ignored."""
QUARANTINE_SECONDS = 600.0
"""Time for which no driver call is made about a seat that hung too often."""


def hung_recently(job: JobFile, now: float) -> bool:
    """True if a call of this job hung within REMEMBERED_SECONDS. ``now``: Unix seconds."""
    return any(r.kind == "step" and r.step == StepTrouble.HUNG and now - r.at < REMEMBERED_SECONDS for r in job.records)


@dataclass
class _ContainerPast:
    """Hangs and refused restores of one container."""

    container_id: str
    hung_at: list[float] = field(default_factory=list)
    refusals: int = 0


class History:
    """Hangs and refused restores by seat; they survive a restart with the journal. A new container resets them."""

    def __init__(self) -> None:
        self._pasts: dict[str, _ContainerPast] = {}

    def add(self, job: JobFile, record: Record) -> None:
        """Count a record; called for each one, in the order of the journal."""
        target = next((t for t in job.targets if t.seat == record.seat), None)
        if record.seat is None or target is None:
            return
        past = self._pasts.get(record.seat)
        if past is None or past.container_id != target.container_id:
            past = self._pasts[record.seat] = _ContainerPast(target.container_id)
        if record.kind == "step" and record.step == StepTrouble.HUNG:
            past.hung_at.append(record.at)
        elif record.kind == "step" and record.step == StepTrouble.REFUSED:
            past.refusals += 1
        elif record.kind == "end" and record.half == "activate" and record.progress is not None:
            past.refusals = 0 if record.progress.outcome == "active" else past.refusals

    def hangs(self, seat: str, container_id: str, now: float) -> int:
        """Driver calls about this container that hung within REMEMBERED_SECONDS. ``now``: Unix seconds."""
        past = self._past(seat, container_id)
        return sum(now - at < REMEMBERED_SECONDS for at in past.hung_at)

    def refusals(self, seat: str, container_id: str) -> int:
        """Restores of this container that the driver refused, without a success since."""
        return self._past(seat, container_id).refusals

    def left_alone(self, seat: str, container_id: str, now: float) -> str | None:
        """The reason to make no driver call about this container now; None if calls are allowed."""
        past = self._past(seat, container_id)
        count = self.hangs(seat, container_id, now)
        if count <= MAX_HANGS or now - past.hung_at[-1] > QUARANTINE_SECONDS:
            return None
        minutes = QUARANTINE_SECONDS / 60
        return (
            f"driver calls about it hung {count} times, so it is left alone for {minutes:.0f} minutes; "
            "see the kernel log, or delete its pod"
        )

    def _past(self, seat: str, container_id: str) -> _ContainerPast:
        past = self._pasts.get(seat)
        return past if past is not None and past.container_id == container_id else _ContainerPast(container_id)
