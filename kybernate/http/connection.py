"""A caller's connection: its requests are answered one after another, each within its time."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from aiohttp import web

from kybernate.http.aiohttp_bridge import AiohttpHandler
from kybernate.http.deadline import Deadline
from kybernate.http.framing import HttpError
from kybernate.http.head import Head, HeadParser
from kybernate.http.intake import BodyMemory, Intake, RequestBody
from kybernate.http_api import ApiError, raw
from kybernate.key_guard import KeyGuard
from kybernate.logs import get_logger
from kybernate.tls import AcceptLimits, Caller, address_of
from kybernate.web_origin import WebOrigins

LEAST_READ_BYTES = 16 * 1024
"""What a caller must read of its last answer in ``slow_reader_seconds``."""
ASK_SECONDS = 0.25
"""Until a caller that ended its side is asked again whether it is there; each time twice as long."""
LINGER_SECONDS = 2.0
"""How long a caller may take to read the last answer and to close, before the connection is closed for it."""
MOST_REFUSED = 100
"""Refused connections that get an answer at the same time; further ones are only closed."""
MOST_PIPELINED = 64 * 1024
"""Bytes after a request that is not answered: no client of engines sends more, and a caller whose bytes are not read
could leave unnoticed."""
KNOWN_SECONDS = 10.0
"""A connection that is idle for longer forgets its last head."""
NO_HEADERS: Mapping[str, str] = {}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds that a caller has."""

    head_seconds: float = 20.0
    """For the head of its first request, else 408."""
    body_seconds: float = 10.0
    """For a body, plus 1 s for each 64 KiB of it, else 408."""
    idle_seconds: float = 20.0
    """Until the next request of a kept connection, else it is closed."""
    slow_reader_seconds: float = 20.0
    """To read what waits for it, some 64 KiB, before more is sent; else it is cut."""


class Call(Protocol):
    """A request that writes its answer to the connection itself, without aiohttp."""

    body: RequestBody

    @property
    def unanswered(self) -> bool:
        """Whether no byte of an answer is sent."""

    def ready(self, body: bytes) -> None:
        """Take the complete body."""

    def fail(self, error: ApiError) -> None:
        """Answer with an error."""

    def gone(self) -> None:
        """The caller has left."""

    def pause(self) -> None:
        """The caller reads more slowly than it is answered."""

    def resume(self) -> None:
        """It has read."""


class Port:
    """What connections ask of their port, which is an ``HttpServer``."""

    what = "service"
    times: Times
    limits: AcceptLimits
    origins: WebOrigins
    partial: BodyMemory
    bodies: Intake
    """Of requests that aiohttp answers."""
    most_bytes: int
    connections: "set[CallerConnection]"
    call_ended: asyncio.Event
    """A call was answered, or its caller left."""
    leaves = False
    """The port will close: each answer to a request that comes now ends its connection, and says so."""
    stopping = False
    """No request follows the one that is answered."""
    _guard: KeyGuard | None
    _runner: web.AppRunner

    def call(self, _: "CallerConnection", __: Head) -> Call | None:
        """Return what answers a request itself; None: aiohttp does. Raises ApiError."""
        return None

    def check(self, head: Head, *, bodiless: bool) -> None:
        """Refuse a request to aiohttp before its body is read; here, one without a key. Raises ApiError."""
        if self._guard is not None and not bodiless:
            self._guard.check(head.fields())

    def at_once(self, head: Head, *, close: bool) -> bytes | None:
        """Return the answer to a complete request that needs no aiohttp; None: it does."""
        may = self.origins.preflight(head.method.decode("latin-1"), head.fields())
        return None if may is None else raw(204, may, close=close)

    def handler(self, done: Callable[[], None]) -> AiohttpHandler:
        """Return a handler of one request."""
        server = self._runner.server
        assert server is not None  # between setup and cleanup
        loop = asyncio.get_running_loop()
        return AiohttpHandler(server, done=done, loop=loop, access_log=None, keepalive_timeout=0.0)


class CallerConnection(Caller):
    """One connection of a caller. Its requests are answered one after another."""

    def __init__(self, server: Port, *, counted: bool = False) -> None:
        """``counted``: TlsCaller has counted the connection, and forgets it."""
        self._is_counted = counted
        self._server, self._loop = server, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline: Deadline
        self.address = ""
        self._refused = self._ending = False
        self._heads: HeadParser | None = None
        """From the first byte on."""
        self._head: Head | None = None
        """Of the request whose body arrives."""
        self._last = False
        """The present request is the last one that the caller sends, or that it may send."""
        self.busy = False
        """A request has arrived completely and is not answered."""
        self._body: RequestBody | None = None
        self.cors = NO_HEADERS
        """Headers by which a page may read the answer to its request."""
        self._call: Call | None = None
        self._handler: AiohttpHandler | None = None
        """Of a request that aiohttp answers."""
        self._task: asyncio.Task[None] | None = None
        self._rest = b""
        """Bytes after a request that is not answered yet."""
        self._first = True
        self._idle = False
        """Whether it has been without a request for ``KNOWN_SECONDS``."""
        self._counted = 0
        """Bytes of a partial head, and after a request."""
        self._ask_seconds = 0.0
        """Above 0: the caller has ended its side, and sends nothing more."""
        self.slow = False
        """The caller reads more slowly than it is answered: nothing further is begun for it."""
        self._unread: int | None = None
        """Bytes of the last answer that the caller had not read when this was looked at."""

    # --- what asyncio calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it; then its first request must be complete in time."""
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport)
        limits = self._server.limits
        error = None if self._is_counted else limits.enter(self.address, self)
        self._deadline = Deadline(self._loop, self._late)
        if error is None:
            self._server.connections.add(self)
            self._deadline.set(self._server.times.head_seconds)
            return
        limits.refused += 1
        self._refused = True
        if limits.refused > MOST_REFUSED:
            self._transport.abort()
        else:
            error.closes = True
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is under way, and forget the connection."""
        self._deadline.end()
        self._transport = None
        self._hold(0)
        if self._refused:
            self._server.limits.refused -= 1
            return
        self._server.connections.discard(self)
        if not self._is_counted:
            self._server.limits.leave(self.address, self)
        self._ending = True
        call, handler, task = self._call, self._handler, self._task
        self._call = self._handler = self._task = None
        if call is not None:
            call.gone()
            self._server.call_ended.set()
        if self._body is not None:
            self._body.close()
        if handler is not None:
            handler.connection_lost(exc)
        if task is not None:
            task.cancel()

    def pause_writing(self) -> None:
        """Slow down what writes, for a limited time."""
        self.slow = True
        self._deadline.set(self._server.times.slow_reader_seconds)
        if self._call is not None:
            self._call.pause()
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Let it go on."""
        self.slow = False
        if self._call is not None:
            self._call.resume()
        if self._handler is not None and self._handler.writing_paused:
            self._handler.resume_writing()
        if not self.busy and not self._ending and self._rest:
            self._loop.call_soon(self._next)

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests."""
        if self._ending:
            return
        if self.busy or self._rest or self.slow:
            self._keep(data)
        else:
            self._take(data)

    def _keep(self, data: bytes) -> None:
        """Keep bytes until what came before them is answered."""
        self._rest += data
        if len(self._rest) > MOST_PIPELINED or not self._hold(len(self._rest)):
            self._server.limits.rejected("pipelined")
            self.abort()

    def eof_received(self) -> bool:
        """The caller has ended its side: to wait for its answers, or because it has left. True: the other side stays.

        One that waits for aiohttp has ``ASK_SECONDS``.
        """
        transport = self._transport
        if transport is None or self._ending or not (self.busy or self._rest) or not transport.can_write_eof():
            return False  # over TLS it cannot stay
        if self._call is not None and not self._call.unanswered:
            return False
        self._ask_seconds = ASK_SECONDS
        self._ask(transport)
        return True

    def _ask(self, transport: asyncio.Transport) -> None:
        """Send an interim answer, which every client skips: the kernel of a caller that has left replies with a reset.
        asyncio does not watch for that any more."""
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        elif self._call is not None and self._call.unanswered:
            self.write(CONTINUE)
            self._deadline.set(self._ask_seconds)
            self._ask_seconds *= 2
        elif self._call is None:
            self._deadline.set(self._ask_seconds)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        try:
            while data and not self._ending and not self.busy and not self.slow:
                data = self._take_head(data) if self._head is None else self._take_body(data)
                if self._head is None:
                    break  # other connections come before the next request
        except HttpError as error:
            self._server.limits.rejected("invalid_http")
            get_logger().debug("request.malformed", remote=self.address, error=str(error))
            text = "this is not a valid HTTP/1.1 request: check its request line, header fields and lengths"
            if error.too_large:
                self._fail(ApiError(431, "head_too_large", "the request's head is too long", closes=True))
            else:
                self._fail(ApiError(400, "invalid_http", text, closes=True))
        except ApiError as error:
            self._fail(error)
        except Exception as error:
            self._crash(error)
        else:
            if data and (self.busy or self.slow) and not self._ending:
                self._keep(data)
            elif data and not self._ending:
                self._rest = data
                self._loop.call_soon(self._next)

    def _take_head(self, data: bytes) -> bytes:
        heads = self._heads = self._heads or HeadParser(request=True)
        found = heads.feed(data)
        if found is None:
            if not self._hold(heads.size):
                self._server.limits.rejected("head_memory")
                raise ApiError(
                    503, "too_many_connections", "partial heads of requests take too much memory", 1, closes=True
                )
            return b""
        if self._counted:
            self._hold(0)
        self._head, data = found
        head = self._head
        self._last = not head.keep_alive or head.version != "1.1" or self._server.leaves
        if head.version not in ("1.1", "1.0"):
            text = "only HTTP/1.1 and HTTP/1.0 are served here"
            raise ApiError(505, "http_version", text, closes=True)
        self._check_page(head)
        self._call = self._server.call(self, head)
        if self._call is not None:
            self._body = self._call.body
        else:
            heads.forget()
            self._check(head, data)
            server = self._server
            self._body = RequestBody(server.bodies, head, head.fields(), self.address, server.most_bytes)
        if self._body.expected and not data:
            self.write(CONTINUE)
        return data if data else self._take_body(b"")

    def _check_page(self, head: Head) -> None:
        """Refuse what another site's page sends. Raises ApiError."""
        origins, fields = self._server.origins, head.fields()
        self.cors = NO_HEADERS
        if head.method == b"POST" and "origin" not in fields and "sec-fetch-site" not in fields:
            return  # as nearly all requests
        self.cors = origins.answer_headers(fields)
        page = head.target.startswith(b"/ui")
        refused = origins.refusal(head.method.decode("latin-1"), fields, page=page)
        if refused is not None:
            raise ApiError(403, *refused, closes=True)

    def _check(self, head: Head, rest: bytes) -> None:
        """Refuse a request before more is spent on it. Raises ApiError."""
        bodiless = not (head.chunked or head.length)
        try:
            self._server.check(head, bodiless=bodiless)
        except ApiError as error:
            if bodiless:  # the request is complete
                self._head, self.busy, self._first, self._rest = None, True, False, rest
                error.closes = not head.keep_alive or head.method == b"HEAD"  # its answer has a body
            raise

    def _take_body(self, data: bytes) -> bytes:
        assert self._body is not None
        end = self._body.feed(data)
        if end < 0:
            self._deadline.set(self._body.seconds())
            return b""
        head, self._head, self.busy, self._first = self._head, None, True, False
        assert head is not None
        if self._body.small is not None:
            self._answer(head, self._body.small)
        else:
            self._task = asyncio.create_task(self._take_large(head, self._body))
        return data[end:]

    async def _take_large(self, head: Head, body: RequestBody) -> None:
        try:
            self._answer(head, await body.large())
        except ApiError as error:
            self._fail(error)
        except Exception as error:
            self._crash(error)

    def _answer(self, head: Head, body: bytes) -> None:
        """Answer a complete request here, or give it to its call or to aiohttp."""
        if self._call is not None:
            self._call.ready(body)
        elif (raw := self._server.at_once(head, close=self.closes)) is not None:
            self.write(raw)
            self.finished(close=self.closes)
        else:
            assert self._transport is not None
            self._handler = self._server.handler(self.handled)
            self._handler.begin(self._transport, head, body)

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def closes(self) -> bool:
        """Whether the connection ends with the answer to the present request."""
        return self._last or self._server.stopping

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        """Close the connection at once."""
        self._ending = True
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Reset the connection: an incomplete answer without a length would look complete to an HTTP/1.0 caller."""
        if self._transport is not None:
            with contextlib.suppress(OSError):  # the caller has left
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def finished(self, *, close: bool) -> None:
        """A request is answered: take the next one, or end the connection."""
        complete = self._head is None
        if self._body is not None:
            self._body.close()
        self._call = self._body = self._head = None
        self._server.call_ended.set()
        if close or not complete or self._server.stopping:
            self._end(sending=not complete)
            return
        self.busy = self._idle = False
        if self._ask_seconds:
            self._ask_seconds = ASK_SECONDS
            self._loop.call_soon(self._next)
            return
        self._deadline.set(min(KNOWN_SECONDS, self._server.times.idle_seconds))
        if self._rest and not self.slow:
            self._loop.call_soon(self._next)

    def handled(self) -> None:
        """aiohttp has answered."""
        handler = self._handler
        if handler is None:
            return
        self._handler = None
        handler.leave()
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()  # aiohttp has paused it for a body that nothing read
        self.finished(close=not handler.keeps)

    @property
    def calling(self) -> bool:
        """Whether a call is being answered."""
        return self._call is not None

    def leave(self) -> None:
        """Close the connection now; a call that is being answered is cut."""
        if self.calling:
            self.reset()
        elif self._transport is not None:
            self._transport.close()

    @property
    def arriving(self) -> bool:
        """Whether a body for aiohttp is not complete."""
        return self._head is not None and self._body is not None and self._call is None

    def make_room(self) -> None:
        """Refuse the body that arrives: another address holds less."""
        self._server.limits.rejected("body_memory")
        self._fail(ApiError(429, "queue_full", "request bodies take too much memory; try again in 1 s", 1, closes=True))

    def stop(self) -> None:
        """Close the connection unless a request is being answered; one that still arrives is refused."""
        if self.busy or self._ending:
            return
        if self._head is not None or (self._heads is not None and self._heads.started):
            what = self._server.what
            self._fail(ApiError(503, f"{what}_stopping", f"this {what} stops; send the request again", 1, closes=True))
        else:
            self._end()

    def _next(self) -> None:
        """Take the bytes that came while an earlier request was answered."""
        if self._transport is None or self.busy or self._ending or self.slow:
            return
        rest, self._rest = self._rest, b""
        self._hold(0)
        self._take(rest)
        if self._ask_seconds and self.busy:
            self._ask(self._transport)
        elif self._ask_seconds and not self._rest:
            self._end()

    def _hold(self, size: int) -> bool:
        """Count this many bytes of the connection; False: they are too many, and nothing is counted."""
        memory = self._server.partial
        if self._counted:
            memory.give_back(self.address, self._counted)
            self._counted = 0
        if size and memory.full(self.address, size) is not None:
            return False
        if size:
            memory.take(self.address, size)
            self._counted = size
        return True

    def _fail(self, error: ApiError) -> None:
        """Answer a request with an error, before it is handled."""
        if self._call is not None:
            self._call.fail(error)
            return
        close = error.closes or self._head is not None or self._server.stopping
        self.write(error.raw(close=close, headers=self.cors))
        self.finished(close=close)

    def _crash(self, error: Exception) -> None:
        """End this connection after an error of this program; others go on."""
        self._server.limits.rejected("internal_error")
        get_logger().error("connection.failed", remote=self.address, exc_info=error)
        self.abort()

    def _end(self, *, sending: bool = False) -> None:
        """Close, once the caller has read the answer: a reset could overtake it. ``sending``: it still sends a body."""
        self._ending, self.busy, self._rest = True, False, b""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not sending and (self._ask_seconds or not transport.can_write_eof()):  # it has ended its side, or TLS
            transport.close()
            return
        if not sending:
            with contextlib.suppress(OSError):  # the caller has reset the connection
                transport.write_eof()
        self._deadline.set(LINGER_SECONDS)

    def _late(self) -> None:
        """A time limit has passed: for the first head, for a body, for the next request, or for closing."""
        transport = self._transport
        if transport is None:
            return
        if self._ending:
            self._close(transport)
        elif self.busy:
            if self.slow:
                self._server.limits.rejected("slow_reader")
                self.reset()
            elif self._ask_seconds and self._call is None:
                self.abort()
            elif self._ask_seconds:
                self._ask(transport)
        elif self._head is not None and self._body is not None:
            try:
                self._deadline.set(self._body.seconds())
            except ApiError as error:
                self._fail(error)
        elif self._first:
            self._server.limits.rejected("head_timeout")
            seconds = self._server.times.head_seconds
            text = f"the head of the request did not arrive within {seconds:g} s"
            self._fail(ApiError(408, "request_timeout", text, closes=True))
        elif not self._idle:
            self._idle = True
            if self._heads is not None:
                self._heads.forget()
            self._deadline.set(max(0.0, self._server.times.idle_seconds - KNOWN_SECONDS))
        else:
            self._end()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close; a caller that still reads the last answer goes on."""
        before, self._unread = self._unread, transport.get_write_buffer_size()
        if not self._unread:
            transport.close()
        elif before is None or self._unread <= before - LEAST_READ_BYTES:
            self._deadline.set(self._server.times.slow_reader_seconds)
        else:
            transport.abort()
