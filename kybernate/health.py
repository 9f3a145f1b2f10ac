"""``/healthz``, ``/readyz`` and ``/metrics`` of a service, and whatever else it wants to show on that port.

Live as long as the event loop turns; ready when every named condition holds. Liveness never depends on NATS.
"""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Health:
    """Readiness conditions and metrics of one service."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    conditions: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """By name: returns None when it holds, else the reason why not."""
    notes: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """By name: what a person should know although the service is ready; None: nothing."""

    def routes(self) -> list[web.RouteDef]:
        """The three routes, for any aiohttp application."""
        return [
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
        ]

    def unmet(self) -> dict[str, str]:
        """Why the service is not ready; empty when it is."""
        reasons = {name: check() for name, check in self.conditions.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        unmet = self.unmet()
        said = {"status": "not ready" if unmet else "ok", "unmet": unmet}
        notes = {name: text for name, note in self.notes.items() if (text := note()) is not None}
        return web.json_response(said | ({"notes": notes} if notes else {}), status=503 if unmet else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


@dataclass
class HttpServer:
    """One aiohttp application on one address; ``async with`` serves it. Port 0 takes a free one."""

    app: web.Application
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    """With it, only HTTPS is spoken."""
    runner: web.AppRunner | None = None

    async def __aenter__(self) -> "HttpServer":
        self.runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, self.host, self.port, backlog=1024, ssl_context=self.tls)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"
