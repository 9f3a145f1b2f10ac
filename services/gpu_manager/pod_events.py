"""Kubernetes Events on the pods of this node's seats: ``kubectl describe pod`` shows what a seat does and waits for.

They inform people and nothing depends on them: what cannot be created is logged once and left out.
"""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn

from kybernate.kube import Kube, KubeError
from kybernate.logs import OnceLogger
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState as S

ROUTINE_SECONDS = 60.0
"""A pod gets at most one Event of the routine in this time: busy seats take turns every few seconds."""
BACKLOG = 256
_ROUTINE = {
    S.WAITING: ("SeatWaiting", "waits at the start gate of group {group}"),
    S.STARTING: ("SeatStarting", "its engine starts on group {group}"),
    S.ACTIVE: ("SeatActive", "is active on group {group}"),
    S.PARKED: ("SeatParked", "is parked on group {group}"),
}
_WARNINGS = {
    S.BACKOFF: ("EngineExited", "its engine has ended and is started again"),
    S.LOST: ("SeatLost", "its processes cannot be used again; it starts cold"),
    S.QUARANTINED: ("SeatQuarantined", "its seat is left alone until an operator resolves the reason"),
}


def describe(row: SeatRecord) -> tuple[str, str] | None:
    """Reason and message of what a seat does or waits for; None for states that last only for a moment. Pure."""
    if row.failed and row.state is not S.ACTIVE:
        reason, text, why = "EngineFailed", row.failed, ""
    elif found := _WARNINGS.get(row.state):
        (reason, text), why = found, row.reason
    elif row.blocked:
        reason, text, why = "SeatBlocked", "its seat cannot be started or activated", row.blocked
    elif found := _ROUTINE.get(row.state):
        (reason, text), why = found, row.reason
    else:
        return None
    return reason, text.format(group=row.group) + (f": {why}" if why else "")


def iso_time(unix_seconds: float) -> str:
    """As Kubernetes writes a time."""
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass
class PodEventFilter:
    """Which Events the rows of the roster come to. Pure; ``now`` is unix seconds."""

    _last: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By pod UID: reason and message of its last Event."""
    _routine: dict[str, float] = field(default_factory=dict)
    """By pod UID: when it got its last Event of the routine."""

    def take(self, row: SeatRecord, now: float) -> dict[str, Any] | None:
        """Return the Event that a row of the roster comes to; None: none, or none again."""
        if row.state is S.RELEASING:
            self._last.pop(row.pod_uid, None)
            self._routine.pop(row.pod_uid, None)
            return None
        if not row.pod_uid:
            return None
        described = describe(row)
        if described is None or self._last.get(row.pod_uid) == described:
            return None
        reason, message = described
        kind = "Normal" if row.state in _ROUTINE and not (row.blocked or row.failed) else "Warning"
        if kind == "Normal" and now - self._routine.get(row.pod_uid, -ROUTINE_SECONDS) < ROUTINE_SECONDS:
            return None
        self._last[row.pod_uid] = reason, message
        if kind == "Normal":
            self._routine[row.pod_uid] = now
        return _event(row, kind, reason, message, now)


def _event(row: SeatRecord, kind: str, reason: str, message: str, now: float) -> dict[str, Any]:
    namespace, _, name = row.pod.partition("/")
    at = iso_time(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": row.pod_uid},
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": "kybernate", "host": row.node},
    }


class PodEvents:
    """Creates them; ``run`` is a job."""

    def __init__(self, kube: Kube) -> None:
        self._kube, self._filter = kube, PodEventFilter()
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(BACKLOG)
        self._failed = OnceLogger("pod_event.failed", level="warning")

    def take(self, row: SeatRecord) -> None:
        """Take a row of the roster that was written; when too many Events wait, its own is left out."""
        event = self._filter.take(row, row.reported_at)
        if event is not None and not self._queue.full():
            self._queue.put_nowait(event)

    async def run(self) -> NoReturn:
        """Create Events until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._kube.create(f"/api/v1/namespaces/{event['metadata']['namespace']}/events", event)
                self._failed.clear()
            except KubeError as error:
                self._failed.log(error=str(error).partition(" (")[0])
