"""The nodes' GPUs, as their device plugins write them into the bucket ``kyb_inventory``. Only shown, never acted on."""

import asyncio

from pydantic import ValidationError

from kybernate.bus.port import Bus, BusError, Entry
from kybernate.inventory import BUCKET, GpuRecord
from kybernate.logs import get_logger

RETRY_SECONDS = 2.0


class Inventory:
    """The last row of each GPU."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rows: dict[str, GpuRecord] = {}

    @property
    def gpus(self) -> list[GpuRecord]:
        """All GPUs, by node and index."""
        return sorted(self._rows.values(), key=lambda row: (row.node, row.index, row.gpu))

    async def watch(self) -> None:
        """Follow the bucket until cancelled; what was last seen stays while it cannot be read."""
        while True:
            try:
                bucket = await self._bus.bucket(BUCKET)
                async with bucket.watch() as entries:
                    async for entry in entries:
                        if entry is not None:
                            self._take(entry)
            except BusError as error:
                get_logger().debug("inventory.unwatched", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)

    def _take(self, entry: Entry) -> None:
        if entry.value is None:
            self._rows.pop(entry.key, None)
            return
        try:
            self._rows[entry.key] = GpuRecord.model_validate_json(entry.value)
        except ValidationError as error:
            get_logger().warning("inventory.unreadable", key=entry.key, error=str(error))
