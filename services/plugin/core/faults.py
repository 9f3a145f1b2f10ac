"""Faulty GPUs: XID events and missing GPUs make a GPU faulty, repeated good readings make it healthy again. Pure.

Unhealthy is for hardware faults only. It removes a seat from what the scheduler may allocate; it never ends a pod.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kybernate.config.model import HealthConfig
from kybernate.machine import GpuEvent

GONE = "it is not there: the driver does not list it; look for XID events in the kernel log, reset or replace it"
NEW = "it was just added: on probation"


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A GPU became faulty, or healthy again."""

    gpu: str
    """UUID."""
    reason: str
    """Why it is faulty; empty: it is healthy."""
    xid: int | None = None


@dataclass
class Probation:
    """The faulty ones among the node's GPUs (UUIDs), from events and successive readings of the machine."""

    expected: frozenset[str]
    config: HealthConfig = field(default_factory=HealthConfig)
    reasons: dict[str, str] = field(default_factory=dict)
    """By UUID of each faulty GPU: why."""
    events: int = 0
    """Number of events so far that are not ignored."""
    _good_reads: dict[str, int] = field(default_factory=dict)
    _last_event: dict[str, int] = field(default_factory=dict)
    """By UUID: the number of its last event."""

    def expect(self, gpus: frozenset[str], present: Collection[str], healthy: Collection[str]) -> list[HealthChange]:
        """Replace the GPUs that must be present; return what has changed.

        ``present``: GPUs that the driver lists. ``healthy``: added GPUs that need no probation.
        """
        changes = list[HealthChange]()
        for uuid in sorted(gpus - self.expected):
            if uuid not in present:
                changes.append(self._fault(uuid, GONE))
            elif uuid not in healthy:
                changes.append(self._fault(uuid, NEW))
        for uuid in self.expected - gpus:
            self.reasons.pop(uuid, None)
            self._good_reads.pop(uuid, None)
        self.expected = gpus
        return changes

    @property
    def faulty(self) -> frozenset[str]:
        """UUIDs of the faulty GPUs."""
        return frozenset(self.reasons)

    def read(self, uuids: Iterable[str], events: int | None = None) -> list[HealthChange]:
        """Apply a reading of the GPUs that are present; return what has changed.

        ``events``: the value of ``self.events`` when the reading began. A reading that began before a GPU's last event
        does not count as good for it.
        """
        events = self.events if events is None else events
        present, changes = set(uuids), list[HealthChange]()
        for uuid in sorted(self.expected):
            if uuid not in present:
                self._good_reads[uuid] = 0
                if uuid not in self.reasons:
                    changes.append(self._fault(uuid, GONE))
            elif uuid in self.reasons and self._last_event.get(uuid, 0) <= events:
                self._good_reads[uuid] = self._good_reads.get(uuid, 0) + 1
                if self._good_reads[uuid] >= self.config.recovery_reads:
                    del self.reasons[uuid]
                    changes.append(HealthChange(uuid, ""))
        return changes

    def event(self, event: GpuEvent, parents: Mapping[str, str] | None = None) -> list[HealthChange]:
        """Apply an XID event; return what has changed. ``parents``: GPU of each MIG instance.

        An event without a GPU counts for all GPUs; a further event of a faulty GPU restarts its probation.
        """
        changes = list[HealthChange]()
        if event.xid in self.config.ignored_xids:
            return changes
        gpu = (parents or {}).get(event.gpu or "", event.gpu)
        hit = sorted(self.expected if gpu is None else self.expected & {gpu})
        self.events += 1
        for uuid in hit:
            self._good_reads[uuid] = 0
            self._last_event[uuid] = self.events
            which = "" if gpu is not None else " of an unnamed GPU"
            text = f"XID {event.xid}{which}"
            if uuid not in self.reasons:
                changes.append(self._fault(uuid, text, event.xid))
            elif text not in self.reasons[uuid].split(", "):
                self.reasons[uuid] = f"{self.reasons[uuid]}, {text}"
        return changes

    def _fault(self, uuid: str, reason: str, xid: int | None = None) -> HealthChange:
        self.reasons[uuid] = reason
        return HealthChange(uuid, reason, xid)


@dataclass
class NewGpus:
    """Present GPUs that are not known yet: counted until they have been read often enough to be offered."""

    _reads: dict[str, int] = field(default_factory=dict)

    def read(self, uuids: Iterable[str], needed: int) -> bool:
        """Apply a reading of the unknown GPUs; return whether one has been read ``needed`` times in a row."""
        self._reads = {uuid: self._reads.get(uuid, 0) + 1 for uuid in uuids}
        return any(reads >= needed for reads in self._reads.values())

    def healthy(self, needed: int) -> frozenset[str]:
        """Return the GPUs that have been read ``needed`` times."""
        return frozenset(uuid for uuid, reads in self._reads.items() if reads >= needed)

    def event(self, gpu: str | None) -> None:
        """Restart the count after an XID event that is not ignored. None: for all GPUs."""
        for uuid in self._reads if gpu is None else self._reads.keys() & {gpu}:
            self._reads[uuid] = 0
