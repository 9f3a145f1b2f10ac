"""One call to one engine, over the pooled connections of its seat; bytes pass through unchanged."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kybernate.logs import get_logger
from services.router.api import LONGEST_NAME, CallerResponse, RouterError, is_stream
from services.router.auth import withheld
from services.router.core.step import Forward
from services.router.dispatch import CallTicket, SeatCutError

CONNECT_SECONDS = 5.0
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "trailers", "transfer-encoding", "upgrade",
})  # fmt: skip
_NOT_SENT = HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect", "x-request-id"}
"""The body was read and, if it was compressed, decompressed; its length and encoding are set anew."""
WHOLE_BYTES = 256 * 1024
"""A response of known length up to this is read completely before it is sent, so that the call can be repeated."""


# --- connections ------------------------------------------------------------------------------------------------------


class Body(Payload):
    """A request body in memory that records when it was written to the socket."""

    _value: bytes

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)
        self.sent_at: float | None = None
        """Unix seconds."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write it to the socket."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write it to the socket; its length was sent in the headers."""
        await writer.write(self._value if content_length is None else self._value[:content_length])
        self.sent_at = time.time()


class ConnectionPool:
    """The connections to one engine. Closed when it is detached and has no users."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        self.users = 0
        self.detached = False


class ConnectionPools:
    """Pools by seat, so that a seat's idle connections can be closed when it is parked. Engines speak HTTP/1.1."""

    def __init__(self) -> None:
        self._pools: dict[str, ConnectionPool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, key: str) -> ConnectionPool:
        """Return the pool of a seat, in use until ``give_back``."""
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = ConnectionPool()
        pool.users += 1
        return pool

    def give_back(self, pool: ConnectionPool) -> None:
        """End one use of the pool."""
        pool.users -= 1
        if pool.detached and pool.users == 0:
            self._close(pool)

    def disconnect(self, key: str) -> None:
        """Close a seat's connections: now if none is in use, else when the last use ends.

        The next call then gets a new connection: an old one may be dead once the seat is active again.
        """
        pool = self._pools.pop(key, None)
        if pool is not None:
            pool.detached = True
            if pool.users == 0:
                self._close(pool)

    async def close(self) -> None:
        """Close all pools."""
        for key in list(self._pools):
            self.disconnect(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, pool: ConnectionPool) -> None:
        task = asyncio.create_task(pool.session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class UpstreamRefusedError(Exception):
    """The engine sent nothing: no connection, or it closed before the first byte of a response.

    ``stale``: the cause may be a kept-alive connection that the engine has closed because it was idle.
    """

    def __init__(self, text: str, *, stale: bool) -> None:
        super().__init__(text)
        self.stale = stale


@dataclass(slots=True)
class CallTimes:
    """When a call was sent and when its response began, unix seconds."""

    sent_at: float | None = None
    first_byte_at: float | None = None


class EngineClock:
    """Cuts a call whose engine is silent for too long, unless the seat is frozen. Wall seconds."""

    def __init__(self, ticket: CallTicket, first_byte_seconds: float, silence_seconds: float) -> None:
        self._ticket, self._seconds, self._silence_seconds = ticket, first_byte_seconds, silence_seconds
        self._loop = asyncio.get_running_loop()
        self._received_at = self._loop.time()
        self._timer = self._loop.call_later(first_byte_seconds, self._ring)
        self.frozen: Callable[[], bool] = lambda: False

    def received(self) -> None:
        """The engine has sent a piece of its answer."""
        self._received_at = self._loop.time()
        if self._seconds != self._silence_seconds:
            self._seconds = self._silence_seconds
            self.stop()
            self._timer = self._loop.call_later(self._seconds, self._ring)

    def stop(self) -> None:
        """End the clock."""
        self._timer.cancel()

    def _ring(self) -> None:
        now = self._loop.time()
        if self.frozen():
            self._received_at = now
        if now >= self._received_at + self._seconds:
            self._ticket.cut("engine_silent")
        else:
            self._timer = self._loop.call_at(self._received_at + self._seconds, self._ring)


def passed(headers: CIMultiDictProxy[str], without: frozenset[str]) -> CIMultiDict[str]:
    """Return the headers to pass on: all except ``without``, those of this connection, and Kybernate's own."""
    listed = headers.getall("Connection", ())
    drop = without.union(name.strip().lower() for value in listed for name in value.split(","))
    pairs = ((name, value, name.lower()) for name, value in headers.items())
    return CIMultiDict(
        (name, value) for name, value, lower in pairs if lower not in drop and not lower.startswith("x-kyb-")
    )


async def forward(
    request: web.Request,
    body: bytes,
    to: Forward,
    ticket: CallTicket,
    pools: ConnectionPools,
    response: CallerResponse,
    more: Callable[[CallTimes], Mapping[str, str]],
    times: CallTimes,
    clock: EngineClock,
) -> web.StreamResponse:
    """Send the call to the engine and its response to the caller; ``more`` returns headers when the response begins.

    Raises UpstreamRefusedError or SeatCutError while the call can be repeated, RouterError if its response broke off.
    """
    headers = passed(request.headers, _NOT_SENT | withheld(request))
    headers["X-Request-Id"] = ticket.cause
    pool = pools.take(to.key)
    try:
        with ticket:
            reply = await _send(
                pool, request, URL(to.endpoint + request.rel_url.raw_path_qs, encoded=True), headers, body, times
            )
            try:
                if not 200 <= reply.status < 600:
                    raise UpstreamRefusedError(f"it answered with status {reply.status}", stale=False)
                return await _through(reply, response, more, times, clock)
            finally:
                reply.close()  # closes the connection unless the response was read completely
    except (SeatCutError, aiohttp.ClientError, OSError) as error:
        if not response.first_byte:
            if isinstance(error, SeatCutError):
                raise
            stale = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            stale = stale and not isinstance(error, aiohttp.ClientConnectorError)
            raise UpstreamRefusedError(_what(error), stale=stale) from error
        raise _broken(to, error) from error
    finally:
        clock.stop()
        pools.give_back(pool)


async def _send(
    pool: ConnectionPool, request: web.Request, url: URL, headers: CIMultiDict[str], body: bytes, times: CallTimes
) -> aiohttp.ClientResponse:
    payload = Body(body)
    try:
        return await pool.session.request(request.method, url, headers=headers, data=payload, allow_redirects=False)
    finally:
        times.sent_at = payload.sent_at


async def _through(
    reply: aiohttp.ClientResponse,
    response: CallerResponse,
    more: Callable[[CallTimes], Mapping[str, str]],
    times: CallTimes,
    clock: EngineClock,
) -> web.StreamResponse:
    headers = passed(reply.headers, HOP_BY_HOP)
    length = reply.content_length
    if length is not None and length <= WHOLE_BYTES:
        whole = await reply.read()
        times.first_byte_at = time.time()
        headers.update(more(times))
        headers.popall("Content-Length", None)
        return await response.whole(reply.status, headers, whole)
    content = reply.content
    chunk = await content.readany()  # the headers are sent after it: until then the call can be repeated elsewhere
    times.first_byte_at = time.time()
    headers.update(more(times))
    await response.begin(reply.status, headers, sse=is_stream(reply.headers.get("Content-Type", "")))
    write, read, received = response.write, content.readany, clock.received
    while chunk:
        await write(chunk)
        received()
        chunk = await read()
    return await response.end()


def _broken(to: Forward, error: Exception) -> RouterError:
    if isinstance(error, SeatCutError) and error.code == "seat_evicted":
        return RouterError(
            503, "seat_evicted", f"seat {to.seat} was parked before the answer was complete; try again", 1
        )
    get_logger().info("engine.broke_off", seat=to.seat, error=repr(error)[:LONGEST_NAME])
    return RouterError(503, "upstream_failed", f"the engine of seat {to.seat} broke off: {_what(error)}; try again", 1)


_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (SeatCutError, "it was silent for too long"),
    (aiohttp.ServerTimeoutError, "it accepted no connection in time"),
    (aiohttp.ClientConnectorError, "it refused the connection"),
    (aiohttp.ServerDisconnectedError, "it closed the connection"),
    (aiohttp.ClientPayloadError, "it ended in the middle of its answer"),
    (aiohttp.ClientResponseError, "its answer is not valid HTTP"),
)


def _what(error: Exception) -> str:
    """Say what failed, without words of the engine, which are not for callers."""
    return next((text for kind, text in _FAILURES if isinstance(error, kind)), "the connection failed")
