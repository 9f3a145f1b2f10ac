"""The condition ``kyb.ai/Active`` in the status of the pods of this node's seats: True while the seat is active, else
False; its reason is the state. ``kubectl wait`` and controllers can use it; nothing of Kybernate depends on it.

``docs/decisions/056-a-condition-on-pods.md``.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kybernate.kube import ConflictError, Kube, KubeError, MissingError
from kybernate.logs import OnceLogger
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.gpu_manager.pod_events import describe, iso_time

CONDITION = "kyb.ai/Active"
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

    def path(self) -> str:
        """Of the pod's status."""
        namespace, _, name = self.pod.partition("/")
        return f"/api/v1/namespaces/{namespace}/pods/{name}/status"

    def patch(self) -> Mapping[str, Any]:
        """The change of this pod only, not of another one with its name."""
        condition = {
            "type": CONDITION,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": iso_time(self.since),
        }
        return {"metadata": {"uid": self.uid}, "status": {"conditions": [condition]}}


@dataclass
class ConditionQueue:
    """Which pod's condition is written when. Pure; ``now`` is wall seconds."""

    _known: dict[str, PodCondition] = field(default_factory=dict)
    """By pod UID: the newest condition."""
    _open: set[str] = field(default_factory=set)
    """UIDs of pods whose newest condition is not written."""
    _free_at: dict[str, float] = field(default_factory=dict)
    """By pod UID: when it may be written again."""

    def take(self, row: SeatRecord) -> None:
        """Take a row of the roster. A pod in deletion is forgotten."""
        described = describe(row)
        if row.state is SeatState.RELEASING:
            self.forget(row.pod_uid)
        elif row.pod_uid and described is not None:
            reason, message = described
            status = str(row.state is SeatState.ACTIVE)
            before = self._known.get(row.pod_uid)
            since = before.since if before is not None and before.status == status else row.reported_at
            condition = PodCondition(row.pod, row.pod_uid, status, reason, message[:1024], since)
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

    def failed(self, condition: PodCondition) -> None:
        """It was not written: the newest one is, after the pause."""
        if condition.uid in self._known:
            self._open.add(condition.uid)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._open.discard(uid)
        self._known.pop(uid, None)
        self._free_at.pop(uid, None)


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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(found):
                    await self._taken.wait()

    async def _write(self, condition: PodCondition) -> None:
        try:
            await self._kube.patch(condition.path(), condition.patch())
            self._failed.clear()
        except (MissingError, ConflictError):
            self._queue.forget(condition.uid)
        except KubeError as error:
            self._queue.failed(condition)
            self._failed.log(error=str(error).partition(" (")[0])
