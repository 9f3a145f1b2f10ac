"""When this router receives the traffic levels of all sources, which it shows and decides nothing by.

Every router would otherwise decode the signals of all others unread: at 20,000 a second that is 40 % of a core.
"""

import asyncio
import contextlib
import time
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.messages import NodeTrafficSignal, TrafficSignal
from services.router.core.reports import Loads

WINDOW_SECONDS = 4.0
FEW = 2000
"""Signals of a window, 500 a second, that are received whether they are read or not: 1 % of a core."""
READ_SECONDS = 5.0
"""How long one reading keeps the subscription."""
COMPLETE_SECONDS = 1.5
"""After this time each router has repeated its levels."""
LOOK_SECONDS = 60.0
"""How often a router without readers looks whether there are few signals again."""
FORGET_SECONDS = 10.0
"""Interval at which expired levels are forgotten."""


class LevelWatch:
    """Fills ``loads``: all the time while there are few signals, and otherwise while they are read.

    ``always``: they are read all the time. Run ``run`` and ``forget`` as jobs.
    """

    def __init__(self, bus: Bus, loads: Loads, *, always: bool = False) -> None:
        self.loads = loads
        self._bus = bus
        self._since: float | None = None
        self._read_until = float("inf") if always else 0.0
        self._wanted, self._complete = asyncio.Event(), asyncio.Event()
        self._complete.set()  # a router that starts lets no reader wait

    @property
    def since(self) -> float | None:
        """Since when the levels of all sources are received, unix seconds; None: they are not."""
        return self._since if self._bus.connected else None

    def keep(self) -> None:
        """Receive the levels for the next ``READ_SECONDS``."""
        self._read_until = max(self._read_until, time.monotonic() + READ_SECONDS)
        self._wanted.set()

    async def read(self) -> Loads:
        """Return the levels, once they are those of all routers; without the bus they are this router's.

        What another router published before for a source that is silent since (a gateway's signal is valid for up to
        an hour) may be missing.
        """
        self.keep()
        if self._bus.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * COMPLETE_SECONDS):
                    await self._complete.wait()
        return self.loads

    async def run(self) -> NoReturn:
        """Receive levels until cancelled."""
        while True:
            await self._follow()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wanted.wait()

    async def forget(self) -> NoReturn:
        """Drop expired levels until cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            self.loads.forget(time.monotonic())

    async def _follow(self) -> None:
        """Receive levels until they are many and not read."""
        async with self._bus.subscribe(TrafficSignal.pattern(), NodeTrafficSignal.pattern()) as messages:
            self._since = time.time()
            complete = asyncio.get_running_loop().call_later(COMPLETE_SECONDS, self._complete.set)
            began, count = time.monotonic(), 0
            try:
                async for message in messages:
                    now = time.monotonic()
                    if isinstance(message, TrafficSignal):
                        self.loads.add(message, now)
                    if now >= began + WINDOW_SECONDS:
                        began, count = now, 0
                    count += 1
                    if count > FEW and now >= self._read_until:
                        self._wanted.clear()
                        return
            finally:
                complete.cancel()
                self._complete.clear()
                self._since = None
        raise BusError("the bus was closed")
