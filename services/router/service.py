"""One router, put together: its parts, its jobs, and which route goes where. Only ``/v1/*`` is ever forwarded."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.health import Health
from kybernate.http.intake import BodyMemory, Intake
from kybernate.http.server import HttpServer
from kybernate.http_api import document, errors
from kybernate.logs import get_logger
from kybernate.messages import Presence
from kybernate.web_origin import WebOrigins
from services.router.api import aliases_of, engine_paths
from services.router.auth import open_auth
from services.router.calls import Calls
from services.router.connections import ConnectionLimits
from services.router.core.traffic import Traffic
from services.router.dispatch import Dispatcher
from services.router.engines import EnginePools
from services.router.front import Front
from services.router.gateways import GatewayApi, for_auth_request
from services.router.level_publisher import LevelPublisher
from services.router.limits import TenantLimits
from services.router.metrics import Metrics
from services.router.models import AT_THE_CONSOLE, ModelsApi, at_the_console, no_websocket, not_forwarded, not_stored
from services.router.request_log import RequestLog
from services.router.roster_sync import RosterSync
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from services.router.request_spans import Tracer

LEAVE_SECONDS = 0.5
"""Wall: how long a router that stops waits for the end of calls that it has cancelled."""
STORED = "/v1/{api:files|uploads|batches|assistants|threads|vector_stores|fine_tuning|responses/.+}{rest:(/.*)?}"
"""Paths of OpenAI's API that store something."""
DOCUMENT = document(Path(__file__).parent / "openapi.json")


class RunningRouter:
    """The parts of one router; ``jobs`` connect it to the cluster. Raises ConfigError."""

    def __init__(self, settings: RouterSettings, bus: Bus, http: aiohttp.ClientSession) -> None:
        self._settings, self._bus, self.url = settings, bus, ""
        self.guard, self.certificate = open_auth(settings)
        clock = Clock(settings.speed)
        self._incarnation = uuid.uuid4().hex[:12]
        self.traffic = traffic = Traffic(settings, self._incarnation)
        self.pools = EnginePools()
        self.dispatcher = Dispatcher(traffic, bus, http, self.pools)
        self.levels = LevelPublisher(bus, traffic, clock, settings.instance, self._incarnation)
        self.dispatcher.on_level = self.levels.touch
        self.health = health = Health()
        health.follows_cluster(bus, lambda: traffic.trust.ever_synced, self.guard, self.certificate)
        memory = BodyMemory(settings.held_bytes, settings.held_bytes // 2, "KYB_HELD_BYTES")
        self.connections = ConnectionLimits(settings.connections, settings.address_connections, self._rejected)
        health.notes["files"] = lambda: self.connections.few
        self.requests = log = RequestLog(bus, settings.instance, access_log=settings.access_log)
        # without an operations port anybody who reaches the API reads metrics, also without a key
        shown = self.guard.tenants if settings.health_port or not self.guard.required else None
        parts = bus, traffic.table, memory, self.connections, log, shown
        self._metrics = Metrics(health.registry, clock, *parts)
        self.sync = RosterSync(bus, self.dispatcher, self._presence)
        self.sync.on_loss = self._metrics.disconnects.inc
        intake = Intake(memory, settings.body_seconds, self._rejected)
        paths = engine_paths(settings.engine_paths)
        tenants = TenantLimits(self.guard.tenants, traffic, self._rejected, aliases_of(settings.aliases))
        self.calls = Calls(
            settings, clock, self.dispatcher, self.pools, self._metrics, intake, log, self.guard, paths, tenants
        )
        gateways = GatewayApi(settings, clock, bus, self.dispatcher, tenants)
        self.app = self._application(gateways, tenants)
        tls = self.certificate.context if self.certificate is not None else None
        self.front = Front(self.app, self.calls, settings, self.connections, tls)
        self.server: HttpServer | None = None
        """Of the operations port, if there is one."""

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the router ends, by name."""
        return {
            "listen": self.sync.listen(),
            "watch": self.sync.watch(),
            "read": self.sync.read(),
            "presence": self.sync.presence(),
            "levels": self.levels.run(),
            "acks": self.dispatcher.run(),
            "requests": self.requests.run(),
            "keys": self.guard.watch(),
            **({"certificate": self.certificate.watch()} if self.certificate is not None else {}),
        }

    def _rejected(self, reason: str) -> None:
        self._metrics.rejections.labels(reason).inc()

    def announce(self) -> None:
        """The router will stop: callers with kept connections go to another one from now on."""
        self.front.leaves = True
        get_logger().info("router.leaves")

    async def leave(self) -> None:
        """Announce that this router forwards nothing any more, once it is closed: no drain then waits until its
        presence expires. Cancelled calls end within moments. Gateways may still use its permits for as long as those
        are valid; a call that does not end leaves it to the expiry."""
        until = time.monotonic() + LEAVE_SECONDS
        while (kinds := self._kinds_in_flight()) - {"permit"}:
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.01)
        if kinds:
            await asyncio.sleep(self._settings.permit_seconds)
        with contextlib.suppress(BusError):
            await self._bus.publish(self._presence().model_copy(update={"leaving": True}))

    def _kinds_in_flight(self) -> set[str]:
        upstreams = self.traffic.table.upstreams.values()
        return {call.kind for upstream in upstreams for call in upstream.in_flight.values()}

    def _presence(self) -> Presence:
        return Presence(
            cause="presence",
            component="router",
            instance=self._settings.instance,
            incarnation=self._incarnation,
            node=self._settings.node,
            url=self._settings.advertise_url or self.url,
            unmet=self.health.unmet(),
            notes=self.health.remarks(),
            faults=self.requests.faults.report(time.time(), self.calls.under_way()),
        )

    def _application(self, gateways: GatewayApi, tenants: TenantLimits) -> web.Application:
        """Return the application. Health needs no key; metrics are here only without a port of their own."""
        app, needs = web.Application(middlewares=[errors]), self.guard.needs
        models = ModelsApi(self.traffic, tenants)
        health = self.health.routes()
        if self._settings.health_port:
            health = [route for route in health if route.path != "/metrics"]
        app.add_routes(
            [
                *health,
                DOCUMENT,
                web.get("/v1/models", needs("infer", "view")(models.models)),
                web.get("/v1/models/{model:.+}", needs("infer", "view")(models.model)),
                web.get("/v1/hold", for_auth_request(needs("gateway")(gateways.hold))),
                web.post("/v1/wake", needs("infer")(gateways.wake)),
                web.post("/v1/signals", needs("signals")(gateways.signals)),
                *[web.route(method, AT_THE_CONSOLE, at_the_console) for method in ("GET", "POST")],
                *[web.route(method, STORED, needs("infer")(not_stored)) for method in ("GET", "POST", "DELETE")],
                web.get("/v1/realtime", needs("infer")(no_websocket)),
                web.post("/v1/{path:.+}", needs("infer")(not_forwarded)),
            ]
        )
        return app


def check(settings: RouterSettings) -> None:
    """Read what a router reads when it starts. Raises ConfigError."""
    open_auth(settings)
    engine_paths(settings.engine_paths)
    aliases_of(settings.aliases)
    WebOrigins(settings.cors_origins)


@asynccontextmanager
async def open_router(
    settings: RouterSettings, bus: Bus, tracer: "Tracer | None" = None
) -> AsyncIterator[RunningRouter]:
    """Listen on the settings' addresses; close everything at the end. Raises ConfigError."""
    async with aiohttp.ClientSession() as http:
        router = RunningRouter(settings, bus, http)
        router.calls.tracer = tracer
        try:
            async with AsyncExitStack() as ports:
                router.url = (await ports.enter_async_context(router.front)).url
                if settings.health_port:
                    router.server = await ports.enter_async_context(router.health.server(settings))
                yield router
        finally:
            await router.dispatcher.close()
            await router.pools.close()
            await router.leave()
