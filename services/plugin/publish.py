"""What the plugin publishes: events through an outbox, rows of GPUs in ``kyb_inventory``, metrics.

Kubelet never waits for the bus: both only mark what to send, and a task sends it.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import NoReturn

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.bus.port import Bus, BusError
from kybernate.envelope import Message, slug
from kybernate.logs import get_logger
from kybernate.machine import Gpu
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from kybernate.topology import IncompleteGroup
from services.plugin.gpu_watch import GpuWatch
from services.plugin.servicer import NodeSeats

OUTBOX_LIMIT = 10_000
"""Events that may wait to be sent; further ones are dropped."""
INVENTORY_BATCH_SECONDS = 0.25
"""Changes within this time are written together."""
INVENTORY_RETRY_SECONDS = 1.0


class Outbox:
    """Events that wait for the bus, sent in order. One whose sending fails is dropped, as the manager's are: rows of
    GPUs, and PodResources, tell what is."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(OUTBOX_LIMIT)

    def put(self, message: Message) -> None:
        """Queue an event; never waits."""
        with contextlib.suppress(asyncio.QueueFull):
            self._waiting.put_nowait(message)

    async def run(self) -> NoReturn:
        """Send until cancelled."""
        while True:
            message = await self._waiting.get()
            await self._bus.until_connected()
            try:
                await self._bus.publish(message)
            except BusError as error:
                get_logger().info("event.publish_failed", subject=message.subject, error=str(error))


class InventoryWriter:
    """The inventory rows of one node: changes mark them, ``run`` writes their state at the time of writing."""

    def __init__(self, bus: Bus, name: str, node: NodeSeats) -> None:
        self._bus, self._name, self._node = bus, name, node
        self._gpus: tuple[Gpu, ...] = ()
        self._incomplete: tuple[IncompleteGroup, ...] = ()
        self._since: dict[str, float] = {}
        self._dirty = asyncio.Event()

    def show(self, gpus: tuple[Gpu, ...], incomplete: tuple[IncompleteGroup, ...]) -> None:
        """Replace the GPUs, and the groups that lack some."""
        self._gpus, self._incomplete = gpus, incomplete
        self._dirty.set()

    def health_changed(self, *gpus: str) -> None:
        """Set the time of the last change of these GPUs (UUIDs) to now."""
        self._since |= dict.fromkeys(gpus, time.time())
        self._dirty.set()

    async def run(self) -> NoReturn:
        """Write all rows after every change, and when the bus has reconnected."""
        self._bus.on_change(lambda connected: self._dirty.set() if connected else None)
        while True:
            await self._dirty.wait()
            await self._bus.until_connected()
            await asyncio.sleep(INVENTORY_BATCH_SECONDS)
            self._dirty.clear()
            try:
                bucket = await self._bus.bucket(INVENTORY_BUCKET)
                rows = {record.key: record for record in self._records(self._node.probation.reasons)}
                for key, record in rows.items():
                    await bucket.put(key, record.model_dump_json().encode())
                for entry in await bucket.entries(slug(self._name)):
                    if entry.key not in rows:  # of a GPU that was replaced, or is not missing any more
                        await bucket.delete(entry.key)
            except BusError as error:
                get_logger().info("inventory.write_failed", error=str(error))
                await asyncio.sleep(INVENTORY_RETRY_SECONDS)
                self._dirty.set()

    def _records(self, reasons: Mapping[str, str]) -> Iterable[GpuRecord]:
        now = time.time()
        for gpu in self._gpus:
            yield GpuRecord(
                node=self._name,
                gpu=gpu.uuid,
                index=gpu.index,
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                numa_node=gpu.numa_node,
                groups=tuple(sorted(self._node.offer.groups_with({gpu.uuid}))),
                healthy=gpu.uuid not in reasons,
                reason=reasons.get(gpu.uuid, ""),
                since=self._since.setdefault(gpu.uuid, now),
            )
        for missing in dict.fromkeys(name for group in self._incomplete for name in group.missing):
            groups = [group for group in self._incomplete if missing in group.missing]
            uuid = missing if isinstance(missing, str) else f"GPU {missing}"
            yield GpuRecord(
                node=self._name,
                gpu=uuid,
                index=missing if isinstance(missing, int) else -1,
                groups=tuple(group.name for group in groups),
                healthy=False,
                reason=groups[0].why,
                since=self._since.setdefault(uuid, now),
            )


_GATE = (0.1, 0.5, 1, 2.5, 5, 10, 15, 20, 25, 30)


class PluginMetrics(Collector):
    """Allocations, waits at the start gate, offered seats, and what the GPUs measure."""

    def __init__(self, registry: CollectorRegistry, name: str, node: NodeSeats, watch: GpuWatch) -> None:
        self._name, self._node, self._watch = name, node, watch
        text = "Seats that kubelet allocated to a container"
        self.allocations = Counter("kybernate_plugin_allocations", text, registry=registry)
        text = "Wall seconds of a call of kubelet at the start gate; granted: its container starts"
        self._gate = Histogram(
            "kybernate_plugin_gate_wait_seconds", text, ["outcome"], buckets=_GATE, registry=registry
        )
        registry.register(self)

    def waited(self, granted: bool, seconds: float) -> None:
        """One call at the start gate has ended."""
        self._gate.labels("granted" if granted else "refused").observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Yield the seats that are offered to kubelet, and the GPUs' sensors; ``gpu`` is the UUID, as in
        ``kybernate_gpu_owner``."""
        text = "Seats that are offered to kubelet, by resource"
        gauge = GaugeMetricFamily("kybernate_plugin_seats", text, labels=["resource"])
        offered = collections.Counter(group.profile.resource for group in self._node.offer.seats.values())
        for resource, count in offered.items():
            gauge.add_metric([resource], count)
        yield gauge
        labels, found = ["node", "gpu"], self._watch.sensors
        for name, text, values in (
            ("temperature_celsius", "Temperature of the GPU", [one.celsius for one in found]),
            ("power_watts", "Power that the GPU draws", [one.watts for one in found]),
            ("utilization_ratio", "Share of the time that the GPU computes", [one.utilization for one in found]),
        ):
            gauge = GaugeMetricFamily(f"kybernate_gpu_{name}", text, labels=labels)
            for one, value in zip(found, values, strict=True):
                if value is not None:
                    gauge.add_metric([self._name, one.gpu], value)
            yield gauge
