"""The checkpointer's metrics: host memory for copies, driver calls that hung, the journal's disk."""

import asyncio
from collections.abc import Iterable
from typing import NoReturn

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.checkpointer.backends.reservations import Headroom
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal

READ_SECONDS = 5.0
_DISK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class CheckpointerMetrics(Collector):
    """All metrics of one checkpointer. ``read_memory`` is a job: reading the host's memory may block."""

    def __init__(
        self, registry: CollectorRegistry, node: str, journal: Journal, pool: HelperPool, headroom: Headroom
    ) -> None:
        self._node, self._journal, self._pool, self._headroom = node, journal, pool, headroom
        self.available_bytes: int | None = None
        """Free host memory; None while it cannot be read."""
        text = "Wall seconds that a record of the journal waited for its disk"
        fsync = Histogram("kybernate_journal_fsync_seconds", text, ["node"], buckets=_DISK, registry=registry)
        journal.observe_fsync = fsync.labels(node).observe
        registry.register(self)

    async def read_memory(self) -> NoReturn:
        """Read the free host memory regularly until cancelled."""
        while True:
            try:
                self.available_bytes = await self._headroom.host.free_bytes()
            except OSError:
                self.available_bytes = None
            await asyncio.sleep(READ_SECONDS)

    def collect(self) -> Iterable[Metric]:
        """Yield what is read at scrape time."""
        text = "Wall seconds that the journal has waited for its disk; 0: it does not"
        yield self._gauge("kybernate_journal_waiting_seconds", text, self._journal.waiting_seconds)
        text = "Driver calls that overran their deadline, so that their helper was killed"
        hangs = CounterMetricFamily("kybernate_helper_hangs", text, labels=["node"])
        hangs.add_metric([self._node], self._pool.hangs)
        yield hangs
        text = "Helpers that were killed and do not end, because they hang inside the driver"
        yield self._gauge("kybernate_helpers_stuck", text, len(self._pool.stuck))
        text = "Host memory that is free for copies; no sample while it cannot be read"
        yield self._gauge("kybernate_host_memory_available_bytes", text, self.available_bytes)
        text = "Host memory that is reserved for copies under way and not yet taken"
        yield self._gauge("kybernate_host_memory_reserved_bytes", text, self._headroom.reserved_bytes())

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["node"])
        if value is not None:
            gauge.add_metric([self._node], value)
        return gauge
