"""The router's own port: callers' connections, their limits, and which part of the router answers a request.

Inference calls go to ``calls.py``; every other request is given to aiohttp's application, complete with its body.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self, cast

from aiohttp import web

from kybernate.envelope import LONGEST_NAME
from kybernate.http.deadline import Deadline
from kybernate.http.framing import HttpError
from kybernate.http.head import Head, HeadParser
from kybernate.http_api import ApiError
from kybernate.lifecycle import listening
from kybernate.logs import get_logger
from kybernate.tls import TlsCaller, address_of
from kybernate.web_origin import WebOrigins
from services.router.aiohttp_bridge import AiohttpHandler
from services.router.api import RouterError, no_content
from services.router.calls import Call, Calls
from services.router.connections import ConnectionLimits
from services.router.intake import BodyMemory, Intake, RequestBody
from services.router.settings import RouterSettings

LEAST_READ_BYTES = 16 * 1024
"""What a caller must read of its last answer in ``slow_reader_seconds``."""
ASK_SECONDS = 0.25
"""Until a caller that ended its side is asked again whether it is there; each time twice as long."""
LINGER_SECONDS = 2.0
"""How long a caller may take to read the last answer and to close, before the connection is closed for it."""
BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
MOST_ACCEPTED = 64
"""In one turn of the loop, before they are counted."""
MOST_REFUSED = 100
"""Refused connections that get an answer at the same time; further ones are only closed."""
MOST_PIPELINED = 64 * 1024
"""Bytes after a request that is not answered: no client of engines sends more, and a caller whose bytes are not read
could leave unnoticed."""
PARTIAL_BYTES = 16 * 2**20
"""All heads that are not complete, and all bytes after requests that are not answered; a quarter for one address."""
OWN_BYTES = 512 * 1024
"""Largest body of a request to the router itself."""
OWN_MEMORY_BYTES = 64 * OWN_BYTES
"""All bodies and long heads of such requests that are in memory; they take nothing from the bodies of calls."""
STOP_SECONDS = 1.0
"""How long calls may go on once the router stops."""
OWN_PATHS = frozenset({b"/healthz", b"/readyz", b"/metrics", b"/openapi.json"})
"""Of the router itself, without those below /v1/."""
HEALTHY = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 16\r\n\r\n{"status": "ok"}'
)
HEALTHY_LAST = HEALTHY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
"""``GET /healthz``, in one turn of the loop: a router that releases thousands of requests is alive."""
KNOWN_SECONDS = 10.0
"""A connection that is idle for longer forgets its last head."""
NO_HEADERS: Mapping[str, str] = {}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class CallerConnection(asyncio.Protocol):
    """One connection of a caller. Its requests are answered one after another."""

    def __init__(self, front: "Front", *, counted: bool = False) -> None:
        """``counted``: TlsCaller has counted the connection, and forgets it."""
        self._is_counted = counted
        self._front, self._loop = front, asyncio.get_running_loop()
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
        self._busy = False
        """A request has arrived completely and is not answered."""
        self._body: RequestBody | None = None
        self.cors = NO_HEADERS
        """Headers by which a page may read the answer to its request."""
        self._call: Call | None = None
        self._handler: AiohttpHandler | None = None
        """Of a request to the router itself."""
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
        limits = self._front.limits
        error = None if self._is_counted else limits.enter(self.address)
        self._deadline = Deadline(self._loop, self._late)
        if error is None:
            self._front.connections.add(self)
            self._deadline.set(self._front.settings.head_seconds)
            return
        limits.refused += 1
        self._refused = True
        if limits.refused > MOST_REFUSED:
            self._transport.abort()
        else:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is under way, and forget the connection."""
        self._deadline.end()
        self._transport = None
        self._hold(0)
        if self._refused:
            self._front.limits.refused -= 1
            return
        self._front.connections.discard(self)
        if not self._is_counted:
            self._front.limits.leave(self.address)
        self._ending = True
        call, handler, task = self._call, self._handler, self._task
        self._call = self._handler = self._task = None
        if call is not None:
            call.gone()
            self._front.call_ended()
        if self._body is not None:
            self._body.close()
        if handler is not None:
            handler.connection_lost(exc)
        if task is not None:
            task.cancel()

    def pause_writing(self) -> None:
        """Slow down what writes, for a limited time."""
        self.slow = True
        self._deadline.set(self._front.settings.slow_reader_seconds)
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
        if not self._busy and not self._ending and self._rest:
            self._loop.call_soon(self._next)

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests."""
        if self._ending:
            return
        if self._busy or self._rest or self.slow:
            self._keep(data)
        else:
            self._take(data)

    def _keep(self, data: bytes) -> None:
        """Keep bytes until what came before them is answered."""
        self._rest += data
        if len(self._rest) > MOST_PIPELINED or not self._hold(len(self._rest)):
            self._front.limits.rejected("pipelined")
            self.abort()

    def eof_received(self) -> bool:
        """The caller has ended its side: to wait for its answers, or because it has left. True: the other side stays.

        One that waits for a request to the router itself has ``ASK_SECONDS``.
        """
        transport = self._transport
        if transport is None or self._ending or not (self._busy or self._rest) or not transport.can_write_eof():
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
            while data and not self._ending and not self._busy and not self.slow:
                data = self._take_head(data) if self._head is None else self._take_body(data)
                if self._head is None:
                    break  # other connections come before the next request
        except HttpError as error:
            self._front.limits.rejected("invalid_http")
            get_logger().debug("request.malformed", remote=self.address, error=str(error))
            text = "this is not a valid HTTP/1.1 request: check its request line, header fields and lengths"
            if error.too_large:
                self._refuse(RouterError(431, "head_too_large", "the request's head is too long"))
            else:
                self._refuse(RouterError(400, "invalid_http", text))
        except ApiError as error:
            self._fail(error)
        except Exception as error:
            self._crash(error)
        else:
            if data and (self._busy or self.slow) and not self._ending:
                self._keep(data)
            elif data and not self._ending:
                self._rest = data
                self._loop.call_soon(self._next)

    def _take_head(self, data: bytes) -> bytes:
        heads = self._heads = self._heads or HeadParser(request=True)
        found = heads.feed(data)
        if found is None:
            if not self._hold(heads.size):
                self._front.limits.rejected("head_memory")
                raise RouterError(
                    503, "too_many_connections", "partial heads of requests take too much memory", 1, closes=True
                )
            return b""
        if self._counted:
            self._hold(0)
        self._head, data = found
        head, calls = self._head, self._front.calls
        self._last = not head.keep_alive or head.version != "1.1" or self._front.leaves
        if head.version not in ("1.1", "1.0"):
            text = "only HTTP/1.1 and HTTP/1.0 are served here"
            raise RouterError(505, "http_version", text, closes=True)
        self._check_page(head)
        if head.method == b"POST" and head.target.partition(b"?")[0] in calls.paths:
            self._call = calls.begin(self, head)
            self._body = self._call.body
        else:
            heads.forget()
            fields = head.fields()
            self._check_own(head, data)
            self._body = RequestBody(self._front.own, head, fields, f"address {self.address}", OWN_BYTES, "")
        if self._body.expected and not data:
            self.write(CONTINUE)
        return data if data else self._take_body(b"")

    def _check_page(self, head: Head) -> None:
        """Refuse what another site's page sends. Raises RouterError."""
        origins, fields = self._front.origins, head.fields()
        self.cors = NO_HEADERS
        if head.method == b"POST" and "origin" not in fields and "sec-fetch-site" not in fields:
            return  # as nearly all requests
        self.cors = origins.answer_headers(fields)
        refused = origins.refusal(head.method.decode("latin-1"), fields)
        if refused is not None:
            raise RouterError(403, *refused, closes=True)

    def _check_own(self, head: Head, rest: bytes) -> None:
        """Refuse a request to the router itself that has no key, or a path that is not there, before more is spent on
        it. Raises RouterError."""
        path, bodiless = head.target.partition(b"?")[0], not (head.chunked or head.length)
        try:
            if head.method != b"OPTIONS" and (path.startswith(b"/v1/") or not bodiless):
                self._front.calls.guard.check(head.fields())
            if path not in OWN_PATHS and not path.startswith(b"/v1/"):
                shown = head.target[:LONGEST_NAME].decode("latin-1")
                raise RouterError(404, "not_found", f"{head.method.decode('latin-1')} {shown}: Not Found")
        except ApiError as error:
            if bodiless:  # the request is complete
                self._head, self._busy, self._first, self._rest = None, True, False, rest
                error.closes = not head.keep_alive
            raise

    def _take_body(self, data: bytes) -> bytes:
        assert self._body is not None
        end = self._body.feed(data)
        if end < 0:
            self._deadline.set(self._body.seconds())
            return b""
        head, self._head, self._busy, self._first = self._head, None, True, False
        assert head is not None
        if self._body.small is not None:
            self._answer(head, self._body.small)
        else:
            self._task = asyncio.create_task(self._unpack(head, self._body))
        return data[end:]

    async def _unpack(self, head: Head, body: RequestBody) -> None:
        try:
            self._answer(head, await body.unpacked())
        except RouterError as error:
            self._fail(error)
        except Exception as error:
            self._crash(error)

    def _answer(self, head: Head, body: bytes) -> None:
        """Answer a complete request here, or give it to its call or to aiohttp."""
        if self._call is not None:
            self._call.ready(body)
        elif head.method == b"GET" and head.target == b"/healthz":
            self.write(HEALTHY_LAST if self.closes else HEALTHY)
            self.finished(close=self.closes)
        elif (may := self._front.origins.preflight(head.method.decode("latin-1"), head.fields())) is not None:
            self.write(no_content(may, close=self.closes))
            self.finished(close=self.closes)
        else:
            assert self._transport is not None
            self._handler = self._front.handler(self.handled)
            self._handler.begin(self._transport, head, body)

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def closes(self) -> bool:
        """Whether the connection ends with the answer to the present request."""
        return self._last or self._front.stopping

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
        self._front.call_ended()
        if close or not complete or self._front.stopping:
            self._end(sending=not complete)
            return
        self._busy = self._idle = False
        if self._ask_seconds:
            self._ask_seconds = ASK_SECONDS
            self._loop.call_soon(self._next)
            return
        self._deadline.set(min(KNOWN_SECONDS, self._front.settings.idle_seconds))
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
        """Whether an inference call is being answered."""
        return self._call is not None

    def leave(self) -> None:
        """Close the connection now; a call that is being answered is cut."""
        if self.calling:
            self.reset()
        elif self._transport is not None:
            self._transport.close()

    def stop(self) -> None:
        """Close the connection unless a request is being answered; one that still arrives is refused."""
        if self._busy or self._ending:
            return
        if self._head is not None or (self._heads is not None and self._heads.started):
            self._fail(RouterError(503, "router_stopping", "this router stops; send the request again", 1, closes=True))
        else:
            self._end()

    def _next(self) -> None:
        """Take the bytes that came while an earlier request was answered."""
        if self._transport is None or self._busy or self._ending or self.slow:
            return
        rest, self._rest = self._rest, b""
        self._hold(0)
        self._take(rest)
        if self._ask_seconds and self._busy:
            self._ask(self._transport)
        elif self._ask_seconds and not self._rest:
            self._end()

    def _hold(self, size: int) -> bool:
        """Count this many bytes of the connection; False: they are too many, and nothing is counted."""
        memory = self._front.partial
        if self._counted:
            memory.give_back(self.address, self._counted)
            self._counted = 0
        if size and memory.full(self.address, size) is not None:
            return False
        if size:
            memory.take(self.address, size)
            self._counted = size
        return True

    def _fail(self, error: RouterError) -> None:
        """Answer a request with an error, before it is handled."""
        if self._call is not None:
            self._call.fail(error)
            return
        close = error.closes or self._head is not None or self._front.stopping
        self.write(error.raw(close=close, headers=self.cors))
        self.finished(close=close)

    def _crash(self, error: Exception) -> None:
        """End this connection after an error of the router's own; others go on."""
        self._front.limits.rejected("internal_error")
        get_logger().error("connection.failed", remote=self.address, exc_info=error)
        self.abort()

    def _refuse(self, error: RouterError) -> None:
        self.write(error.raw(headers=self.cors))
        self._end()

    def _end(self, *, sending: bool = False) -> None:
        """Close, once the caller has read the answer: a reset could overtake it. ``sending``: it still sends a body."""
        self._ending, self._rest = True, b""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not sending and (self._ask_seconds or not transport.can_write_eof()):  # it has ended its side, or TLS
            transport.close()
            return
        if not sending:
            transport.write_eof()
        self._deadline.set(LINGER_SECONDS)

    def _late(self) -> None:
        """A time limit has passed: for the first head, for a body, for the next request, or for closing."""
        transport = self._transport
        if transport is None:
            return
        if self._ending:
            self._close(transport)
        elif self._busy:
            if self.slow:
                self._front.limits.rejected("slow_reader")
                self.reset()
            elif self._ask_seconds and self._call is None:
                self.abort()
            elif self._ask_seconds:
                self._ask(transport)
        elif self._head is not None and self._body is not None:
            try:
                self._deadline.set(self._body.seconds())
            except RouterError as error:
                self._fail(error)
        elif self._first:
            self._front.limits.rejected("head_timeout")
            seconds = self._front.settings.head_seconds
            text = f"the head of the request did not arrive within {seconds:g} s"
            self._refuse(RouterError(408, "request_timeout", text))
        elif not self._idle:
            self._idle = True
            if self._heads is not None:
                self._heads.forget()
            self._deadline.set(max(0.0, self._front.settings.idle_seconds - KNOWN_SECONDS))
        else:
            self._end()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close; a caller that still reads the last answer goes on."""
        before, self._unread = self._unread, transport.get_write_buffer_size()
        if not self._unread:
            transport.close()
        elif before is None or self._unread <= before - LEAST_READ_BYTES:
            self._deadline.set(self._front.settings.slow_reader_seconds)
        else:
            transport.abort()


class OwnMemory(BodyMemory):
    """Of bodies for the router itself: no setting bounds it."""

    def full(self, caller: str, more: int) -> str | None:
        """Return why ``more`` bytes do not fit; None if they do."""
        reason = super().full(caller, more)
        return f"bodies for the router itself take {self.total} of {self.most_bytes} bytes" if reason else None


class Front:
    """The router's port; ``async with`` binds it, and ``listen`` serves it."""

    def __init__(
        self,
        app: web.Application,
        calls: Calls,
        settings: RouterSettings,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.calls, self.settings, self.limits = calls, settings, limits
        self.origins = WebOrigins(settings.cors_origins)
        memory = OwnMemory(OWN_MEMORY_BYTES, OWN_MEMORY_BYTES)
        self.partial = OwnMemory(PARTIAL_BYTES, PARTIAL_BYTES // 4)
        self.own = Intake(memory, settings.body_seconds, limits.rejected)
        """Bodies of requests to the router itself."""
        self.connections: set[CallerConnection] = set()
        self.leaves = False
        """The router will stop: each answer to a request that comes now ends its connection, and says so."""
        self.url = ""
        self._tls = tls
        self._call_ended = asyncio.Event()
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        settings, loop = self.settings, asyncio.get_running_loop()
        with listening(settings.host, settings.port, "KYB"):
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            sock = socket.create_server((settings.host, settings.port), family=family)
            self._server = await loop.create_server(self._caller, sock=sock, backlog=MOST_ACCEPTED)
            sock.listen(BACKLOG)
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{port}"
        return self

    def _caller(self) -> asyncio.Protocol:
        if self._tls is None:
            return CallerConnection(self)
        return TlsCaller(
            self.limits, self._tls, self.settings.head_seconds, partial(CallerConnection, self, counted=True)
        )

    async def __aexit__(self, *_: object) -> None:
        """Take no further requests, let those under way end, for a moment, and close all connections."""
        await self._stop_listening()
        self.calls.dispatcher.stop()
        await self._runner.shutdown()
        for connection in list(self.connections):
            connection.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._calls_end()
        await self._runner.cleanup()
        for connection in list(self.connections):
            connection.leave()
        for task in list(self.calls.tasks):
            task.cancel()

    async def _stop_listening(self) -> None:
        """Close the socket. asyncio would drop connections that it has accepted in this turn of the loop."""
        for sock in self._server.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        await asyncio.sleep(0)
        self._server.close()

    async def _calls_end(self) -> None:
        while any(connection.calling for connection in self.connections):
            self._call_ended.clear()
            await self._call_ended.wait()

    @property
    def stopping(self) -> bool:
        """Whether the router stops: no request follows the one that is answered."""
        return self.calls.dispatcher.stopping

    def call_ended(self) -> None:
        """An inference call was answered, or its caller left."""
        if self.stopping:
            self._call_ended.set()

    def handler(self, done: Callable[[], None]) -> AiohttpHandler:
        """Return a handler of one request to the router itself."""
        server = self._runner.server
        assert server is not None  # between setup and cleanup
        loop = asyncio.get_running_loop()
        return AiohttpHandler(server, done=done, loop=loop, access_log=None, keepalive_timeout=0.0)
