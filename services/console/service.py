"""The console, put together: its parts, its jobs, and which route goes where."""

import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus
from kybernate.clock import Clock
from kybernate.health import Health
from kybernate.http.server import HttpServer
from kybernate.http_api import document, errors
from kybernate.key_guard import KeyGuard
from kybernate.tls import ServerCertificate, follow_authorities, trust, trusting
from kybernate.web_origin import WebOrigins
from services.console.api import VERBS, OperatorApi
from services.console.core.cluster import Cluster
from services.console.engine_log import EngineLog
from services.console.events import EventLog
from services.console.follow import Event, Reader
from services.console.history import History
from services.console.page import CHAT_BYTES, Page
from services.console.problems import Problems
from services.console.routers import Routers
from services.console.settings import ConsoleSettings

DOCUMENT = document(Path(__file__).parent / "openapi.json")


class Console:
    """The parts of the console; ``jobs`` connect it to the cluster. Raises ConfigError."""

    def __init__(
        self, settings: ConsoleSettings, bus: Bus, http: aiohttp.ClientSession, trusted: ssl.SSLContext
    ) -> None:
        self._settings, self._bus, self._clock, self.url = settings, bus, Clock(settings.speed), ""
        self._trusted = trusted
        self.page_url = ""
        """Of the port that has the page; empty: none has."""
        self.guard, self.certificate = open_auth(settings)
        self._origins = WebOrigins(settings.cors_origins)
        self.cluster = cluster = Cluster()
        self.reader = Reader(bus, cluster)
        self.health = Health()
        self.health.follows_cluster(bus, lambda: cluster.complete, self.guard, self.certificate)
        self.api, self.history = OperatorApi(bus, cluster, http), History(bus)
        self.events = EventLog(bus, self.history.reading)
        self.routers = Routers(cluster, http, settings.router_url)
        self.page = Page(bus, cluster, self._clock, keys=self.guard.required)
        self.page.troubles = lambda: self.health.unmet() | self.health.remarks()
        self.problems = Problems(bus, cluster, self.api, self.routers)
        self.problems.troubles, self.problems.url = self.page.troubles, lambda: self.url
        self.page.problems = lambda: self.problems.found
        self.log = EngineLog(cluster, lambda: self.url)
        self.reader.on_event = self._on_event

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the jobs that run until the console ends, by name."""
        return {
            **self.reader.jobs(),
            "page": self.page.run(),
            "problems": self.problems.run(self.page.watched),
            "keys": self.guard.watch(),
            "authorities": follow_authorities(self._trusted, self._settings.router_ca_file),
            **({"certificate": self.certificate.watch()} if self.certificate is not None else {}),
        }

    def servers(self) -> tuple[HttpServer, HttpServer | None]:
        """Return the server of the API's port, and that of the operations port if there is one."""
        settings, tls = self._settings, self.certificate.context if self.certificate is not None else None
        api, health = self._api_routes(), self.health.routes()
        operations: HttpServer | None = None
        if settings.health_port:
            operations = self._server([*self._page_routes(), *health], settings.health_host, settings.health_port)
            health = [route for route in health if route.path != "/metrics"]
        elif not self.guard.required:
            api += self._page_routes()
        return self._server([*api, *health], settings.host, settings.port, "KYB", tls, self.guard), operations

    def _server(
        self,
        routes: list[web.RouteDef],
        host: str,
        port: int,
        prefix: str = "KYB_HEALTH",
        tls: ssl.SSLContext | None = None,
        guard: KeyGuard | None = None,
    ) -> HttpServer:
        app = web.Application(middlewares=[errors])
        app.add_routes(routes)
        app.on_shutdown.append(self._stop)
        of = host, port, prefix
        return HttpServer(app, *of, tls=tls, origins=self._origins, most_bytes=CHAT_BYTES, guard=guard)

    def _api_routes(self) -> list[web.RouteDef]:
        view, admin = self.guard.needs("view"), self.guard.needs("admin")
        return [
            DOCUMENT,
            web.get("/v1/seats", view(self.api.seats)),
            web.get("/v1/why", view(self.api.why)),
            web.get("/v1/events", view(self.events.handle)),
            web.get("/v1/history", view(self.history.handle)),
            web.get("/v1/requests", view(self.history.requests)),
            web.get("/v1/requests/{request:.+}", view(self.history.request)),
            web.get("/v1/routers", view(self.routers.readiness)),
            *[web.post(f"/v1/{path}", admin(command)) for path, command in self._commands().items()],
        ]

    def _page_routes(self) -> list[web.RouteDef]:
        view, admin = self.guard.needs("view"), self.guard.needs("admin")
        chat = partial(self.routers.relay, "/v1/chat/completions")
        return [
            *self.page.routes(admin),
            web.get("/ui/why", self.api.why),
            web.get("/ui/history", self.history.handle),
            web.get("/ui/requests", view(self.history.requests)),
            web.get("/ui/requests/{request:.+}", view(self.history.request)),
            web.get("/ui/log", view(self.log.handle)),
            web.get("/ui/keys", view(self._keys)),
            web.post("/ui/chat", chat),
            *[web.post(f"/ui/{path}", admin(command)) for path, command in self._commands().items()],
            self.page.files(),
        ]

    def _commands(self) -> dict[str, Any]:
        return {
            "seats/{seat:.+}/{verb:" + "|".join(VERBS) + "}": self.api.command,
            "seats/{seat:.+}/migrate": self.api.migrate,
            "groups/{group:.+}/{verb:drain|resume}": self.api.group,
            "nodes/{node:.+}/{verb:drain|resume}": self.api.node,
        }

    async def _keys(self, _: web.Request) -> web.StreamResponse:
        """Names, scopes and limits of keys and tenants."""
        return web.json_response(self.guard.listed())

    def _on_event(self, event: Event) -> None:
        self.events.add(event)
        self.page.add(event)

    async def _stop(self, _: web.Application) -> None:
        self.events.stop()
        self.page.stop()


def open_auth(settings: ConsoleSettings) -> tuple[KeyGuard, ServerCertificate | None]:
    """Load the API keys and the certificate that the settings name. Raises ConfigError."""
    cert = settings.tls_cert_file
    WebOrigins(settings.cors_origins)
    return KeyGuard(settings.api_keys_file), ServerCertificate(cert) if cert is not None else None


@asynccontextmanager
async def open_console(settings: ConsoleSettings, bus: Bus) -> AsyncIterator[Console]:
    """Listen on the settings' addresses; close everything at the end. Raises ConfigError, CannotListenError."""
    trusted = trusting(None)
    if settings.router_ca_file is not None:
        trust(trusted, settings.router_ca_file, "KYB_ROUTER_CA_FILE")
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as http, AsyncExitStack() as ports:
        console = Console(settings, bus, http, trusted)
        api, operations = console.servers()
        console.url = (await ports.enter_async_context(api)).url
        if operations is not None:
            console.page_url = (await ports.enter_async_context(operations)).url
        elif not console.guard.required:
            console.page_url = console.url
        yield console
