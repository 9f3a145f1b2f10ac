"""What a stack did that real hardware would have punished; the count must stay 0. Pure."""

from collections import Counter, deque
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of violations."""

    SLOTS = "slots"
    """More seats with memory on a GPU than it has slots."""
    REQUEST_NOT_RUNNING = "request-not-running"
    """A request was begun by a process that is locked, parked or lost."""
    REQUEST_WITHOUT_MEMORY = "request-without-memory"
    """A request was begun by a process that has no memory on any GPU, or only what sleep leaves behind."""
    CHECKPOINT_WITH_REQUEST = "checkpoint-with-request"
    """A checkpoint began while this request was being computed; one violation for each request."""
    RESTORE_WITHOUT_ROOM = "restore-without-room"
    """A restore met too little free memory; the process is lost."""
    CHECKPOINT_WITHOUT_HOST_MEMORY = "checkpoint-without-host-memory"
    """The copy did not fit into the host's memory; the kernel killed the process."""
    KILLED_AFTER_RESTORE = "killed-after-restore"
    """A process that was once restored ended with memory on a GPU, where that was declared to wedge the GPU."""
    STALE_EPOCH = "stale-epoch"
    """A verb came with an epoch below the highest that one of the process' GPUs has seen."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation."""

    kind: Kind
    text: str
    at: float
    """Seconds of CLOCK_MONOTONIC."""
    pid: int
    seat: str
    gpu: str | None = None


class Violations:
    """The count, and the last 50 with details."""

    def __init__(self) -> None:
        self.count = 0
        self.by_kind: Counter[str] = Counter()
        self.recent: deque[Violation] = deque(maxlen=50)

    def add(self, violation: Violation) -> None:
        """Count one."""
        self.count += 1
        self.by_kind[violation.kind.value] += 1
        self.recent.append(violation)

    def report(self) -> dict[str, Any]:
        """As ``stats`` tells it."""
        return {"count": self.count, "by_kind": dict(self.by_kind), "recent": [asdict(one) for one in self.recent]}
