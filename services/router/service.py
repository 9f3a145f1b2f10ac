"""One router, put together: its parts, its jobs, and which route goes where. Only ``/v1/*`` is ever forwarded."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.health import BusMetrics, Health, HttpServer
from kybernate.http_api import LONGEST_NAME, errors, own_pages
from kybernate.messages import Presence, TrafficSignal
from kybernate.web_origin import WebOrigins
from services.router import openapi
from services.router.api import RouterError, aliases_of, engine_paths
from services.router.auth import open_auth
from services.router.calls import Calls
from services.router.connections import ConnectionLimits, most_connections
from services.router.core.admission import Limits
from services.router.core.body import BodyMemory
from services.router.core.managers import RouterIdentity
from services.router.core.reports import Loads
from services.router.core.traffic import Traffic
from services.router.dispatch import Dispatcher
from services.router.engines import EnginePools
from services.router.front import Front
from services.router.gateways import GatewayApi, for_auth_request
from services.router.history import History
from services.router.intake import Intake
from services.router.level_publisher import LevelPublisher
from services.router.level_watch import LevelWatch
from services.router.limits import TenantLimits
from services.router.metrics import Metrics
from services.router.operator_api import VERBS, Event, EventLog, OperatorApi
from services.router.outside_load import OutsideLoad, queries_of
from services.router.page import CHAT_BYTES, Page
from services.router.request_log import RequestLog
from services.router.roster_sync import GpuInventory, RosterSync
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from kybernate.otel import Tracer

LEAVE_SECONDS = 0.5
"""Wall: how long a router that stops waits for the end of calls that it has cancelled."""
STORED = "/v1/{api:files|uploads|batches|assistants|threads|vector_stores|fine_tuning|responses/.+}{rest:(/.*)?}"
"""Paths of OpenAI's API that store something."""


class RunningRouter:
    """The parts of one router; ``jobs`` connect it to the cluster. Raises ConfigError."""

    def __init__(self, settings: RouterSettings, bus: Bus, http: aiohttp.ClientSession) -> None:
        self._settings, self._bus, self.url = settings, bus, ""
        self.guard, self.certificate = open_auth(settings)
        self._clock = clock = Clock(settings.speed)
        self._identity = RouterIdentity(settings.instance, uuid.uuid4().hex[:12])
        limits = Limits(
            hold_seconds=clock.to_wall(settings.hold_seconds),
            queue_limit=settings.queue_limit,
            queue_seconds=settings.queue_seconds,
            permit_seconds=settings.permit_seconds,
            speed=settings.speed,
        )
        self.traffic = traffic = Traffic(limits, self._identity)
        self.pools = EnginePools()
        self.dispatcher = Dispatcher(traffic, bus, http, self.pools)
        self.levels = LevelPublisher(bus, traffic, clock, settings.instance, self._identity.incarnation)
        self.dispatcher.on_level = self.levels.touch
        self.inventory, self.events, self.loads = GpuInventory(bus), EventLog(bus), Loads(settings.instance)
        self.level_watch = watch = LevelWatch(bus, self.loads, exact=settings.engine_metrics_seconds > 0)
        self.levels.on_signal = lambda signal: self.loads.add(signal, time.monotonic())
        self.health = health = self._health()
        memory = BodyMemory(settings.held_bytes, settings.caller_bytes)
        self.connections = ConnectionLimits(
            most_connections(settings.connections), settings.address_connections, self._rejected
        )
        self._metrics = Metrics(
            health.registry,
            held=lambda: [(model.name, len(model.held)) for model in traffic.table.models.values()],
            in_flight=lambda: sum(len(upstream.in_flight) for upstream in traffic.table.upstreams.values()),
            connected=lambda: bus.connected,
            body_bytes=lambda: memory.total,
            connections=lambda: self.connections.open,
            records_dropped=lambda: self.requests.dropped,
            # without an operations port anybody who reaches the API reads metrics, also without a key
            used=self.guard.tenants.used.items if settings.health_port or not self.guard.required else lambda: (),
            models=lambda: {(seat.model, seat.record.tier) for seat in traffic.table.upstreams.values() if seat.model},
        )
        self.sync = RosterSync(bus, self.dispatcher, self._presence)
        self.sync.on_event = self._on_event
        self.sync.on_loss = self._metrics.disconnects.inc
        intake = Intake(memory, settings.body_seconds, self._rejected)
        paths = engine_paths(settings.api_families, settings.engine_paths)
        self.requests = RequestLog(bus, settings.instance, access_log=settings.access_log)
        log = self.requests
        tenants = TenantLimits(self.guard.tenants, traffic, self._rejected, aliases_of(settings.aliases))
        self.calls = Calls(
            settings, clock, self.dispatcher, self.pools, self._metrics, intake, log, self.guard, paths, tenants
        )
        gateways = GatewayApi(settings, clock, bus, self.dispatcher, self._rejected, tenants, self._relay)
        operator = OperatorApi(bus, traffic, watch, self.inventory, http, tenants)
        readings = self._metrics.readings
        self.outside = OutsideLoad(settings, bus, http, self.dispatcher, self.loads, tenants.aliases, readings)
        self.page = Page(bus, traffic, watch, self.inventory, http, self.guard, clock)
        self.page.troubles = lambda: health.unmet() | health.remarks()
        self.dispatcher.on_forward = self.page.forwarded
        self.requests.on_served = self.page.plans.served
        self.app = self._application(gateways, operator, tenants)
        checks = [errors, own_pages(WebOrigins(settings.cors_origins))]
        self.operations = web.Application(middlewares=checks, client_max_size=CHAT_BYTES)
        """The application of the operations port."""
        self.operations.add_routes([*health.routes(), *self.page.routes(operator)])
        self.operations.on_shutdown.append(self._stop_page)
        tls = self.certificate.context if self.certificate is not None else None
        self.front = Front(self.app, self.calls, settings, self.connections, tls)
        self.ports = AsyncExitStack()
        self.server: HttpServer | None = None
        """Of the operations port, if there is one."""

    def _slo_seconds(self) -> dict[str, float]:
        upstreams = self.traffic.table.upstreams.values()
        return {upstream.model: self._clock.to_wall(upstream.record.slo_seconds) for upstream in upstreams}

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the router ends, by name."""
        return {
            "listen": self.sync.listen(),
            "watch": self.sync.watch(),
            "read": self.sync.read(),
            "presence": self.sync.presence(),
            "levels": self.levels.run(),
            "load": self.levels.report(),
            "acks": self.dispatcher.run(),
            "inventory": self.inventory.watch(),
            "page": self.page.run(),
            "tokens": self.page.read_tokens(),
            "plans": self.page.plans.run(),
            "loads": self.level_watch.run(),
            "forget": self.level_watch.forget(),
            "requests": self.requests.run(),
            **self.outside.jobs(),
            "keys": self.guard.watch(),
            **({"certificate": self.certificate.watch()} if self.certificate is not None else {}),
        }

    def _relay(self, signal: TrafficSignal) -> None:
        """Take a level of a gateway."""
        self.loads.add(signal, time.monotonic())
        self.levels.relay(signal)

    def _rejected(self, reason: str) -> None:
        self._metrics.rejections.labels(reason).inc()

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
            instance=self._identity.instance,
            incarnation=self._identity.incarnation,
            node=self._settings.node,
            url=self._settings.advertise_url or self.url,
        )

    def _health(self) -> Health:
        health, bus, trust = Health(), self._bus, self.traffic.trust
        # Once it knows seats it is ready without NATS: all routers lose NATS together, and a Service needs a ready one.
        away = "not connected to NATS; see KYB_NATS_URL"
        health.conditions["bus"] = lambda: None if bus.connected or trust.ever_synced else away
        health.notes["bus"] = lambda: None if bus.connected else away
        health.conditions["roster"] = lambda: None if trust.ever_synced else "the roster was not read yet"
        health.registry.register(BusMetrics(cluster=bus))
        return health

    def _application(self, gateways: GatewayApi, operator: OperatorApi, tenants: TenantLimits) -> web.Application:
        """Return the application. Health needs no key; metrics are here only without a port of their own."""
        app, needs = web.Application(middlewares=[errors]), self.guard.needs
        history = History(self._bus, self._slo_seconds)
        app.on_shutdown.append(self._stop)
        app.on_response_prepare.append(self._finish)
        health = self.health.routes()
        if self._settings.health_port:
            health = [route for route in health if route.path != "/metrics"]
        app.add_routes(
            [
                *health,
                web.get("/openapi.json", self._openapi),
                web.get("/v1/models", needs("infer", "view")(operator.models)),
                web.get("/v1/models/{model:.+}", needs("infer", "view")(operator.model)),
                web.get("/v1/hold", for_auth_request(needs("infer")(gateways.hold))),
                web.post("/v1/wake", needs("infer")(gateways.wake)),
                web.post("/v1/signals", needs("signals")(gateways.signals)),
                web.get("/v1/events", needs("view")(self.events.handle)),
                web.get("/v1/history", needs("view")(history.handle)),
                web.get("/v1/requests/{request:.+}", needs("view")(history.request)),
                web.get("/v1/slo", needs("view")(history.missed)),
                web.get("/v1/usage", needs("view")(tenants.usage)),
                web.get("/v1/seats", needs("view")(operator.seats)),
                web.get("/v1/why", needs("view")(operator.why)),
                web.post("/v1/seats/{seat:.+}/{verb:" + "|".join(VERBS) + "}", needs("admin")(operator.command)),
                web.post("/v1/seats/{seat:.+}/migrate", needs("admin")(operator.migrate)),
                web.post(
                    "/v1/groups/{group:.+}/{verb:drain|resume}",
                    needs("admin")(operator.group),
                ),
                web.post(
                    "/v1/nodes/{node:.+}/{verb:drain|resume}",
                    needs("admin")(operator.node),
                ),
                *[web.route(method, STORED, needs("infer")(_not_stored)) for method in ("GET", "POST", "DELETE")],
                web.post("/v1/{path:.+}", needs("infer")(_not_forwarded)),
            ]
        )
        return app

    async def _openapi(self, _: web.Request) -> web.Response:
        """Return the OpenAPI document, which needs no key."""
        settings = self._settings
        paths = engine_paths(settings.api_families, settings.engine_paths)
        return web.json_response(openapi.document(path.decode() for path in paths))

    def _on_event(self, event: Event) -> None:
        self.events.add(event)
        self.page.add(event)

    async def _finish(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell callers to leave while the router stops, and not which software answers."""
        response.headers.popall("Server", None)
        response.headers.update(self.front.origins.answer_headers(request.headers))
        if self.dispatcher.closing:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _stop(self, _: web.Application) -> None:
        self.dispatcher.stop()
        self.events.stop()

    async def _stop_page(self, _: web.Application) -> None:
        self.page.stop()


def check(settings: RouterSettings) -> None:
    """Read what a router reads when it starts. Raises ConfigError."""
    open_auth(settings)
    engine_paths(settings.api_families, settings.engine_paths)
    aliases_of(settings.aliases)
    WebOrigins(settings.cors_origins)
    queries_of(settings)


@asynccontextmanager
async def open_router(
    settings: RouterSettings,
    bus: Bus,
    tracer: "Tracer | None" = None,
) -> AsyncIterator[RunningRouter]:
    """Listen on the settings' addresses; close everything at the end. Raises ConfigError."""
    async with aiohttp.ClientSession() as http:
        router = RunningRouter(settings, bus, http)
        if tracer is not None:
            router.calls.tracer = tracer
            router.health.registry.register(tracer)
        try:
            async with router.ports:
                router.url = (await router.ports.enter_async_context(router.front)).url
                router.page.api_url = router.url
                if settings.health_port:
                    address = settings.health_host, settings.health_port
                    router.server = HttpServer(router.operations, *address)
                    await router.ports.enter_async_context(router.server)
                yield router
        finally:
            await router.dispatcher.close()
            await router.pools.close()
            await router.leave()


async def _not_forwarded(request: web.Request) -> web.StreamResponse:
    """Refuse a path that is no inference call: engines have others that are not for callers."""
    path = request.rel_url.raw_path[:LONGEST_NAME]
    text = f"POST {path} is not forwarded to engines; allow it with KYB_ENGINE_PATHS if it is safe"
    raise RouterError(404, "not_found", text)


async def _not_stored(request: web.Request) -> web.StreamResponse:
    """Refuse what would have to outlive a request: neither a router nor a parked engine keeps it."""
    text = f"{request.path[:LONGEST_NAME]}: files, batches, threads and responses are not stored here"
    raise RouterError(404, "not_supported", f"{text}; send all input with each request")
