"""What happened to each seat's container before: hangs of driver calls, and failures in a row. Pure.

Read from the journal's records, so that a restart forgets nothing; a new container begins anew.
"""

from dataclasses import dataclass, field

from services.checkpointer.failures import MAX_HANGS
from services.checkpointer.records import JobFile, Record

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
