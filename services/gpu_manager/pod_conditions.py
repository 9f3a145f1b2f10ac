"""What the pods of this node's seats show: the condition ``kyb.ai/Active`` in their status, True while the seat is
active, else False; its reason is the state, and ``SeatReleased`` once the pod has ended. And the label
``kyb.ai/state``, the seat's state. ``kubectl`` and controllers can use them; nothing of Kybernate depends on them.

One patch of ``pods/status`` writes both: the API server takes labels there too (kubernetes 1.36,
``pkg/registry/core/pod/strategy.go``). ``docs/dev/decisions/018-the-chart.md``.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NoReturn

from kybernate.clock import wait_for
from kybernate.kube import Kube, KubeError, MissingError
from kybernate.logs import OnceLogger
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.gpu_manager.pod_events import describe, iso_time

CONDITION, LABEL = "kyb.ai/Active", "kyb.ai/state"
RELEASED = "SeatReleased"
PAUSE_SECONDS = 15.0
"""Wall: between two writes to a pod, whose last state is written then. Each write goes to all watchers of the pod."""


@dataclass(frozen=True)
class PodCondition:
    """What is to stand in a pod's status. ``pod``: namespace and name; ``since``: unix seconds of this status."""

    pod: str
    uid: str
    status: str
    reason: str
    message: str
    since: float
    state: str

    def path(self) -> str:
        """Of the pod."""
        namespace, _, name = self.pod.partition("/")
        return f"/api/v1/namespaces/{namespace}/pods/{name}"

    def patch(self) -> Mapping[str, Any]:
        """The change of this pod's status and label only, not of another one with its name."""
        labels = {LABEL: self.state}
        return {"metadata": {"uid": self.uid, "labels": labels}, "status": {"conditions": [self.entry()]}}

    def entry(self) -> dict[str, str]:
        """As Kubernetes writes it."""
        return {
            "type": CONDITION,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": iso_time(self.since),
        }


@dataclass
class ConditionQueue:
    """Which pod's condition is written when. Pure; ``now`` is wall seconds."""

    _known: dict[str, PodCondition] = field(default_factory=dict)
    """By pod UID: the newest condition."""
    _open: set[str] = field(default_factory=set)
    """UIDs of pods whose newest condition is not written."""
    _free_at: dict[str, float] = field(default_factory=dict)
    """By pod UID: when it may be written again."""
    _read: set[str] = field(default_factory=set)
    """UIDs of pods of which is known what stands there."""

    def take(self, row: SeatRecord) -> None:
        """Take a row of the roster. A pod that has ended, or is being deleted, gets its last condition."""
        over = row.state is SeatState.RELEASING
        described = (RELEASED, "its pod has ended or is being deleted") if over else describe(row)
        if row.pod_uid and described is not None:
            reason, message = described
            status = str(row.state is SeatState.ACTIVE)
            before = self._known.get(row.pod_uid)
            since = before.since if before is not None and before.status == status else row.reported_at
            condition = PodCondition(row.pod, row.pod_uid, status, reason, message[:1024], since, row.state)
            if condition != before:
                self._known[row.pod_uid] = condition
                self._open.add(row.pod_uid)

    def next(self, now: float) -> PodCondition | float | None:
        """The condition to write now; else the seconds until one may be written; None: all are written."""
        if not self._open:
            return None
        uid = min(self._open, key=lambda one: self._free_at.get(one, 0.0))
        wait = self._free_at.get(uid, 0.0) - now
        if wait > 0:
            return wait
        self._open.discard(uid)
        self._free_at[uid] = now + PAUSE_SECONDS
        return self._known[uid]

    def unread(self, uid: str) -> bool:
        """True if it is not known what stands in this pod's status: a manager before may have written it."""
        return uid not in self._read

    def found(self, condition: PodCondition, pod: Mapping[str, Any]) -> PodCondition | None:
        """What is to be written of this condition to a pod as it was read; None: nothing. Its time is that of its
        status."""
        self._read.add(condition.uid)
        conditions = pod.get("status", {}).get("conditions") or ()
        there: Mapping[str, str] = next((one for one in conditions if one["type"] == CONDITION), {})
        labels = pod["metadata"].get("labels") or {}
        if there.get("status") == condition.status and (at := there.get("lastTransitionTime")):
            since = datetime.fromisoformat(at).timestamp()
            condition = replace(condition, since=since)
            known = self._known[condition.uid]
            if known.status == condition.status:
                self._known[condition.uid] = replace(known, since=since)
        stands = condition.entry().items() <= there.items() and labels.get(LABEL) == condition.state
        return None if stands else condition

    def written(self, condition: PodCondition) -> None:
        """It stands there: the last one ends what is known of its pod."""
        if condition.reason == RELEASED:
            self.forget(condition.uid)

    def failed(self, condition: PodCondition) -> None:
        """It was not written: the newest one is, after the pause, by what stands there then."""
        self._read.discard(condition.uid)
        self._open.add(condition.uid)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._open.discard(uid)
        self._known.pop(uid, None)
        self._free_at.pop(uid, None)
        self._read.discard(uid)


class PodConditions:
    """Writes them; ``run`` is a job."""

    def __init__(self, kube: Kube) -> None:
        self._kube, self._queue, self._taken = kube, ConditionQueue(), asyncio.Event()
        self._failed = OnceLogger("pod_condition.failed", level="warning")

    def take(self, row: SeatRecord) -> None:
        """Take a row of the roster that was written."""
        self._queue.take(row)
        self._taken.set()

    async def run(self) -> NoReturn:
        """Write conditions until cancelled."""
        while True:
            found = self._queue.next(time.monotonic())
            if isinstance(found, PodCondition):
                await self._write(found)
                continue
            self._taken.clear()
            await wait_for(self._taken, found)

    async def _write(self, condition: PodCondition) -> None:
        due: PodCondition | None = condition
        try:
            if self._queue.unread(condition.uid):
                pod = await self._kube.get(condition.path())
                if pod is None or pod["metadata"]["uid"] != condition.uid:
                    self._queue.forget(condition.uid)
                    return
                due = self._queue.found(condition, pod)
            if due is not None:
                await self._kube.patch(f"{due.path()}/status", due.patch())
            self._queue.written(condition)
            self._failed.clear()
        except MissingError:
            self._queue.forget(condition.uid)
        except KubeError as error:  # a conflict too: what stands there shows whose it is
            self._queue.failed(condition)
            self._failed.log(error=str(error).partition(" (")[0])
