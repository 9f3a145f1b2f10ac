"""The router's own port: which requests are inference calls (``calls.py``), and which others are refused unread."""

import ssl

from aiohttp import web

from kybernate.envelope import LONGEST_NAME
from kybernate.http.connection import CallerConnection, Times
from kybernate.http.head import Head
from kybernate.http.server import HttpServer
from kybernate.web_origin import WebOrigins
from services.router.api import RouterError
from services.router.calls import Call, Calls
from services.router.connections import ConnectionLimits
from services.router.settings import RouterSettings

OWN_PATHS = frozenset({b"/healthz", b"/readyz", b"/metrics", b"/openapi.json"})
"""Of the router itself, without those below /v1/."""
HEALTHY = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 16\r\n\r\n{"status": "ok"}'
)
HEALTHY_LAST = HEALTHY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
"""``GET /healthz``, in one turn of the loop: a router that releases thousands of requests is alive."""


class Front(HttpServer):
    """The port of the API."""

    what = "router"

    def __init__(
        self,
        app: web.Application,
        calls: Calls,
        settings: RouterSettings,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        times = Times(settings.head_seconds, settings.body_seconds, settings.idle_seconds, settings.slow_reader_seconds)
        origins, of = WebOrigins(settings.cors_origins), (settings.host, settings.port, "KYB")
        super().__init__(app, *of, tls=tls, times=times, limits=limits, origins=origins)
        self.calls = calls

    async def __aexit__(self, *how: object) -> None:
        """Close, and end what calls do beside their connections."""
        await super().__aexit__(*how)
        for task in list(self.calls.tasks):
            task.cancel()

    def stop(self) -> None:
        """Begin to stop: calls that wait are refused."""
        super().stop()
        self.calls.dispatcher.stop()

    def call(self, connection: CallerConnection, head: Head) -> Call | None:
        """Begin an inference call. Raises RouterError."""
        if head.method == b"POST" and head.target.partition(b"?")[0] in self.calls.paths:
            return self.calls.begin(connection, head)
        return None

    def check(self, head: Head, *, bodiless: bool) -> None:
        """Refuse a request without a key, or for a path that is not there. Raises RouterError."""
        path = head.target.partition(b"?")[0]
        if head.method != b"OPTIONS" and (path.startswith(b"/v1/") or not bodiless):
            self.calls.guard.check(head.fields())
        if path not in OWN_PATHS and not path.startswith(b"/v1/"):
            shown = head.target[:LONGEST_NAME].decode("latin-1")
            raise RouterError(404, "not_found", f"{head.method.decode('latin-1')} {shown}: Not Found")

    def at_once(self, head: Head, *, close: bool) -> bytes | None:
        """Also answer ``GET /healthz``."""
        if head.method == b"GET" and head.target == b"/healthz":
            return HEALTHY_LAST if close else HEALTHY
        return super().at_once(head, close=close)
