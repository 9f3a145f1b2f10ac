"""How a service reports its state: ``/healthz``, ``/readyz``, ``/metrics``.

A service is live while its event loop runs, and ready when every named condition holds. Liveness never depends on NATS.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
from kybernate.http.server import HttpServer
from kybernate.http_api import errors
from kybernate.key_guard import KeyGuard
from kybernate.settings import Settings
from kybernate.tls import ServerCertificate

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

    def server(self, settings: Settings, more: Iterable[web.RouteDef] = ()) -> HttpServer:
        """The server of these routes, and more, at the address that the settings name."""
        app = web.Application(middlewares=[errors])
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
