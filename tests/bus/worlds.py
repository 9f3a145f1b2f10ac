"""Worlds in which the same contract must hold: one in memory, one with a real nats-server, and a node's socket."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from unittest import mock

import nats

from kybernate.bus import node_socket
from kybernate.bus.nats import NatsBus
from kybernate.bus.node_socket import NodeSocket, connecting, listening
from kybernate.bus.port import Bus, Entry, NodeBus
from kybernate.bus.setup import init
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.dev.nats_server import NatsServer
from kybernate.envelope import Message
from kybernate.messages import SeatActivated, SeatEvent
from kybernate.seat import SeatState
from tests.until import until

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

    def client(self) -> AbstractAsyncContextManager[Bus]:
        return connected(self.server.url)

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


@dataclass
class Pair:
    """Two ends of one bus, connected."""

    near: NodeBus
    far: NodeBus
    inject: Callable[[str, bytes], Awaitable[None]]
    """Send this to the far end, whatever it is."""
    stop: Callable[[], Awaitable[None]]
    """Cut the connection of both until ``start``."""
    start: Callable[[], Awaitable[None]]


@asynccontextmanager
async def pair_of(world: World) -> AsyncIterator[Pair]:
    async with world.client() as near, world.client() as far:
        yield Pair(near, far, world.inject, world.stop, world.start)


@asynccontextmanager
async def socket_pair(path: Path, *, back: bool = False) -> AsyncIterator[Pair]:
    """``back``: the near end is the one that listens."""
    patient = mock.patch.object(node_socket, "CHECK_SECONDS", 3600.0)  # the file is moved away in ``stop``
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patient)
        server = await stack.enter_async_context(listening(path))
        client = await stack.enter_async_context(connecting(path))
        await until(lambda: client.connected and server.connected, what="both ends have each other")
        near, far = (server, client) if back else (client, server)

        async def inject(subject: str, data: bytes) -> None:
            near.links[0].send(b"P %s %s\n" % (subject.encode(), data))

        async def stop() -> None:
            path.rename(f"{path}.away")
            cut(server)

        async def start() -> None:
            path.with_name(f"{path.name}.away").rename(path)

        yield Pair(near, far, inject, stop, start)


def cut(bus: NodeSocket) -> None:
    """Break every connection of this end."""
    for link in bus.links:
        link.transport.abort()


@asynccontextmanager
async def connected(url: str, **more: Any) -> AsyncIterator[NatsBus]:
    """A bus over NATS; ``more``: of NatsBus."""
    async with NatsBus(url, **({"source": "test", "name": "test"} | more)).opened() as bus:
        await within(bus.until_connected())
        yield bus


def activated(epoch: int, **more: str) -> SeatActivated:
    event = {"cause": "test", "node": "n1", "seat": "s1", "state": SeatState.ACTIVE, "epoch": epoch}
    return SeatActivated.model_validate(event | more)


async def epoch_of(messages: AsyncIterator[Message]) -> int:
    """That of the next message, an event of a seat."""
    message = await within(anext(messages))
    assert isinstance(message, SeatEvent)
    return message.epoch


async def snapshot(entries: AsyncIterator[Entry | None], pause: float = 0.0) -> list[Entry]:
    """What a watch gives until it says that this is all; ``pause``: seconds after each."""
    found: list[Entry] = []
    while (entry := await within(anext(entries), 30)) is not None:
        found.append(entry)
        await asyncio.sleep(pause)
    return found


async def changed(entries: AsyncIterator[Entry | None]) -> Entry:
    """The next change of a watch."""
    entry = await within(anext(entries))
    assert entry is not None
    return entry


async def within(what: Awaitable[T], seconds: float = DEADLINE_SECONDS) -> T:
    """The result, or TimeoutError."""
    return await asyncio.wait_for(what, seconds)
