"""Tells the cluster which GPUs this node has and how they are: a row per GPU in the bucket ``kyb_inventory``."""

import asyncio
import time
from collections.abc import Mapping
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.inventory import BUCKET, GpuRecord
from kybernate.logs import get_logger
from kybernate.machine import Gpu
from services.plugin.servicer import Node

TOGETHER_SECONDS = 0.25
"""What changes so close together is told in one go."""
RETRY_SECONDS = 1.0


class Inventory:
    """The rows of one node; ``changed`` marks them, and the task writes what they are by then."""

    def __init__(self, bus: Bus, name: str, gpus: tuple[Gpu, ...], node: Node) -> None:
        self._bus, self._name, self._gpus, self._node = bus, name, gpus, node
        self._since = dict.fromkeys((gpu.uuid for gpu in gpus), time.time())
        self._dirty = asyncio.Event()

    def changed(self, *gpus: str) -> None:
        """The groups are others now, or these GPUs (UUIDs) entered another state."""
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
                for record in self._records(self._node.probation.reasons):
                    await bucket.put(record.key, record.model_dump_json().encode())
            except BusError as error:
                get_logger().info("inventory.unwritten", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._dirty.set()

    def _records(self, reasons: Mapping[str, str]) -> list[GpuRecord]:
        return [
            GpuRecord(
                node=self._name,
                gpu=gpu.uuid,
                index=gpu.index,
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                numa_node=gpu.numa_node,
                groups=tuple(sorted(self._node.offer.touched({gpu.uuid}))),
                healthy=gpu.uuid not in reasons,
                reason=reasons.get(gpu.uuid, ""),
                since=self._since[gpu.uuid],
            )
            for gpu in self._gpus
        ]
