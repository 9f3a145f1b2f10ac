"""The traffic levels of all sources, which this router shows.

Other routers report theirs together, every 2 s: received one by one they were 45 % of a core at 20,000 a second.
"""

import asyncio
import time
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.messages import NodeTrafficSignal, RouterLoad, TrafficSignal
from services.router.core.reports import Loads

FORGET_SECONDS = 10.0
"""Interval at which expired levels are forgotten."""


class LevelWatch:
    """Fills ``loads``. Run ``run`` and ``forget`` as jobs.

    ``exact``: each level is received when it changes, because this router decides by it.
    """

    def __init__(self, bus: Bus, loads: Loads, *, exact: bool = False) -> None:
        self.loads = loads
        self._bus = bus
        self._other = NodeTrafficSignal if exact else RouterLoad
        self._since: float | None = None

    @property
    def since(self) -> float | None:
        """Since when the levels of all sources are received, unix seconds; None: they are not."""
        return self._since if self._bus.connected else None

    async def run(self) -> NoReturn:
        """Receive levels until cancelled."""
        async with self._bus.subscribe(TrafficSignal.pattern(), self._other.pattern()) as messages:
            self._since = time.time()
            async for message in messages:
                if isinstance(message, RouterLoad):
                    self.loads.replace(message, time.monotonic())
                elif isinstance(message, TrafficSignal):
                    self.loads.add(message, time.monotonic())
        raise BusError("the bus was closed")

    async def forget(self) -> NoReturn:
        """Drop expired levels until cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            self.loads.forget(time.monotonic())
