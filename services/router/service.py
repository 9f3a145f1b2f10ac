"""One router, put together: its parts, its jobs, and which route goes where. Only ``/v1/*`` is ever forwarded."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus
from kybernate.clock import Clock
from kybernate.health import BusMetrics, Health, HttpServer
from kybernate.logs import get_logger
from kybernate.messages import Presence, SeatActivated
from kybernate.seat import COMING
from kybernate.tls import ServerCertificate
from services.router.api import RouterError
from services.router.auth import ApiKeyGuard, open_auth
from services.router.calls import Calls
from services.router.core.admission import Limits
from services.router.core.managers import RouterIdentity
from services.router.core.reports import Loads
from services.router.core.traffic import Traffic
from services.router.dispatch import Dispatcher
from services.router.gateways import GatewayApi
from services.router.level_publisher import LevelPublisher
from services.router.metrics import Metrics
from services.router.operator_api import VERBS, Event, EventLog, OperatorApi
from services.router.proxy import ConnectionPools
from services.router.roster_sync import GpuInventory, RosterSync
from services.router.settings import RouterSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class RunningRouter:
    """A router that listens; ``jobs`` connect it to the cluster."""

    url: str
    traffic: Traffic
    dispatcher: Dispatcher
    pools: ConnectionPools
    events: EventLog
    sync: RosterSync
    levels: LevelPublisher
    inventory: GpuInventory
    guard: ApiKeyGuard
    certificate: ServerCertificate | None

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the router ends, by name."""
        return {
            "listen": self.sync.listen(),
            "watch": self.sync.watch(),
            "read": self.sync.read(),
            "presence": self.sync.presence(),
            "levels": self.levels.run(),
            "acks": self.dispatcher.run(),
            "inventory": self.inventory.watch(),
            "keys": self.guard.watch(),
            **({"certificate": self.certificate.watch()} if self.certificate is not None else {}),
        }


@asynccontextmanager
async def open_router(settings: RouterSettings, bus: Bus) -> AsyncIterator[RunningRouter]:
    """Listen on the settings' address and connect the parts; close everything at the end. Raises ConfigError."""
    guard, certificate = open_auth(settings)
    clock = Clock(settings.speed)
    identity = RouterIdentity(settings.instance, uuid.uuid4().hex[:12])
    limits = Limits(
        hold_seconds=clock.to_wall(settings.hold_seconds),
        queue_limit=settings.queue_limit,
        held_bytes=settings.held_bytes,
        permit_seconds=settings.permit_seconds,
        speed=settings.speed,
    )
    traffic, pools, http = Traffic(limits, identity), ConnectionPools(), aiohttp.ClientSession()
    dispatcher = Dispatcher(traffic, bus, http, pools.disconnect)
    levels = LevelPublisher(bus, traffic, clock, settings.instance, identity.incarnation)
    dispatcher.on_level = levels.touch
    url = [settings.advertise_url]

    def presence() -> Presence:
        return Presence(
            cause="presence",
            component="router",
            instance=identity.instance,
            incarnation=identity.incarnation,
            node=settings.node,
            url=url[0],
        )

    sync, inventory = RosterSync(bus, dispatcher, presence), GpuInventory(bus)
    health = _health(bus, traffic)
    metrics = _metrics(health, bus, traffic)
    loads, events = Loads(), EventLog(bus)

    def on_event(event: Event) -> None:
        events.add(event)
        if isinstance(event, SeatActivated) and event.previous in COMING:
            metrics.switches.inc()

    async def stop(_: web.Application) -> None:
        dispatcher.stop()
        events.stop()

    sync.on_event = on_event
    sync.on_signal = lambda signal: loads.add(signal, time.monotonic())
    sync.on_loss = metrics.disconnects.inc
    app = build(
        calls=Calls(settings, clock, dispatcher, pools, metrics),
        gateways=GatewayApi(settings, clock, bus, dispatcher),
        operator=OperatorApi(bus, traffic, loads, inventory, http),
        events=events,
        health=health,
        guard=guard,
        body_bytes=settings.body_bytes,
    )
    app.on_shutdown.append(stop)
    tls = certificate.context if certificate is not None else None
    try:
        async with HttpServer(app, settings.host, settings.port, tls=tls) as server:
            url[0] = url[0] or server.url
            yield RunningRouter(
                server.url, traffic, dispatcher, pools, events, sync, levels, inventory, guard, certificate
            )
    finally:
        await dispatcher.close()
        await pools.close()
        await http.close()


def _health(bus: Bus, traffic: Traffic) -> Health:
    health = Health()
    # Once it knows seats it is ready without NATS: all routers lose NATS together, and a Service needs a ready one.
    away = "not connected to NATS; see KYB_NATS_URL"
    health.conditions["bus"] = lambda: None if bus.connected or traffic.trust.ever_synced else away
    health.notes["bus"] = lambda: None if bus.connected else away
    health.conditions["roster"] = lambda: None if traffic.trust.ever_synced else "the roster was not read yet"
    health.registry.register(BusMetrics(cluster=bus))
    return health


def _metrics(health: Health, bus: Bus, traffic: Traffic) -> Metrics:
    return Metrics(
        health.registry,
        held=lambda: [(model.name, len(model.held)) for model in traffic.models.values()],
        in_flight=lambda: sum(len(upstream.in_flight) for upstream in traffic.upstreams.values()),
        connected=lambda: bus.connected,
    )


def build(
    *,
    calls: Calls,
    gateways: GatewayApi,
    operator: OperatorApi,
    events: EventLog,
    health: Health,
    guard: ApiKeyGuard,
    body_bytes: int,
) -> web.Application:
    """Return the application; ``body_bytes`` is the largest body it reads. Health and metrics need no key."""
    needs = guard.needs
    app = web.Application(client_max_size=body_bytes, middlewares=[_errors])
    app.add_routes(
        [
            *health.routes(),
            web.get("/v1/models", needs("infer", "view")(operator.models)),
            web.get("/v1/models/{model:.+}", needs("infer", "view")(operator.model)),
            web.get("/v1/hold", needs("infer")(gateways.hold)),
            web.post("/v1/wake", needs("infer")(gateways.wake)),
            web.post("/v1/signals", needs("signals")(gateways.signals)),
            web.get("/v1/events", needs("view")(events.handle)),
            web.get("/v1/seats", needs("view")(operator.seats)),
            web.get("/v1/why", needs("view")(operator.why)),
            web.post("/v1/seats/{seat:.+}/{verb:" + "|".join(VERBS) + "}", needs("admin")(operator.command)),
            web.post("/v1/{path:.+}", needs("infer")(calls.handle)),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in OpenAI's shape, also those that aiohttp raises."""
    try:
        if not {".", ".."}.isdisjoint(request.path.split("/")):
            raise web.HTTPNotFound  # a server before an engine may resolve dots, and /v1/../admin leads out of /v1
        return await handler(request)
    except RouterError as error:
        return error.response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = "not_found" if error.status == 404 else "http_error"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return RouterError(error.status, code, f"{request.method} {request.path}: {error.reason}").response(allow)
    except Exception as error:
        if request.writer.output_size > 0:
            raise  # half a response is sent: only the broken connection shows the failure
        get_logger().error("request.failed", method=request.method, path=request.path, exc_info=error)
        return RouterError(500, "internal_error", "the router failed at this request; see its log").response()
