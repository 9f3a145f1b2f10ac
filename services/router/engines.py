"""Connections to engines: pools by seat, one call at a time on each connection, answers found byte by byte."""

import asyncio
import ssl
import time
from functools import partial
from typing import Protocol, cast
from urllib.parse import urlsplit

from kybernate.http.deadline import Deadline
from kybernate.http.framing import Body, ChunkedBody, EndlessBody, HttpError
from kybernate.http.head import Head, HeadParser
from kybernate.lifecycle import cancelled, spawn
from kybernate.logs import get_logger

CONNECT_SECONDS = 5.0
MOST_CONNECTING = 32
"""To one engine at the same time: other calls go on while hundreds that were held are sent."""
IDLE_SECONDS = 15.0
"""After it an idle connection is closed."""
WHOLE_BYTES = 256 * 1024
"""An answer of known length up to this is read completely before it is sent, so that the call can be repeated."""
WRITE_BYTES = 256 * 1024
"""Of a request, given to the socket at a time."""


class EngineError(Exception):
    """The engine did not answer, or not completely. The text has no words of the engine, which are not for callers.

    ``stale``: the cause may be a kept connection that the engine has closed because it was idle.
    """

    def __init__(self, text: str, *, stale: bool = False) -> None:
        super().__init__(text)
        self.stale = stale


class Exchange(Protocol):
    """A call, as a connection to its engine sees it."""

    sent_at: float | None
    """When the request was written completely, unix seconds; None: it was not."""

    def connected(self, connection: "EngineConnection") -> None:
        """The new connection is open."""

    def refused(self, error: EngineError) -> None:
        """There is no connection."""

    def whole(self, head: Head, body: bytes) -> None:
        """The whole answer has arrived."""

    def began(self, head: Head, body: Body) -> None:
        """An answer begins; pieces follow."""

    def piece(self, raw: bytes, payload: bytes, *, last: bool) -> None:
        """A piece of the answer, as it was sent, and without the sizes of chunks."""

    def silent(self, connection: "EngineConnection") -> None:
        """The connection's clock has rung."""

    def broke(self, error: EngineError) -> None:
        """There is no further answer."""

    def failed(self, error: Exception) -> None:
        """An error of the router's own, in what it did with the answer."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: "EnginePool") -> None:
        self.pool = pool
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._heads = HeadParser(request=False)
        self._parser: HeadParser | None = None
        """Until the caller has the head of the answer."""
        self._head: Head | None = None
        self._body: Body | None = None
        self._pieces: list[bytes] | None = None
        """Of an answer that is read completely."""
        self._unbegun = b""
        """Of an answer, before its first payload: the size of its first chunk."""
        self._unsent = memoryview(b"")
        self._early = False
        """The answer began before the whole request was sent: what the engine reads later may be answered again."""
        self._paused = False
        self.clock = Deadline(asyncio.get_running_loop(), self._ring)
        """Time for the next piece of the answer."""
        self.idle_since = 0.0
        self.reading = True

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to the exchange."""
        assert self._transport is not None
        self._exchange, self._parser, self._early = exchange, self._heads, False
        if len(body) <= WRITE_BYTES:
            self._transport.write(head + body)
            exchange.sent_at = time.time()
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_more()

    def drop(self) -> None:
        """Close the connection; the exchange gets nothing any more."""
        self._exchange = None
        self.clock.end()
        self.pool.busy.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no further for now."""
        if self.open and self._transport is not None and self.reading:
            self.reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self.reading and self.open and self._transport is not None:
            self.reading = True
            self._transport.resume_reading()

    # --- what asyncio calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: an answer that has no other end is complete now."""
        self.pool.lost(self)
        self._transport = None
        self.clock.end()
        exchange, body = self._exchange, self._body
        if exchange is None:
            return
        if exc is None and isinstance(body, EndlessBody):
            try:
                self._finish(exchange, body, b"", b"")
            except Exception as error:
                exchange.failed(error)
        elif self._head is not None:
            self._break("it ended in the middle of its answer")
        else:
            self._break("it closed the connection", stale=not (self._parser and self._parser.started))

    def pause_writing(self) -> None:
        """Wait until the engine has read more of the request."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send more of the request."""
        self._paused = False
        if self._unsent:
            self._send_more()

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        exchange = self._exchange
        if exchange is None:
            self.drop()  # nothing was asked: no later caller gets this as its answer
            return
        try:
            if self._body is None:
                self._early = self._early or self._sending
                self._receive_head(exchange, data)
            else:
                self._receive(exchange, self._body, data)
        except HttpError:
            self._break("its answer is not valid HTTP")
        except Exception as error:
            exchange.failed(error)

    def _ring(self) -> None:
        if self._exchange is not None:
            self._exchange.silent(self)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _receive_head(self, exchange: Exchange, data: bytes) -> None:
        while True:
            assert self._parser is not None
            found = self._parser.feed(data)
            if found is None:
                return
            head, data = found
            if head.status not in (100, 102, 103):
                break
        if not 200 <= head.status < 600 or head.version not in ("1.1", "1.0"):
            self._break("its answer is not valid HTTP")
            return
        self._head = head
        length = 0 if head.status in (204, 304) else head.length
        if length == len(data) <= WHOLE_BYTES:  # as most answers come that are no streams
            self._done(again=head.keep_alive)
            exchange.whole(head, data)
            return
        if head.chunked and length is None:
            self._body = ChunkedBody()
        else:
            self._body = EndlessBody() if length is None else Body(length)
            if length is not None and length <= WHOLE_BYTES:
                self._pieces = []
        if data or length == 0:
            self._receive(exchange, self._body, data)

    def _receive(self, exchange: Exchange, body: Body, data: bytes) -> None:
        end = body.walk(data)
        payload = body.payload(data, end)
        rest = 0 <= end < len(data)
        raw = data[:end] if rest else data
        if self._pieces is not None:
            self._pieces.append(payload)
        elif self._parser is not None:
            raw, self._unbegun = self._unbegun + raw, b""
            if not payload and end < 0:
                self._unbegun = raw  # the caller gets the head with the first payload: until then it can be repeated
                return
            self._parser = None
            assert self._head is not None
            exchange.began(self._head, body)
            if self._exchange is None:
                return  # the exchange wants no such answer
        if end >= 0:
            self._finish(exchange, body, raw, payload, rest=rest)
        elif self._pieces is None:
            exchange.piece(raw, payload, last=False)

    def _finish(self, exchange: Exchange, body: Body, raw: bytes, payload: bytes, *, rest: bool = False) -> None:
        head, pieces, begins = self._head, self._pieces, self._parser is not None
        assert head is not None
        self._done(again=head.keep_alive and not rest and not isinstance(body, EndlessBody))
        if pieces is not None:
            exchange.whole(head, pieces[0] if len(pieces) == 1 else b"".join(pieces))
            return
        if begins and isinstance(body, EndlessBody):
            exchange.began(head, body)
        exchange.piece(raw, payload, last=True)

    def _done(self, *, again: bool) -> None:
        """End the exchange."""
        again = again and not self._early and self.open
        self._exchange = self._parser = self._head = self._body = self._pieces = None
        self.pool.done(self, again=again)

    @property
    def _sending(self) -> bool:
        return bool(self._unsent) or (self._transport is not None and self._transport.get_write_buffer_size() > 0)

    def _break(self, text: str, *, stale: bool = False) -> None:
        exchange = self._exchange
        self.drop()
        if exchange is not None:
            exchange.broke(EngineError(text, stale=stale))

    def _send_more(self) -> None:
        """Give the socket the rest of the request, as fast as the engine reads."""
        while self._unsent and not self._paused and self._transport is not None:
            piece, self._unsent = self._unsent[:WRITE_BYTES], self._unsent[WRITE_BYTES:]
            self._transport.write(piece)
        if not self._unsent and self._exchange is not None:
            self._exchange.sent_at = time.time()
            self._unsent = memoryview(b"")


# --- pools ------------------------------------------------------------------------------------------------------------


class EnginePool:
    """The connections to one engine."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        try:
            url = urlsplit(endpoint)
            port = url.port
        except ValueError:
            url, port = urlsplit(""), None
        self.host, self.tls = url.hostname, url.scheme == "https"
        """Host is None if the endpoint is no URL: nothing answers there."""
        self.port = port or (443 if self.tls else 80)
        self.prefix, self.authority = url.path.rstrip("/").encode(), url.netloc.rpartition("@")[2].encode()
        self.idle: list[EngineConnection] = []
        self.busy: set[EngineConnection] = set()
        self.connecting = asyncio.Semaphore(MOST_CONNECTING)
        self.closed = False
        """No connection is used again."""

    def done(self, connection: EngineConnection, *, again: bool) -> None:
        """End the use of a connection."""
        self.busy.discard(connection)
        if again and not self.closed:
            connection.resume()
            connection.idle_since = time.monotonic()
            self.idle.append(connection)
        else:
            connection.drop()

    def lost(self, connection: EngineConnection) -> None:
        """Forget a closed connection."""
        self.busy.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        """Close idle connections now, busy ones when their calls end."""
        self.closed = True
        for connection in self.idle[:]:
            connection.drop()
        self.idle.clear()


class EnginePools:
    """Pools by seat, so that a seat's idle connections can be closed when it is parked. Engines speak HTTP/1.1."""

    def __init__(self) -> None:
        self._pools: dict[str, EnginePool] = {}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    def pool(self, key: str, endpoint: str) -> EnginePool:
        """Return the pool of a seat."""
        pool = self._pools.get(key)
        if pool is None or pool.endpoint != endpoint:
            self.disconnect(key)
            pool = self._pools[key] = EnginePool(endpoint)
            if self._sweep is None:
                self._sweep = asyncio.get_running_loop().call_later(IDLE_SECONDS / 3, self._close_idle)
        return pool

    def take(self, pool: EnginePool) -> EngineConnection | None:
        """Return an open connection; None if there is none."""
        while pool.idle:
            connection = pool.idle.pop()
            if connection.open:
                pool.busy.add(connection)
                return connection
        return None

    def connect(self, pool: EnginePool, exchange: Exchange) -> asyncio.Task[bool]:
        """Open a connection for an exchange, which hears of it; cancel the task if it is not wanted any more."""
        return spawn(self._tasks, self._connect(pool, exchange))

    async def accepts(self, pool: EnginePool) -> bool:
        """Open an idle connection; return whether the engine accepted it."""
        return await self._connect(pool, None)

    def prepare(self, key: str, endpoint: str, count: int) -> None:
        """Open so many idle connections to an engine that is being restored: the kernel accepts them for it."""
        pool = self.pool(key, endpoint)
        for _ in range(count - len(pool.idle)):
            spawn(self._tasks, self._connect(pool, None))

    def disconnect(self, key: str) -> None:
        """Close a seat's connections: now those that are idle, others when their calls end.

        The next call then gets a new connection: an old one may be dead once the seat is active again.
        """
        pool = self._pools.pop(key, None)
        if pool is not None:
            pool.close()

    async def close(self) -> None:
        """Close all connections."""
        for pool in list(self._pools.values()):
            for connection in list(pool.busy):
                connection.drop()
            pool.close()
        self._pools.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        await cancelled(*self._tasks)

    async def _connect(self, pool: EnginePool, exchange: Exchange | None) -> bool:
        loop = asyncio.get_running_loop()
        try:
            if pool.tls and self._tls is None:
                self._tls = ssl.create_default_context()
            if not pool.host:
                raise ValueError(pool.endpoint)
            async with pool.connecting, asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    partial(EngineConnection, pool), pool.host, pool.port, ssl=self._tls if pool.tls else None
                )
        except TimeoutError:
            error = EngineError("it accepted no connection in time")
        except (OSError, ValueError):
            error = EngineError("it refused the connection")
        except Exception:
            get_logger().exception("engine.connect_failed", endpoint=pool.endpoint)
            error = EngineError("the router failed to connect to it; see its log")
        else:
            if exchange is None:
                pool.done(connection, again=connection.open)
                return True
            if connection.open:
                pool.busy.add(connection)
                exchange.connected(connection)
                return True
            error = EngineError("it closed the connection", stale=True)
        if exchange is not None:
            exchange.refused(error)
        return False

    def _close_idle(self) -> None:
        until = time.monotonic() - IDLE_SECONDS
        for pool in self._pools.values():
            for connection in [connection for connection in pool.idle if connection.idle_since < until]:
                connection.drop()
        self._sweep = asyncio.get_running_loop().call_later(IDLE_SECONDS / 3, self._close_idle)
