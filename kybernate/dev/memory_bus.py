"""The bus in one process: for tests, and for programs that need no other process.

Messages are encoded and decoded as on the wire. Several MemoryBus share one MemoryServer, so that a test can cut one
client's connection (``bus.cut``) or stop the server for all (``server.stop``).
"""

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from kybernate.bus.inbox import Inbox, answer, beside, read, read_answer
from kybernate.bus.port import (
    ALL_EVENTS,
    BUCKETS,
    Bucket,
    BusDownError,
    Entry,
    NoAnswerError,
    NotSetUpError,
)
from kybernate.envelope import Message, Pattern
from kybernate.messages import RequestEnded

R = TypeVar("R", bound=BaseModel)


class MemoryServer:
    """The state of a server of MemoryBuses. Buckets exist from the start, as after ``kyb bus init``."""

    def __init__(self) -> None:
        self.running = True
        self.buses: list[MemoryBus] = []
        self.inboxes: list[tuple[MemoryBus, tuple[Pattern[Message], ...], Inbox[Message]]] = []
        self.handlers: list[tuple[MemoryBus, Pattern[Message], Inbox[_Request]]] = []
        self.stored: dict[str, tuple[str, bytes, float]] = {}
        """Events by message id, oldest first: subject, body and unix time."""
        self.requests: dict[str, RequestEnded] = {}
        """The last record of each request."""
        self.buckets = {name: _Level() for name in BUCKETS}

    def stop(self) -> None:
        """Every client loses its connection."""
        self.running = False
        self.notify()

    def start(self) -> None:
        """Every client that is not cut has its connection again."""
        self.running = True
        self.notify()

    def wipe(self) -> None:
        """Lose the disk: history and every entry of the buckets."""
        self.stored.clear()
        self.requests.clear()
        for level in self.buckets.values():
            level.wipe()

    def send(self, subject: str, body: bytes) -> None:
        """Deliver a message, decodable or not, to every subscriber."""
        for bus, patterns, inbox in self.inboxes:
            if bus.connected:
                message = read(subject, body, patterns)
                if message is not None and not inbox.put(message):
                    bus.dropped += 1

    def notify(self) -> None:
        """Let each client check whether it is connected."""
        for bus in tuple(self.buses):
            bus.check_connection()


class MemoryBus:
    """A ``Bus`` without a network."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.dropped = 0
        """Messages lost because a reader was too slow."""
        self._cut = False
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._callbacks: list[Callable[[bool], None]] = []
        self._watches: list[tuple[_Level, Inbox[Entry | None], set[str]]] = []
        self._was_connected = False

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: MemoryServer) -> AsyncIterator["MemoryBus"]:
        """A client of this server, until the context ends."""
        bus = cls(server)
        server.buses.append(bus)
        bus.check_connection()
        try:
            yield bus
        finally:
            server.buses.remove(bus)

    def cut(self) -> None:
        """Cut this client's connection."""
        self._cut = True
        self.check_connection()

    def restore(self) -> None:
        """Restore this client's connection."""
        self._cut = False
        self.check_connection()

    @property
    def troubles(self) -> dict[str, int]:
        """Number of tolerated failures since the start, by kind."""
        return {"dropped": self.dropped}

    @property
    def connected(self) -> bool:
        """True if a message published now would be sent."""
        return self.server.running and not self._cut

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(connected)`` at each loss and each return."""
        self._callbacks.append(callback)

    async def until_connected(self) -> None:
        """Wait until ``connected``."""
        await self._up.wait()

    async def closed(self) -> None:
        """Wait forever: this connection always comes back."""
        await asyncio.Event().wait()

    def check_connection(self) -> None:
        """Report a change of ``connected``."""
        if self.connected == self._was_connected:
            return
        self._was_connected = self.connected
        if self.connected:
            self._up.set()
            self._lost = asyncio.Event()
            for watch in self._watches:
                self._snapshot(*watch)
        else:
            self._up.clear()
            self._lost.set()
        for callback in self._callbacks:
            callback(self.connected)

    async def publish(self, message: Message) -> None:
        """Send to all subscribers."""
        self.publish_nowait(message)

    def publish_nowait(self, message: Message) -> None:
        """``publish`` in this turn of the event loop."""
        self._check()
        subject, body = message.subject, message.body()
        if isinstance(message, RequestEnded):
            self.server.requests[message.request] = message
        if subject.startswith("kyb.v1.evt."):
            self.server.stored.setdefault(message.id, (subject, body, time.time()))
        self.server.send(subject, body)

    async def flush(self, timeout: float = 2.0) -> None:  # noqa: ARG002 - the protocol has it
        """Messages are delivered at once: there is nothing to wait for."""
        self._check()

    async def request(self, message: Message, reply: type[R], *, timeout: float) -> R:
        """Send a request to the handler of this subject."""
        self._check()
        subject = message.subject
        serving = [inbox for bus, pattern, inbox in self.server.handlers if bus.connected and pattern.matches(subject)]
        if not serving:
            raise NoAnswerError(f"{subject}: no service handles it")
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        serving[0].put((subject, message.body(), answered))
        lost = asyncio.create_task(self._lost.wait())
        try:
            waited: list[asyncio.Future[Any]] = [answered, lost]
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if not answered.done():
            why = "the connection was lost" if self._lost.is_set() else f"no answer within {timeout:g} s"
            answered.cancel()
            raise NoAnswerError(f"{subject}: {why}; it may have been done or not")
        return read_answer(subject, answered.result(), reply)

    @asynccontextmanager
    async def subscribe(self, *patterns: Pattern[Message]) -> AsyncIterator[AsyncIterator[Message]]:
        """Messages of these kinds, in one iterator, from now on."""
        inbox: Inbox[Message] = Inbox()
        row = (self, patterns, inbox)
        self.server.inboxes.append(row)
        try:
            yield inbox
        finally:
            self.server.inboxes.remove(row)
            inbox.close()

    @asynccontextmanager
    async def serve(
        self, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
    ) -> AsyncIterator[None]:
        """Answer requests on this pattern, one at a time, until the context ends. It raises RuntimeError when that
        stops."""
        inbox: Inbox[_Request] = Inbox()

        async def work() -> None:
            async for subject, body, answered in inbox:
                reply = await answer(subject, body, pattern, handler)
                if reply is not None and not answered.done() and self.connected:
                    answered.set_result(reply)

        row = (self, pattern, inbox)
        self.server.handlers.append(row)
        try:
            async with beside(work(), name=f"serve {pattern.subject}"):
                yield
        finally:
            self.server.handlers.remove(row)

    async def replay(
        self, *, after_id: str | None = None, since: float = 0.0, pattern: Pattern[Message] = ALL_EVENTS
    ) -> AsyncIterator[Message]:
        """Stored events of this pattern, oldest first, after this id or since this time; ends at the present."""
        self._check()
        datetime.datetime.fromtimestamp(since, datetime.UTC)  # JetStream takes a date, so that others raise here, too
        if pattern.subject == RequestEnded.pattern().subject:
            for record in list(self.server.requests.values()):
                if record.arrived_at + record.seconds >= since:
                    yield record
            return
        ids = list(self.server.stored)
        start = ids.index(after_id) + 1 if after_id in self.server.stored else 0
        for id_ in ids[start:]:
            subject, body, at = self.server.stored[id_]
            message = read(subject, body, (pattern,)) if at >= since else None
            if message is not None:
                yield message

    async def ended(self, request: str) -> RequestEnded | None:
        """The stored record of a request; None: there is none."""
        self._check()
        return self.server.requests.get(request)

    async def bucket(self, name: str) -> Bucket:
        """An existing bucket. Raises NotSetUpError when there is none of this name."""
        self._check()
        if name not in self.server.buckets:
            raise NotSetUpError(f"bucket {name}: not on this server; run: kyb bus init")
        return _MemoryBucket(self, name)

    @asynccontextmanager
    async def watching(self, level: "_Level") -> AsyncIterator[AsyncIterator[Entry | None]]:
        """The iterator of ``Bucket.watch``."""
        inbox: Inbox[Entry | None] = Inbox()
        watch = (level, inbox, set[str]())
        self._watches.append(watch)
        if self.connected:
            self._snapshot(*watch)
        try:
            yield inbox
        finally:
            self._watches.remove(watch)
            inbox.close()

    def changed(self, level: "_Level", entry: Entry) -> None:
        """Deliver one change to this client's watches."""
        for watched, inbox, known in self._watches:
            if watched is level and self.connected:
                (known.discard if entry.value is None else known.add)(entry.key)
                inbox.put(entry)

    def _snapshot(self, level: "_Level", inbox: Inbox[Entry | None], known: set[str]) -> None:
        present = level.present()
        gone = known - {entry.key for entry in present}
        known.clear()
        known.update(entry.key for entry in present)
        for entry in (*present, *(Entry(key, None, level.revision_of(key)) for key in sorted(gone)), None):
            inbox.put(entry)

    def _check(self) -> None:
        if not self.connected:
            raise BusDownError("not connected to the bus in memory")


_Request = tuple[str, bytes, "asyncio.Future[bytes]"]


class _Level:
    """One bucket on the server: last entry by key, deleted ones without a value."""

    def __init__(self) -> None:
        self._last: dict[str, Entry] = {}
        self._revision = 0

    def write(self, key: str, value: bytes | None) -> Entry:
        self._revision += 1
        entry = Entry(key, value, self._revision)
        self._last.pop(key, None)  # the order of entries is the order of writing
        self._last[key] = entry
        return entry

    def revision_of(self, key: str) -> int:
        return self._last[key].revision if key in self._last else 0

    def present(self, node: str = "") -> list[Entry]:
        prefix = f"{node}." if node else ""
        return [e for e in self._last.values() if e.value is not None and e.key.startswith(prefix)]

    def wipe(self) -> None:
        self._last.clear()
        self._revision = 0


class _MemoryBucket:
    """A ``Bucket`` of a MemoryBus."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self._bus, self._name = bus, name

    async def put(self, key: str, value: bytes) -> int:
        return self._write(key, value)

    async def delete(self, key: str) -> None:
        self._write(key, None)

    async def entries(self, node: str = "") -> list[Entry]:
        return self._level().present(node)

    async def keys(self, node: str = "") -> Set[str]:
        return {entry.key for entry in self._level().present(node)}

    def watch(self) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Entry | None]]:
        return self._bus.watching(self._bus.server.buckets[self._name])

    def _level(self) -> _Level:
        if not self._bus.connected:
            raise BusDownError("not connected to the bus in memory")
        return self._bus.server.buckets[self._name]

    def _write(self, key: str, value: bytes | None) -> int:
        level = self._level()
        entry = level.write(key, value)
        for bus in self._bus.server.buses:
            bus.changed(level, entry)
        return entry.revision
