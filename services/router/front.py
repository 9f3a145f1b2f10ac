"""The router's own port: limits of connections, time limits on request heads, and errors below the application."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from kybernate.health import HttpServer
from kybernate.logs import get_logger
from services.router.api import RouterError
from services.router.settings import RouterSettings

LINGER_SECONDS = 2.0
"""How long the rest of a request is read after its answer, so that the caller gets the answer before a reset."""
REFUSED_LINGER_SECONDS = 1.0
MOST_REFUSED = 100
"""Refused connections that get an answer at the same time; further ones are only closed."""
VERSION = "kyb.version"
"""Key of a request whose HTTP version is not served; it is then handled, and refused, as HTTP/1.1."""


class ConnectionLimits:
    """Counts open connections, in total and per address."""

    def __init__(self, most: int, most_per_address: int, rejected: Callable[[str], None]) -> None:
        self._most, self._most_per_address, self.rejected = most, most_per_address, rejected
        self._by_address: Counter[str] = Counter()
        self.open = self.refused = 0

    def enter(self, address: str) -> RouterError | None:
        """Count a new connection; return why it is refused, or None."""
        if self.open >= self._most:
            self.rejected("connections")
            return RouterError(503, "too_many_connections", f"{self.open} connections are open (KYB_CONNECTIONS)", 1)
        if self._by_address[address] >= self._most_per_address:
            self.rejected("address_connections")
            text = f"{self._by_address[address]} connections of {address} are open (KYB_ADDRESS_CONNECTIONS)"
            return RouterError(429, "too_many_connections", f"{text}; close some, or reuse them", 1)
        self.open += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Forget a connection that was counted."""
        self.open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class Connection(web.RequestHandler):
    """One connection of a caller: aiohttp's, with limits."""

    __slots__ = ("_address", "_head_seconds", "_head_timer", "_limits")

    def __init__(self, *args: Any, limits: ConnectionLimits, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._head_seconds = limits, head_seconds
        self._address: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it; then its first request must be complete in time."""
        assert isinstance(transport, asyncio.Transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        error = self._limits.enter(address)
        if error is not None:
            self._refuse(transport, error)
            return
        self._address = address
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._head_seconds, self._late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._address is None:
            self._limits.refused -= 1
            return
        self._limits.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, unless the connection was refused."""
        if self._address is not None:
            super().data_received(data)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to bytes that are no request, or to one whose handler failed; the connection ends."""
        del message  # aiohttp's, which repeats what the caller sent
        if status == 500:
            get_logger().error("request.failed", exc_info=exc)
        else:
            self._limits.rejected("invalid_http")
            get_logger().debug("request.malformed", remote=request.remote, error=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("half an answer is sent")
        if status == 500:
            response = RouterError(500, "internal_error", "the router failed at this request; see its log").response()
        elif isinstance(exc, LineTooLong):
            response = RouterError(431, "head_too_large", "a line of the request's head is too long").response()
        else:
            text = "this is not a valid HTTP/1.1 request: check its request line, header fields and lengths"
            response = RouterError(400, "invalid_http", text).response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what aiohttp could not handle as one line of this service's log."""
        get_logger().error("connection.failed", what=str(args[0]) if args else "", exc_info=kw.get("exc_info", True))

    def _refuse(self, transport: asyncio.Transport, error: RouterError) -> None:
        self._limits.refused += 1
        if self._limits.refused > MOST_REFUSED:
            transport.abort()
            return
        transport.write(error.raw())
        self._head_timer = self._loop.call_later(REFUSED_LINGER_SECONDS, transport.abort)

    def _late(self) -> None:
        transport = self.transport
        if self._request_count or transport is None:
            return
        self._limits.rejected("head_timeout")
        text = f"the head of the request did not arrive within {self._head_seconds:g} s (KYB_HEAD_SECONDS)"
        transport.write(RouterError(408, "request_timeout", text).raw())
        self.force_close()


class ApiServer(HttpServer):
    """The router's application on its port, with limits. Bodies reach handlers as they were sent."""

    def __init__(
        self,
        app: web.Application,
        settings: RouterSettings,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(app, settings.host, settings.port, tls)
        self._head_seconds, self._idle_seconds = settings.head_seconds, settings.idle_seconds
        self._limits = limits

    async def __aenter__(self) -> "ApiServer":
        self.runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            auto_decompress=False,
            keepalive_timeout=self._idle_seconds,
            lingering_time=LINGER_SECONDS,
        )
        await self.runner.setup()
        site = _Site(self.runner, self.host, self.port, backlog=1024, ssl_context=self.tls)
        site.make = self._connection
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    def _connection(self) -> Connection:
        assert self.runner is not None
        server = self.runner.server
        assert server is not None  # between setup and cleanup
        server.request_factory = self._request
        return Connection(
            server,
            limits=self._limits,
            head_seconds=self._head_seconds,
            loop=asyncio.get_running_loop(),
            **server._kwargs,
        )

    def _request(self, message: Any, *rest: Any) -> web.Request:
        """Make a request; one in another version of HTTP is marked, and answered in HTTP/1.1."""
        served = message.version in (HttpVersion10, HttpVersion11)
        if not served:
            message = message._replace(version=HttpVersion11, should_close=True)
        request = self.app._make_request(message, *rest)
        if not served:
            request[VERSION] = True
        return request


class _Site(web.TCPSite):
    make: Callable[[], asyncio.Protocol]

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_server(
            self.make, self._host, self._port, ssl=self._ssl_context, backlog=self._backlog
        )
