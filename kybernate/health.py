"""How a service reports its state: ``/healthz``, ``/readyz``, ``/metrics``.

A service is live while its event loop runs, and ready when every named condition holds. Liveness never depends on NATS.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

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
from kybernate.http_api import errors, own_pages
from kybernate.lifecycle import listening
from kybernate.settings import Settings
from kybernate.tls import TlsCaller
from kybernate.web_origin import WebOrigins

MOST_CONNECTIONS = 512
"""Of one server; further ones are closed."""
IDLE_SECONDS = 20.0
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
    runner: web.AppRunner | None = None

    async def __aenter__(self) -> "HttpServer":
        if not self.app.frozen:
            self.app.on_response_prepare.append(_without_name)
        self.runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=self.idle_seconds,
        )
        await self.runner.setup()
        serving = self.runner.server
        assert serving is not None  # set up

        limits, tls = _Limits(), self.tls

        def accepted() -> asyncio.Protocol:
            if tls is not None:
                return TlsCaller(limits, tls, self.idle_seconds, serving)
            return serving() if len(serving.connections) < MOST_CONNECTIONS else _Refused()

        with listening(self.host, self.port, self.prefix):
            self._server = await asyncio.get_running_loop().create_server(
                accepted, self.host, self.port, backlog=MOST_CONNECTIONS
            )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.runner is not None:
            self._server.close()
            await self.runner.cleanup()

    @property
    def url(self) -> str:
        """Base URL of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class _Limits:
    """Of a port that speaks TLS."""

    def __init__(self) -> None:
        self._open, self.shaking = 0, dict[TlsCaller, None]()

    def enter(self, _: str) -> str | None:
        """Count a new connection; return why it is refused, or None."""
        if self._open >= MOST_CONNECTIONS:
            return "too many connections are open"
        self._open += 1
        return None

    def leave(self, _: str) -> None:
        """Forget one."""
        self._open -= 1

    def rejected(self, _: str) -> None:
        """Nothing counts it."""


class _Refused(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        cast(asyncio.Transport, transport).abort()


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
