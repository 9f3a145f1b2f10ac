"""One router, put together: what is opened, and which jobs run."""

import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.metrics import BusMetrics
from kybernate.bus.port import Bus
from kybernate.certificate import Certificate
from kybernate.clock import Clock
from kybernate.health import Health, HttpServer
from kybernate.messages import Presence, SeatActivated
from kybernate.seat import COMING
from services.router.admin import Admin
from services.router.app import build
from services.router.asks import Identity
from services.router.auth import Doorkeeper, open_door
from services.router.calls import Calls
from services.router.dispatch import Dispatcher
from services.router.events import Event, EventLog
from services.router.gateways import Gateways
from services.router.hold import Limits
from services.router.inventory import Inventory
from services.router.levels import LevelPublisher
from services.router.loads import Loads
from services.router.metrics import Metrics
from services.router.settings import RouterSettings
from services.router.sync import RosterSync
from services.router.traffic import Traffic
from services.router.upstream import Upstreams


@dataclass
class Router:
    """A router that listens; ``jobs`` make it live."""

    url: str
    traffic: Traffic
    dispatcher: Dispatcher
    sync: RosterSync
    levels: LevelPublisher
    inventory: Inventory
    doorkeeper: Doorkeeper
    certificate: Certificate | None

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs until the router ends, by name."""
        return {
            "listen": self.sync.listen(),
            "watch": self.sync.watch(),
            "read": self.sync.read(),
            "presence": self.sync.presence(),
            "levels": self.levels.run(),
            "acks": self.dispatcher.run(),
            "inventory": self.inventory.watch(),
            "keys": self.doorkeeper.watch(),
            **({"certificate": self.certificate.watch()} if self.certificate is not None else {}),
        }


@asynccontextmanager
async def open_router(settings: RouterSettings, bus: Bus) -> AsyncIterator[Router]:
    """Listen on the settings' address and wire the parts; everything is closed at the end. Raises ConfigError."""
    doorkeeper, certificate = open_door(settings)
    clock = Clock(settings.speed)
    identity = Identity(settings.instance, uuid.uuid4().hex[:12])
    limits = Limits(
        hold_seconds=clock.to_wall(settings.hold_seconds),
        queue_limit=settings.queue_limit,
        held_bytes=settings.held_bytes,
        permit_seconds=settings.permit_seconds,
        speed=settings.speed,
    )
    traffic = Traffic(limits, identity)
    upstreams = Upstreams()
    http = aiohttp.ClientSession()
    dispatcher = Dispatcher(traffic, bus, upstreams, http)
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

    sync = RosterSync(bus, dispatcher, presence)
    inventory = Inventory(bus)
    app = _app(settings, clock, bus, traffic, dispatcher, upstreams, sync, inventory, http, doorkeeper)
    tls = certificate.context if certificate is not None else None
    try:
        async with HttpServer(app, settings.host, settings.port, tls=tls) as server:
            url[0] = url[0] or server.url
            yield Router(server.url, traffic, dispatcher, sync, levels, inventory, doorkeeper, certificate)
    finally:
        await dispatcher.close()
        await upstreams.close()
        await http.close()


def _app(
    settings: RouterSettings,
    clock: Clock,
    bus: Bus,
    traffic: Traffic,
    dispatcher: Dispatcher,
    upstreams: Upstreams,
    sync: RosterSync,
    inventory: Inventory,
    http: aiohttp.ClientSession,
    doorkeeper: Doorkeeper,
) -> web.Application:
    health = Health()
    # Once it knows seats it serves without NATS: all routers lose NATS together, and a Service needs one that is ready.
    away = "not connected to NATS; see KYB_NATS_URL"
    health.conditions["bus"] = lambda: None if bus.connected or traffic.trust.ever_synced else away
    health.notes["bus"] = lambda: None if bus.connected else away
    health.conditions["roster"] = lambda: None if traffic.trust.ever_synced else "the roster was not read yet"
    metrics = Metrics(
        health.registry,
        held=lambda: [(model.name, len(model.held)) for model in traffic.models.values()],
        in_flight=lambda: sum(len(lane.in_flight) for lane in traffic.lanes.values()),
        connected=lambda: bus.connected,
    )
    health.registry.register(BusMetrics(cluster=bus))
    loads, events = Loads(), EventLog(bus)

    def on_event(event: Event) -> None:
        events.hear(event)
        if isinstance(event, SeatActivated) and event.previous in COMING:
            metrics.switches.inc()

    sync.on_event = on_event
    sync.on_signal = lambda signal: loads.hear(signal, time.monotonic())
    sync.on_loss = metrics.disconnects.inc
    app = build(
        calls=Calls(settings, clock, dispatcher, upstreams, metrics),
        gateways=Gateways(settings, clock, bus, dispatcher),
        admin=Admin(bus, traffic, loads, inventory, http),
        events=events,
        health=health,
        doorkeeper=doorkeeper,
        body_bytes=settings.body_bytes,
    )

    async def stop(_: web.Application) -> None:
        dispatcher.stop()
        events.stop()

    app.on_shutdown.append(stop)
    return app
