"""Reports to the manager. A job never waits for the bus: what cannot be sent now is sent when the bus is back."""

import asyncio
import contextlib
from collections import OrderedDict, deque

from kybernate.bus.port import Bus, BusError
from kybernate.messages import JobProgress, JobStatus

REPEATED_JOBS = 64
"""So many of the last jobs are reported again after an outage; a report just before it may have been lost."""


class Reporter:
    """Publishes whole statuses in order."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus, self._node = bus, node
        self._last: OrderedDict[str, JobProgress] = OrderedDict()
        self._unsent: deque[JobProgress] = deque()
        self._news = asyncio.Event()
        bus.on_change(self._bus_changed)

    def tell(self, status: JobStatus, cause: str) -> None:
        """Report the status of a job as soon as the bus allows."""
        report = JobProgress(cause=cause, node=self._node, status=status)
        self._last[status.op] = report
        self._last.move_to_end(status.op)
        while len(self._last) > REPEATED_JOBS:
            self._last.popitem(last=False)
        if self._bus.connected:
            self._unsent.append(report)
            self._news.set()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsent:
                report = self._unsent.popleft()
                with contextlib.suppress(BusError):  # the last of each job is said again when the bus is back
                    await self._bus.publish(report)

    def _bus_changed(self, connected: bool) -> None:
        self._unsent.clear()
        if connected:
            self._unsent.extend(self._last.values())
            self._news.set()
