"""The port of a service: what it serves, the limits of its connections, and its end."""

import asyncio
import contextlib
import ssl
from functools import partial
from typing import Self

from aiohttp import web

from kybernate.http.connection import CallerConnection, Port, Times
from kybernate.http.intake import BodyMemory, Intake
from kybernate.key_guard import KeyGuard
from kybernate.lifecycle import listening
from kybernate.tls import Accepted, AcceptLimits, TlsCaller
from kybernate.web_origin import WebOrigins

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
MOST_ACCEPTED = 64
"""In one turn of the loop, before they are counted."""
MOST_CONNECTIONS = 256
"""Of a port without limits of its own: two of a process and what else it opens are less than 1,024 files."""
PARTIAL_BYTES = 16 * 2**20
"""All heads that are not complete, and all bytes after requests that are not answered; a quarter for one address."""
MOST_BYTES = 512 * 1024
"""Largest body of a request that aiohttp answers."""
MEMORY_BYTES = 64 * MOST_BYTES
"""All bodies and long heads of such requests that are in memory. At the limit incomplete ones of the address that holds
most make room."""
STOP_SECONDS = 1.0
"""How long requests may go on once the port closes."""


class Shares(AcceptLimits):
    """Connections of a port. At the limit the address with the most of them loses one: its oldest without a request
    under way, else its oldest. So none is kept out by connections of others."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Accepted, str] = {}
        """The oldest first."""

    def enter(self, address: str, one: Accepted, /) -> None:
        """Count a new connection, and make room for it."""
        if len(self._open) >= MOST_CONNECTIONS:
            most = max(self._by_address.values())
            theirs = [other for other, its in self._open.items() if self._by_address[its] == most]
            last = next((other for other in theirs if not other.busy), theirs[0])
            self.leave(self._open[last], last)
            last.abort()
        self._open[one] = address
        super().enter(address, one)

    def leave(self, address: str, one: Accepted, /) -> None:
        """Forget one, which may have made room already."""
        if self._open.pop(one, None) is not None:
            super().leave(address, one)


class HttpServer(Port):
    """One port that serves an aiohttp application; ``async with`` binds it. Port 0 takes a free one.

    ``prefix``: of the settings that hold the address; empty: the options ``--host`` and ``--port`` do. With ``tls`` it
    speaks HTTPS only. Raises CannotListenError.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        prefix: str = "KYB_HEALTH",
        *,
        tls: ssl.SSLContext | None = None,
        times: Times | None = None,
        limits: AcceptLimits | None = None,
        origins: WebOrigins | None = None,
        most_bytes: int = MOST_BYTES,
        guard: KeyGuard | None = None,
    ) -> None:
        self.app, self.host, self.port, self._prefix, self._tls = app, host, port, prefix, tls
        self.times, self.most_bytes, self._guard = times or Times(), most_bytes, guard
        self.limits = limits or Shares()
        self.origins = origins or WebOrigins()
        self.partial = BodyMemory(PARTIAL_BYTES, PARTIAL_BYTES // 4)
        self.bodies = Intake(BodyMemory(MEMORY_BYTES, MEMORY_BYTES), self.times.body_seconds, self.limits.rejected)
        self.bodies.memory.make_room = self._make_room
        self.connections: set[CallerConnection] = set()
        self.call_ended = asyncio.Event()
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS)

    async def __aenter__(self) -> Self:
        if not self.app.frozen:
            self.app.on_response_prepare.append(self._finish)
        await self._runner.setup()
        with listening(self.host, self.port, self._prefix):
            self._server = await asyncio.get_running_loop().create_server(
                self._accepted, self.host or None, self.port, backlog=MOST_ACCEPTED
            )
            for sock in self._server.sockets:
                with sock.dup() as same:
                    same.listen(BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def _accepted(self) -> asyncio.Protocol:
        if self._tls is None:
            return CallerConnection(self)
        caller = partial(CallerConnection, self, counted=True)
        return TlsCaller(self.limits, self._tls, self.times.head_seconds, caller)

    async def __aexit__(self, *_: object) -> None:
        """Take no further requests, let those under way end, for a moment, and close all connections."""
        await self._stop_listening()
        self.stop()
        await self._runner.shutdown()
        for connection in list(self.connections):
            connection.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while any(connection.calling for connection in self.connections):
                    self.call_ended.clear()
                    await self.call_ended.wait()
        await self._runner.cleanup()
        for connection in list(self.connections):
            connection.leave()

    async def _stop_listening(self) -> None:
        """Close the socket. asyncio would drop connections that it has accepted in this turn of the loop."""
        for sock in self._server.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        await asyncio.sleep(0)
        self._server.close()

    def _make_room(self, address: str, more: int) -> None:
        """End incomplete bodies of addresses that hold more than this one would, from the one that holds most."""
        memory = self.bodies.memory
        held = memory.by_caller
        for one in sorted((one for one in self.connections if one.arriving), key=lambda one: -held[one.address]):
            if memory.total + more > memory.most_bytes and held[one.address] > held[address] + more:
                one.make_room()

    @property
    def url(self) -> str:
        """Base URL of the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def stop(self) -> None:
        """Begin to stop."""
        self.stopping = True

    async def _finish(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell callers to leave while the port closes, and not which software answers."""
        response.headers.popall("Server", None)
        response.headers.update(self.origins.answer_headers(request.headers))
        if self.stopping or self.leaves:
            response.headers["Connection"] = "close"
            response.force_close()
