"""A console beside a router: both have their own connection to a bus in memory; the manager is the test's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kybernate.dev.memory_bus import MemoryBus
from kybernate.envelope import Message
from kybernate.seat import SeatState
from services.console.service import Console, open_console
from services.console.settings import ConsoleSettings
from tests.router.engine import Engine
from tests.router.world import NODE, World, end, world
from tests.until import until

BOTH = ("api_keys_file", "speed")
"""Settings that the router gets, too."""


class Shown(World):
    """``url``, ``bus`` and ``call`` are the console's, ``ask`` goes to the router."""

    def __init__(self, w: World, console: Console, bus: MemoryBus) -> None:
        super().__init__(w.router, w.manager, w.server, bus, w.http)
        self.console, self.url, self.engines = console, console.url, w.engines

    async def seat(self, seat: str, model: str, state: SeatState = SeatState.PARKED, **fields: Any) -> Engine:
        engine = await super().seat(seat, model, state, **fields)
        await self.known(seat)
        return engine

    async def known(self, seat: str, node: str = NODE) -> None:
        rows = self.console.cluster.seats.rows
        await until(lambda: f"{node}.{seat}" in rows or not self.bus.connected, what=f"the console knows seat {seat}")

    def store(self, *events: Message) -> None:
        """Let the stream have them."""
        self.server.stored |= {event.id: (event.subject, event.body(), event.at) for event in events}


@asynccontextmanager
async def shown(*, router: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Shown]:
    """Run both. Settings are those of ConsoleSettings; ``router``: more of the router's."""
    async with AsyncExitStack() as stack:
        both = {name: settings[name] for name in BOTH if name in settings}
        w = await stack.enter_async_context(world(**both, **(router or {})))
        bus = await stack.enter_async_context(MemoryBus.connect(w.server))
        values = {"host": "127.0.0.1", "port": 0, "instance": "console-0", "router_url": w.url, **settings}
        console = await stack.enter_async_context(open_console(ConsoleSettings.model_validate(values), bus))
        tasks = [asyncio.create_task(job) for job in console.jobs().values()]
        stack.push_async_callback(end, tasks)
        await until(lambda: console.cluster.complete, what="the console has read the roster")
        yield Shown(w, console, bus)
        failed = [task.exception() for task in tasks if task.done()]
        assert not failed, failed
