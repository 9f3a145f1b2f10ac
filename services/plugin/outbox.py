"""What the plugin tells the cluster: kept while the bus is away, then sent in order.

Kubelet is never kept waiting for the bus: ``put`` only appends. A batch counts as sent once the server has confirmed
it; one whose fate is unknown is sent again under the same ids, so that the stream of events has each of them once.
"""

import asyncio
from collections import deque
from itertools import islice
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.envelope import Message
from kybernate.logs import get_logger

LIMIT = 10_000
"""Messages that may wait; of more, the oldest are dropped and counted. Some days of a node's life."""
BATCH = 100
RETRY_SECONDS = 0.25


class Outbox:
    """Messages that wait for the bus, oldest first."""

    def __init__(self, bus: Bus, limit: int = LIMIT) -> None:
        self._bus = bus
        self._limit = limit
        self._waiting: deque[Message] = deque()
        self._filled = asyncio.Event()
        self.dropped = 0

    def put(self, message: Message) -> None:
        """Send it as soon as the bus is there. Returns at once."""
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)
        self._filled.set()

    @property
    def waiting(self) -> int:
        """How many are not confirmed yet."""
        return len(self._waiting)

    async def run(self) -> NoReturn:
        """Send until cancelled."""
        while True:
            await self._filled.wait()
            await self._bus.until_connected()
            batch = list(islice(self._waiting, BATCH))
            try:
                for message in batch:
                    await self._bus.publish(message)
                await self._bus.flush()
            except BusError as error:
                get_logger().info("outbox.waits", messages=len(self._waiting), error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for message in batch:  # some may have been dropped meanwhile
                if self._waiting and self._waiting[0] is message:
                    self._waiting.popleft()
            if not self._waiting:
                self._filled.clear()
