"""Which GPUs count as faulty, and why: XID events make them so, looking at them makes them sound again. Pure.

Unhealthy is for real faults only. It takes a seat out of what the scheduler may give; it never ends a running pod.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kybernate.config.model import IGNORED_XIDS, HealthConfig
from kybernate.machine import GpuEvent

RECOVERY_READS = HealthConfig().recovery_reads
"""Probation: a faulty GPU must be seen this often in a row before its seats are offered again."""
GONE = "it is not there: the driver does not list it; look for XID events in the kernel log, reset or replace it"
NEW = "it came just now: on probation"


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A GPU became faulty, or sound again."""

    gpu: str
    """UUID."""
    reason: str
    """Why it is faulty; empty: it is sound."""
    xid: int | None = None


@dataclass
class Probation:
    """Which of the node's GPUs (UUIDs) count as faulty, from events and one reading of the machine after another."""

    expected: frozenset[str]
    ignored_xids: Collection[int] = IGNORED_XIDS
    recovery_reads: int = RECOVERY_READS
    reasons: dict[str, str] = field(default_factory=dict)
    """By UUID of each faulty GPU: why."""
    changes: list[HealthChange] = field(default_factory=list)
    """What changed since ``take`` was last called, in order."""
    heard: int = 0
    """How many events were heard that are not ignored."""
    _seen: dict[str, int] = field(default_factory=dict)
    _heard: dict[str, int] = field(default_factory=dict)
    """By UUID: the number of its last event."""

    def expect(self, gpus: frozenset[str], there: Collection[str], sound: Collection[str]) -> bool:
        """Other GPUs count from now on; returns whether the faulty ones changed.

        ``there``: those that the driver lists. ``sound``: those that need no probation.
        """
        before = self.faulty
        for uuid in sorted(gpus - self.expected):
            if uuid not in there:
                self._fault(uuid, GONE, None)
            elif uuid not in sound:
                self._fault(uuid, NEW, None)
        for uuid in self.expected - gpus:
            self.reasons.pop(uuid, None)
            self._seen.pop(uuid, None)
        self.expected = gpus
        return self.faulty != before

    @property
    def faulty(self) -> frozenset[str]:
        """UUIDs of the GPUs that count as faulty."""
        return frozenset(self.reasons)

    def read(self, uuids: Iterable[str], heard: int | None = None) -> bool:
        """Take a reading of the GPUs that are there; returns whether the faulty ones changed.

        ``heard``: as it was when the reading began. What was read before an event says nothing about its GPU.
        """
        heard = self.heard if heard is None else heard
        there = set(uuids)
        before = self.faulty
        for uuid in sorted(self.expected):
            if uuid not in there:
                self._seen[uuid] = 0
                if uuid not in self.reasons:
                    self._fault(uuid, GONE, None)
            elif uuid in self.reasons and self._heard.get(uuid, 0) <= heard:
                self._seen[uuid] = self._seen.get(uuid, 0) + 1
                if self._seen[uuid] >= self.recovery_reads:
                    del self.reasons[uuid]
                    self.changes.append(HealthChange(uuid, ""))
        return self.faulty != before

    def event(self, event: GpuEvent, parents: Mapping[str, str] | None = None) -> bool:
        """Take an XID event; returns whether the faulty ones changed. ``parents``: GPU of each MIG instance.

        One that names no GPU is taken for all of them; a further one of a GPU on probation begins its probation anew.
        """
        if event.xid in self.ignored_xids:
            return False
        gpu = (parents or {}).get(event.gpu or "", event.gpu)
        hit = sorted(self.expected if gpu is None else self.expected & {gpu})
        before = self.faulty
        self.heard += 1
        for uuid in hit:
            self._seen[uuid] = 0
            self._heard[uuid] = self.heard
            which = "" if gpu is not None else " of an unnamed GPU"
            text = f"XID {event.xid}{which}"
            if uuid not in self.reasons:
                self._fault(uuid, text, event.xid)
            elif text not in self.reasons[uuid].split(", "):
                self.reasons[uuid] = f"{self.reasons[uuid]}, {text}"
        return self.faulty != before

    def take(self) -> list[HealthChange]:
        """What changed since the last call."""
        taken, self.changes = self.changes, []
        return taken

    def _fault(self, uuid: str, reason: str, xid: int | None) -> None:
        self.reasons[uuid] = reason
        self.changes.append(HealthChange(uuid, reason, xid))


@dataclass
class Arrivals:
    """GPUs that nobody knew, until they were seen often enough in a row to be offered."""

    _seen: dict[str, int] = field(default_factory=dict)

    def read(self, uuids: Iterable[str], needed: int) -> bool:
        """Take a reading of those that are there and unknown; returns whether one has been seen ``needed`` times."""
        self._seen = {uuid: self._seen.get(uuid, 0) + 1 for uuid in uuids}
        return any(seen >= needed for seen in self._seen.values())

    def sound(self, needed: int) -> frozenset[str]:
        """Those that have been seen so often."""
        return frozenset(uuid for uuid, seen in self._seen.items() if seen >= needed)

    def event(self, gpu: str | None) -> None:
        """An XID event that is not ignored: the probation begins anew. None: of all."""
        for uuid in self._seen if gpu is None else self._seen.keys() & {gpu}:
            self._seen[uuid] = 0
