"""Tells the cluster which GPUs this node has and how they are: a row per GPU in the bucket ``kyb_inventory``."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.inventory import BUCKET, GpuRecord
from kybernate.logs import get_logger
from kybernate.machine import Gpu
from kybernate.slugs import slug
from kybernate.topology import Incomplete
from services.plugin.servicer import Node

TOGETHER_SECONDS = 0.25
"""What changes so close together is told in one go."""
RETRY_SECONDS = 1.0


class Inventory:
    """The rows of one node; ``changed`` marks them, and the task writes what they are by then."""

    def __init__(self, bus: Bus, name: str, node: Node) -> None:
        self._bus, self._name, self._node = bus, name, node
        self._gpus: tuple[Gpu, ...] = ()
        self._incomplete: tuple[Incomplete, ...] = ()
        self._since: dict[str, float] = {}
        self._dirty = asyncio.Event()

    def show(self, gpus: tuple[Gpu, ...], incomplete: tuple[Incomplete, ...]) -> None:
        """These are the GPUs and the groups that lack some now."""
        self._gpus, self._incomplete = gpus, incomplete
        self._dirty.set()

    def changed(self, *gpus: str) -> None:
        """These GPUs (UUIDs) entered another state."""
        self._since |= dict.fromkeys(gpus, time.time())
        self._dirty.set()

    async def run(self) -> NoReturn:
        """Write whenever something changed, and all again when the bus came back."""
        self._bus.on_change(lambda connected: self._dirty.set() if connected else None)
        while True:
            await self._dirty.wait()
            await self._bus.until_connected()
            await asyncio.sleep(TOGETHER_SECONDS)
            self._dirty.clear()
            try:
                bucket = await self._bus.bucket(BUCKET)
                rows = {record.key: record for record in self._records(self._node.probation.reasons)}
                for key, record in rows.items():
                    await bucket.put(key, record.model_dump_json().encode())
                for entry in await bucket.entries(f"{slug(self._name)}."):
                    if entry.key not in rows:  # of a GPU that was replaced, or is not missed any more
                        await bucket.delete(entry.key)
            except BusError as error:
                get_logger().info("inventory.unwritten", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
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
                groups=tuple(sorted(self._node.offer.touched({gpu.uuid}))),
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
