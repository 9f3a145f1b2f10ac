"""``kyb-webhook``: settings → certificate → serve."""

import asyncio
import sys
from pathlib import Path

from aiohttp import web
from prometheus_client import Counter

from kybernate import lifecycle, logs
from kybernate.config import NodeConfig, load_all
from kybernate.config_errors import ConfigError
from kybernate.health import Health
from kybernate.http.connection import Times
from kybernate.http.server import HttpServer
from kybernate.logs import OnceLogger, get_logger
from kybernate.tls import ServerCertificate
from services.webhook.core.mutation import ReviewError, outcome, respond
from services.webhook.settings import WebhookSettings

KEPT_SECONDS = 300.0
"""The API server keeps a connection for its next reviews."""
REVIEW_BYTES = 8 * 2**20
"""The API server accepts requests of 3 MiB, and a review has the old and the new object."""


def configurations(path: Path | None, failed: OnceLogger) -> tuple[NodeConfig, ...]:
    """The nodes' configurations, read for each pod: they may change, and pods are rare. Without them, or while they are
    wrong, their names are not checked."""
    try:
        found = () if path is None else tuple(load_all(path).values())
    except (ConfigError, OSError) as error:
        failed.log(reason=str(error), meaning="tiers, groups and resources of pods are not checked")
        return ()
    failed.clear()
    return found


def application(settings: WebhookSettings, health: Health) -> web.Application:
    """Return the application with ``POST /mutate``."""
    failed = OnceLogger("config.refused")
    reviews = Counter("kybernate_webhook_reviews", "Reviewed pods", ["outcome"], registry=health.registry)

    async def mutate(request: web.Request) -> web.Response:
        try:
            review = respond(
                await request.json(), settings, await asyncio.to_thread(configurations, settings.config, failed)
            )
        except (ValueError, ReviewError) as error:
            return web.json_response({"error": {"message": f"{error}"}}, status=400)
        reviews.labels(outcome(review)).inc()
        if not review["response"]["allowed"]:
            get_logger().info("pod.refused", reason=review["response"]["status"]["message"])
        return web.json_response(review)

    app = web.Application(client_max_size=REVIEW_BYTES)
    app.router.add_post("/mutate", mutate)
    return app


async def serve(settings: WebhookSettings) -> None:
    """Run until stopped. Raises ConfigError, CannotListenError."""
    health, certificate = Health(), ServerCertificate(settings.tls_cert_file)
    app = application(settings, health)
    tls, times = certificate.context, Times(idle_seconds=KEPT_SECONDS)
    webhook = HttpServer(app, settings.host, settings.port, "KYB", tls=tls, times=times, most_bytes=REVIEW_BYTES)
    async with webhook as server, health.server(settings) as probes:
        get_logger().info("webhook.listening", url=server.url, health=probes.url)
        await lifecycle.run(certificate=certificate.watch())


def main() -> None:
    """The console script."""
    settings = WebhookSettings.from_env_or_exit("kyb-webhook")
    logs.configure("webhook", form=settings.log_format, level=settings.log_level)
    try:
        ServerCertificate(settings.tls_cert_file)
    except ConfigError as error:
        sys.stderr.write(f"kyb-webhook: {error}; the chart makes them (docs/dev/webhook.md)\n")
        raise SystemExit(1) from None
    lifecycle.main(lambda: serve(settings), ConfigError)


if __name__ == "__main__":
    main()
