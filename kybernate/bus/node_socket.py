"""The node bus: messages between a node's manager and its checkpointer, over a unix socket in ``run_dir``.

The checkpointer listens; the manager connects, and again after each loss. Bodies are the JSON that travels over NATS,
which has no line ends, so each message is one line:

    P SUBJECT BODY           a message to all who are connected
    Q NUMBER SUBJECT BODY    a request
    A NUMBER BODY            its answer
    N NUMBER                 the other end does not serve this subject

Only the owner can open the socket. Several managers may be connected, as on a server: epochs decide who is obeyed.
A peer that does not read is disconnected once ``BACKLOG`` bytes wait for it; it hears every level after it connects
again. Nothing is buffered beyond that, and nothing is sent later.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from kybernate.backoff import Backoff
from kybernate.bus.inbox import Inbox, Troubles, answer, beside, read, read_answer
from kybernate.bus.port import BusDownError, BusError, NoAnswerError
from kybernate.envelope import Message, Pattern
from kybernate.logs import OnceLogger, get_logger

R = TypeVar("R", bound=BaseModel)

LONGEST = 4 * 2**20
"""Bytes of one message."""
BACKLOG = 8 * 2**20
"""Bytes that may wait for a peer that does not read."""
RETRY_SECONDS = 0.02, 0.5
LASTS_SECONDS = 1.0
"""A connection that ends earlier counts as a failed attempt: the next one waits longer."""
LEAVE_SECONDS = 0.5
"""How long what was sent last may take to leave when the bus is closed."""
CHECK_SECONDS = 5.0
"""How often the one that listens checks that its socket can still be found."""

_Request = tuple["_Link", bytes, str, bytes]


class NodeSocket:
    """One end of the node bus, a ``LocalBus``; ``listening`` and ``connecting`` make one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.links: list[_Link] = []
        """The present connections: at most one where this end connects."""
        self.last_error = ""
        """Why the last attempt to connect failed; empty once a connection lasts."""
        self._waits = OnceLogger("bus.waits", level="info")
        self._troubles = Troubles("dropped", "ignored", "stuck")
        self._readers: list[tuple[tuple[Pattern[Message], ...], Inbox[Message]]] = []
        self._handlers: list[tuple[Pattern[Message], Inbox[_Request]]] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._leaving = False
        self._asked = 0

    @property
    def connected(self) -> bool:
        """True if a message published now would be sent."""
        return bool(self._open())

    @property
    def troubles(self) -> dict[str, int]:
        """Number of tolerated failures since the start: messages dropped because a reader of this process was too
        slow, lines that could not be read, peers that were disconnected since they did not read."""
        return dict(self._troubles.counts)

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(connected)`` at each loss, and each time that a peer has connected."""
        self._callbacks.append(callback)

    async def publish(self, message: Message) -> None:
        """Send to all who are connected."""
        self.publish_nowait(message)

    def publish_nowait(self, message: Message) -> None:
        """``publish`` in this turn of the event loop."""
        line = _line(b"P", message.subject.encode(), message.body())
        sent = [link.send(line) for link in self._open()]
        if not any(sent):
            raise self._down(message.subject)

    async def request(self, message: Message, reply: type[R], *, timeout: float) -> R:
        """Send a request to the peer that connected last."""
        subject = message.subject
        if not (links := self._open()):
            raise self._down(subject)
        link = links[-1]
        self._asked += 1
        number = b"%d" % self._asked
        line = _line(b"Q", number, subject.encode(), message.body())
        answered = link.asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                if not link.send(line):
                    raise self._down(subject)
                data = await answered
        except TimeoutError as error:
            why = f"no answer within {timeout:g} s"
            raise NoAnswerError(f"{subject}: {why}; it may have been done or not") from error
        finally:
            link.asked.pop(number, None)
        if data is None:
            raise NoAnswerError(f"{subject}: no service handles it")
        return read_answer(subject, data, reply)

    @asynccontextmanager
    async def subscribe(self, *patterns: Pattern[Message]) -> AsyncIterator[AsyncIterator[Message]]:
        """Messages of these kinds from the other end, in one iterator, from now on."""
        inbox: Inbox[Message] = Inbox()
        row = (patterns, inbox)
        self._readers.append(row)
        try:
            yield inbox
        finally:
            self._readers.remove(row)
            inbox.close()

    @asynccontextmanager
    async def serve(
        self, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
    ) -> AsyncIterator[None]:
        """Answer the other end's requests on this pattern, one at a time, until the context ends. It raises
        RuntimeError when answering ends before it."""
        inbox: Inbox[_Request] = Inbox()

        async def work() -> None:
            async for link, number, subject, data in inbox:
                if (body := await answer(subject, data, pattern, handler)) is None:
                    continue
                try:
                    link.send(_line(b"A", number, body))
                except BusError as error:
                    get_logger().warning("answer.unsent", subject=subject, error=str(error))

        row = (pattern, inbox)
        self._handlers.append(row)
        try:
            async with beside(work(), name=f"serve {pattern.subject}"):
                yield
        finally:
            self._handlers.remove(row)

    def _open(self) -> list["_Link"]:
        """The connections that are not about to be lost."""
        return [link for link in self.links if not link.transport.is_closing()]

    def _down(self, what: str) -> BusDownError:
        why = f": {self.last_error}" if self.last_error else ""
        return BusDownError(f"{what}: no peer is connected at {self.path}{why}")

    # --- what a connection reports ------------------------------------------------------------------------------------

    def joined(self, link: "_Link") -> None:
        """A connection was made."""
        self.links.append(link)
        self._changed(True)

    def lasts(self) -> None:
        """A connection has lasted."""
        self.last_error = ""
        self._waits.clear()
        get_logger().info("bus.connected", server=str(self.path))

    def left(self, link: "_Link") -> None:
        """A connection was lost."""
        self.links.remove(link)
        if not self.links:
            self._changed(False)
        if link.lasted and not self._leaving:
            get_logger().info("bus.lost", server=str(self.path))

    def _changed(self, connected: bool) -> None:
        if not self._leaving:
            for callback in self._callbacks:
                callback(connected)

    def stuck(self) -> None:
        """Count a peer that did not read."""
        self._troubles.count("stuck", "bus.peer_stuck", server=str(self.path), bytes=BACKLOG)

    def receive(self, link: "_Link", line: bytes) -> None:
        """Hand one line to the task that waits for it."""
        kind, _, rest = line.partition(b" ")
        if kind in (b"A", b"N"):
            number, _, body = rest.partition(b" ")
            answered = link.asked.pop(number, None)
            if answered is not None and not answered.done():
                answered.set_result(body if kind == b"A" else None)
        elif kind == b"P":
            name, _, body = rest.partition(b" ")
            self._received(name.decode(errors="replace"), body)
        elif kind == b"Q" and rest.count(b" ") > 1:
            number, name, body = rest.split(b" ", 2)
            self._requested(link, number, name.decode(errors="replace"), body)
        else:
            self._troubles.count("ignored", "bus.unreadable", server=str(self.path), begins=repr(line[:40]))

    def _received(self, subject: str, body: bytes) -> None:
        for patterns, inbox in self._readers:
            message = read(subject, body, patterns)
            if message is not None and not inbox.put(message):
                self._troubles.drop(subject)

    def _requested(self, link: "_Link", number: bytes, subject: str, body: bytes) -> None:
        for pattern, inbox in self._handlers:
            if pattern.matches(subject):
                if not inbox.put((link, number, subject, body)):
                    self._troubles.drop(subject)
                return
        link.send(_line(b"N", number))

    # --- making connections -------------------------------------------------------------------------------------------

    async def keep_connected(self) -> None:
        """Connect, and again after each loss, until cancelled."""
        backoff = Backoff(*RETRY_SECONDS)
        while True:
            try:
                link = await self._connect()
                await asyncio.wait([link.lost])
                if link.lasted:
                    backoff.reset()
                else:
                    self._failed("the peer ended the connection at once")
            except OSError as error:
                self._failed(str(error))
            await asyncio.sleep(backoff.pause())

    async def _connect(self) -> "_Link":
        """Raises OSError. asyncio would take a full queue of who listens for a connection."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(self.path))
            _, link = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(self), sock=sock)
        except BaseException:
            sock.close()
            raise
        return link

    def _failed(self, why: str) -> None:
        self.last_error = why
        self._waits.log(server=str(self.path), error=why)

    async def leave(self) -> None:
        """Close every connection when what was sent has left."""
        self._leaving = True
        links = tuple(self.links)
        for link in links:
            link.transport.close()
        if links:
            await asyncio.wait([link.lost for link in links], timeout=LEAVE_SECONDS)
        for link in links:
            link.transport.abort()


class _Link(asyncio.Protocol):
    """One connection, until its loss."""

    transport: asyncio.Transport

    def __init__(self, bus: NodeSocket) -> None:
        self._bus = bus
        self._rest = b""
        self.asked: dict[bytes, asyncio.Future[bytes | None]] = {}
        """Requests without an answer, by number."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lasted = False
        """It has been there for ``LASTS_SECONDS``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._timer = asyncio.get_running_loop().call_later(LASTS_SECONDS, self._lasts)
        self._bus.joined(self)

    def _lasts(self) -> None:
        self.lasted = True
        self._bus.lasts()

    def data_received(self, data: bytes) -> None:
        lines = data.split(b"\n")
        lines[0] = self._rest + lines[0]
        self._rest = lines.pop()
        for line in lines:
            self._bus.receive(self, line)
        if len(self._rest) > LONGEST:
            self.transport.abort()
            get_logger().error("bus.too_long", server=str(self._bus.path), bytes=len(self._rest), limit=LONGEST)

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self.lost.set_result(None)
        for number, answered in self.asked.items():
            if not answered.done():
                text = f"request {number.decode()}: the connection was lost; it may have been done or not"
                answered.set_exception(NoAnswerError(text))
        self._bus.left(self)  # last: what it reports to may fail

    def send(self, line: bytes) -> bool:
        """Send, or disconnect a peer that has not read for too long. False if the connection is lost."""
        if self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() > BACKLOG:
            self.transport.abort()
            self._bus.stuck()
        else:
            self.transport.write(line)
        return not self.transport.is_closing()


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[NodeSocket]:
    """The checkpointer's end. Only for the holder of the folder's lock: a socket that is there was left behind.

    Raises BusError when it cannot listen. The context raises RuntimeError when the socket's file is removed.
    """
    bus = NodeSocket(path)
    try:
        sock, made = _bound(path)
        server = await asyncio.get_running_loop().create_unix_server(lambda: _Link(bus), sock=sock)
    except OSError as error:
        raise BusError(
            f"cannot listen at {path}: {error.strerror or error}; give all services of the node another KYB_RUN_DIR"
        ) from error
    try:
        async with beside(_until_removed(path, made), name=f"listening at {path}, whose file is gone,"):
            yield bus
    finally:
        server.close()
        await bus.leave()


@asynccontextmanager
async def connecting(path: Path) -> AsyncIterator[NodeSocket]:
    """The manager's end: connects in the background until the context ends. It raises RuntimeError when that fails."""
    bus = NodeSocket(path)
    try:
        async with beside(bus.keep_connected(), name=f"connecting to {path}"):
            yield bus
    finally:
        await bus.leave()


def _bound(path: Path) -> tuple[socket.socket, int]:
    """A socket at this path, and the number of its file."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)  # no peer can connect before it listens
        return sock, path.stat().st_ino
    except OSError:
        sock.close()
        raise


async def _until_removed(path: Path, made: int) -> None:
    """Return when the file is another one, or none: no manager could connect any more."""
    with contextlib.suppress(OSError):
        while os.stat(path).st_ino == made:  # noqa: ASYNC110 - the kernel does not tell
            await asyncio.sleep(CHECK_SECONDS)


def _line(*parts: bytes) -> bytes:
    """Raises BusError for a message that is too long."""
    line = b" ".join(parts) + b"\n"
    if len(line) > LONGEST:
        raise BusError(f"a message of {len(line)} bytes: the node bus takes {LONGEST}")
    return line
