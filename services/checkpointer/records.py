"""What is written about one job, and what can be read from it. Pure."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kybernate.messages import JobStatus, KillJob, SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends.port import Unit

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
    unit: Unit | None = None
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

    def begun(self, half: HalfName, seat: str) -> Unit | None:
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
