"""Connections: how many may be open, and what of them the garbage collector has to walk."""

import asyncio
import gc
import resource
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from kybernate.bus.follow import ROWS, follow
from kybernate.bus.port import Entry
from kybernate.http.connection import CallerConnection
from kybernate.logs import OnceLogger
from kybernate.tls import Accepted
from services.router.connections import OTHER_FILES, ConnectionLimits
from tests.router.world import World
from tests.until import until


def connections() -> "set[weakref.ref[CallerConnection]]":
    return {weakref.ref(each) for each in gc.get_objects() if type(each) is CallerConnection}


async def test_a_connection_that_ended_is_freed_at_once(w: World) -> None:
    gc.disable()
    try:
        earlier = connections()
        _, writer = await w.connect()
        await until(lambda: w.router.connections.open == 1, what="the connection is open")
        (found,) = connections() - earlier
        writer.close()
        await writer.wait_closed()
        await until(lambda: found() is None, what="the connection is freed")
    finally:
        gc.enable()


class Bucket:
    """A bus whose only bucket delivers what ``queue`` holds."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Entry | None] = asyncio.Queue()
        self.changed: list[Callable[[bool], None]] = []
        self.on_change = self.changed.append

    async def bucket(self, _: str) -> "Bucket":
        return self

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Entry | None]]:
        async def entries() -> AsyncIterator[Entry | None]:
            while True:
                yield await self.queue.get()

        yield entries()


async def test_only_rows_of_the_whole_bucket_are_exempt_from_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, taken, bus = list[int](), list[Entry](), Bucket()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(taken)))
    failed = OnceLogger("roster.watch_failed")
    following = asyncio.create_task(follow(bus, "b", taken.append, failed, retry_seconds=1.0))  # type: ignore[arg-type]
    row, count = Entry("k", b"", 1), 0

    async def deliver(*entries: Entry | None) -> None:
        nonlocal count
        count += sum(entry is not None for entry in entries)
        for entry in entries:
            bus.queue.put_nowait(entry)
        await until(lambda: len(taken) == count, what="all rows are taken")

    try:
        await deliver(*[row] * ROWS, None, *[row] * (3 * ROWS))
        assert frozen == [ROWS]
        bus.changed[0](False)
        bus.changed[0](True)
        await deliver(*[row] * ROWS, None, *[row] * ROWS)
        assert frozen == [ROWS, 5 * ROWS]
    finally:
        following.cancel()


def test_where_few_files_may_be_open_one_address_gets_half_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one address may have elsewhere would be all of them."""
    hard = OTHER_FILES + 2 * 10
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    limits, one = ConnectionLimits(1000, 500, lambda _: None), cast(Accepted, None)

    taken = [limits.enter("a", one) is None for _ in range(10)]

    assert taken == [True] * 5 + [False] * 5
    assert limits.enter("b", one) is None
