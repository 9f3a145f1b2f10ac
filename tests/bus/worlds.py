"""Two worlds in which the same contract must hold: one in memory, one with a real nats-server."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import nats

from kybernate.bus.nats import NatsBus
from kybernate.bus.port import Bus
from kybernate.bus.setup import init
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.dev.nats_server import NatsServer

T = TypeVar("T")

DEADLINE_SECONDS = 10.0


class World(Protocol):
    """A server and its clients."""

    def client(self) -> AbstractAsyncContextManager[Bus]: ...

    async def inject(self, subject: str, data: bytes) -> None: ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...

    async def wipe(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.server = MemoryServer()

    def client(self) -> AbstractAsyncContextManager[Bus]:
        return MemoryBus.connect(self.server)

    async def inject(self, subject: str, data: bytes) -> None:
        self.server.send(subject, data)

    async def stop(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start()

    async def wipe(self) -> None:
        self.server.wipe()


class NatsWorld:
    def __init__(self, server: NatsServer) -> None:
        self.server = server

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Bus]:
        async with NatsBus(self.server.url, source="test", name="test").opened() as bus:
            await within(bus.until_connected())
            yield bus

    async def inject(self, subject: str, data: bytes) -> None:
        raw = await nats.connect(self.server.url)
        await raw.publish(subject, data)
        await raw.flush()
        await raw.close()

    async def stop(self) -> None:
        await self.server.kill()

    async def start(self) -> None:
        await self.server.start()

    async def wipe(self) -> None:
        shutil.rmtree(self.server.folder / "jetstream")

    async def init(self) -> None:
        await init(self.server.url)


@asynccontextmanager
async def nats_world(folder: Path) -> AsyncIterator[NatsWorld]:
    async with NatsServer(folder) as server:
        await init(server.url)
        yield NatsWorld(server)


async def within(what: Awaitable[T], seconds: float = DEADLINE_SECONDS) -> T:
    """The result, or TimeoutError."""
    return await asyncio.wait_for(what, seconds)
