"""How a service reports its state: ``/healthz``, ``/readyz``, ``/metrics``.

A service is live while its event loop runs, and ready when every named condition holds. Liveness never depends on NATS.
"""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, cast

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate import __version__
from kybernate.bus.port import NodeBus
from kybernate.http_api import ApiError, Handler, errors, own_pages
from kybernate.key_guard import KeyGuard
from kybernate.lifecycle import listening
from kybernate.settings import Settings
from kybernate.tls import ServerCertificate, TlsCaller, address_of
from kybernate.web_origin import WebOrigins

MOST_CONNECTIONS = 512
"""Of one port: then the oldest without a request under way ends, and without such a one the new connection."""
MOST_PER_ADDRESS = MOST_CONNECTIONS // 4
"""Then the oldest of this address ends, one without a request under way if there is one."""
IDLE_SECONDS = 20.0
BODY_SECONDS = 10.0
"""Time for the body of a request, else 408."""
READ_SECONDS = 20.0
"""Time for a reader to take what waits for it, some 64 KiB, before more is sent; else it is cut."""
METRICS_SHARE = 0.1
"""Of a CPU core that readers of metrics take at most: the text is kept for as long as that needs, at most 1 s."""
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass
class Health:
    """Readiness conditions and metrics of one service."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    conditions: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """By name: returns None if the condition holds, else the reason."""
    notes: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """By name: a remark for the operator although the service is ready; None: none."""

    def __post_init__(self) -> None:
        """Every service has the metrics of its process and its version."""
        self._text, self._fresh_until = b"", 0.0
        ProcessCollector(registry=self.registry)
        build = Gauge("kybernate_build_info", "1, with the version", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        text = "Unix seconds of this process's clock; timestamp() of it is Prometheus' clock"
        Gauge("kybernate_time_seconds", text, registry=self.registry).set_function(time.time)

    def routes(self) -> list[web.RouteDef]:
        """The three routes, for any aiohttp application."""
        return [
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
        ]

    def server(self, settings: Settings, more: Iterable[web.RouteDef] = ()) -> "HttpServer":
        """The server of these routes, and more, at the address that the settings name."""
        app = web.Application(middlewares=[errors, own_pages(WebOrigins())])
        app.add_routes([*self.routes(), *more])
        return HttpServer(app, settings.health_host, settings.health_port)

    def follows_cluster(
        self, bus: NodeBus, knows: Callable[[], bool], keys: KeyGuard, certificate: ServerCertificate | None
    ) -> None:
        """Report on what follows the cluster. Once it ``knows`` the seats it is ready without NATS: all routers lose it
        together, and a Service needs a ready one."""
        away = "not connected to NATS; see KYB_NATS_URL"
        self.conditions["bus"] = lambda: None if bus.connected or knows() else away
        self.conditions["roster"] = lambda: None if knows() else "the roster was not read yet"
        self.notes["bus"] = lambda: None if bus.connected else away
        self.notes["keys"] = lambda: keys.refused
        self.notes["certificate"] = lambda: certificate.refused if certificate is not None else None
        self.registry.register(BusMetrics(cluster=bus))

    def unmet(self) -> dict[str, str]:
        """Why the service is not ready; empty when it is."""
        reasons = {name: check() for name, check in self.conditions.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def remarks(self) -> dict[str, str]:
        """What an operator should know although the service is ready."""
        return {name: text for name, note in self.notes.items() if (text := note()) is not None}

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        unmet = self.unmet()
        body = {"status": "not ready" if unmet else "ok", "unmet": unmet}
        notes = self.remarks()
        return web.json_response(body | ({"notes": notes} if notes else {}), status=503 if unmet else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        now = time.monotonic()
        if now >= self._fresh_until:
            self._text = generate_latest(self.registry)
            took = time.monotonic() - now
            self._fresh_until = now + min(1.0, took / METRICS_SHARE)
        return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_LATEST})


@dataclass
class HttpServer:
    """One aiohttp application on one address; ``async with`` serves it. Port 0 takes a free one.

    Raises CannotListenError.
    """

    app: web.Application
    host: str
    port: int
    prefix: str = "KYB_HEALTH"
    """Of the settings that hold the address; empty: the options ``--host`` and ``--port`` do."""
    tls: ssl.SSLContext | None = None
    """If set, the server speaks HTTPS only."""
    idle_seconds: float = IDLE_SECONDS
    """Time for a request to arrive on a connection, and for the next one; then it is closed."""
    most_per_address: int = MOST_PER_ADDRESS

    async def __aenter__(self) -> "HttpServer":
        if not self.app.frozen:
            self.app.on_response_prepare.append(_without_name)
            self.app.middlewares.append(_complete)
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=self.idle_seconds,
            lingering_time=1.0,
        )
        await self._runner.setup()
        serving = self._runner.server
        assert serving is not None  # set up

        limits, tls = _Connections(self.most_per_address), self.tls

        def accepted() -> asyncio.Protocol:
            if tls is None:
                return _Connection(limits, serving())
            return TlsCaller(limits, tls, self.idle_seconds, lambda: _Connection(limits, serving(), counted=True))

        with listening(self.host, self.port, self.prefix):
            self._server = await asyncio.get_running_loop().create_server(
                accepted, self.host, self.port, backlog=MOST_CONNECTIONS
            )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Base URL of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class _Connections:
    """Of one port, by address. At a limit the oldest makes room: none is kept out by connections that do nothing."""

    def __init__(self, most_per_address: int) -> None:
        self._most_per_address = most_per_address
        self._by_address: Counter[str] = Counter()
        self.open: dict[_Connection, None] = {}
        """The oldest first; over TLS, those whose handshake is complete."""
        self.shaking: dict[TlsCaller, None] = {}

    def enter(self, address: str) -> str | None:
        """Count a new connection; return why it is refused, or None."""
        full = self._by_address[address] >= self._most_per_address and not self._end_oldest(address)
        if full or (self._by_address.total() >= MOST_CONNECTIONS and not self._end_oldest(None)):
            return "too many connections are open"
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Forget one."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def rejected(self, _: str) -> None:
        """Nothing counts it."""

    def _end_oldest(self, address: str | None) -> bool:
        """End the oldest connection without a request under way; without one the oldest of ``address``."""
        mine = [one for one in self.open if address in (None, one.address)]
        oldest = next((one for one in mine if not one.busy), mine[0] if mine and address is not None else None)
        if oldest is not None:
            oldest.abort()
        return oldest is not None


class _Connection(asyncio.Protocol):
    """A connection of aiohttp's, with a place among the others of its port and a time for its reader."""

    of: ClassVar[dict[asyncio.BaseProtocol, "_Connection"]] = {}
    """By aiohttp's protocol, which a request names."""

    def __init__(self, limits: _Connections, handler: web.RequestHandler, *, counted: bool = False) -> None:
        self._limits, self._handler, self._counted = limits, handler, counted
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self.address, self.busy = "", False
        """``busy``: a request has arrived completely and is not answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, or close it."""
        self._transport, self.address = cast(asyncio.Transport, transport), address_of(transport)
        if not self._counted and self._limits.enter(self.address) is not None:
            self._counted = True
            self._transport.abort()
            return
        self._limits.open[self] = None
        self.of[self._handler] = self
        self._handler.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._stop()
        self._limits.open.pop(self, None)
        if self.of.pop(self._handler, None) is not None:
            self._handler.connection_lost(exc)
        if not self._counted:
            self._limits.leave(self.address)

    def data_received(self, data: bytes) -> None:
        """As aiohttp takes it."""
        self._handler.data_received(data)

    def eof_received(self) -> None:
        """As aiohttp takes it."""
        self._handler.eof_received()

    def pause_writing(self) -> None:
        """Let the reader take what waits for it, for a limited time."""
        self._handler.pause_writing()
        self._late = asyncio.get_running_loop().call_later(READ_SECONDS, self.abort)

    def resume_writing(self) -> None:
        """It has."""
        self._stop()
        self._handler.resume_writing()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def abort(self) -> None:
        """Close it at once."""
        self._limits.open.pop(self, None)
        if self._transport is not None:
            self._transport.abort()


@web.middleware
async def _complete(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the body before the handler, in time. Only then the request is under way."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await request.read()
    except TimeoutError:
        text = f"the body of the request did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, "request_timeout", text, closes=True) from None
    connection = _Connection.of.get(request.protocol)
    if connection is None:
        return await handler(request)
    connection.busy = True
    try:
        return await handler(request)
    finally:
        connection.busy = False


async def _without_name(_: web.Request, response: web.StreamResponse) -> None:
    """Do not say which software answers."""
    response.headers.popall("Server", None)


class BusMetrics(Collector):
    """``kybernate_bus_troubles_total`` by bus and kind, read at scrape time."""

    def __init__(self, **buses: NodeBus) -> None:
        self._buses = buses

    def collect(self) -> Iterable[Metric]:
        """The counts of now."""
        counter = CounterMetricFamily(
            "kybernate_bus_troubles",
            "Messages dropped by a slow reader, requests ignored as forged, reads of a bucket that were incomplete, "
            "peers on a node's socket that were disconnected because they did not read",
            labels=["bus", "kind"],
        )
        for name, bus in self._buses.items():
            for kind, count in bus.troubles.items():
                counter.add_metric([name, kind], count)
        yield counter
