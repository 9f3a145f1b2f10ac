"""``kyb-webhook``: settings → certificate → serve."""

import asyncio
import ssl
import sys

from aiohttp import web
from prometheus_client import Counter

from kybernate import lifecycle, logs
from kybernate.config_watch import changes
from kybernate.health import Health, HttpServer
from kybernate.logs import get_logger
from services.webhook.mutation import Options
from services.webhook.review import ReviewError, answer, outcome
from services.webhook.settings import WebhookSettings

REVIEW_BYTES = 8 * 2**20
"""The API server takes requests of 3 MiB, and sends old and new object."""


class CertificateError(Exception):
    """The certificate cannot be used; the text says why and what to do."""


def application(options: Options, health: Health) -> web.Application:
    """``POST /mutate``."""
    reviews = Counter("kybernate_webhook_reviews", "Pods that were looked at", ["outcome"], registry=health.registry)

    async def mutate(request: web.Request) -> web.Response:
        try:
            said = answer(await request.json(), options)
        except (ValueError, ReviewError) as error:
            return web.json_response({"error": {"message": f"{error}"}}, status=400)
        reviews.labels(outcome(said)).inc()
        if not said["response"]["allowed"]:
            get_logger().info("pod.refused", reason=said["response"]["status"]["message"])
        return web.json_response(said)

    app = web.Application(client_max_size=REVIEW_BYTES)
    app.router.add_post("/mutate", mutate)
    return app


def certificate(settings: WebhookSettings) -> ssl.SSLContext:
    """A context with the certificate. Raises CertificateError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    read_certificate(context, settings)
    return context


def read_certificate(context: ssl.SSLContext, settings: WebhookSettings) -> None:
    """Connections from now on get the certificate that is in the files. Raises CertificateError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(
            f"KYB_TLS_CERT_FILE={cert}, KYB_TLS_KEY_FILE={key}: {error}; kyb webhook certs makes them"
        ) from error


async def _renewed(context: ssl.SSLContext, settings: WebhookSettings) -> None:
    """Read the certificate again whenever it changes; one that cannot be used is said, and the present one stays."""
    async for _ in changes(settings.tls_cert_file, asyncio.Event(), seconds=5.0):
        try:
            await asyncio.to_thread(read_certificate, context, settings)
        except CertificateError as error:
            get_logger().error("certificate.refused", reason=str(error), meaning="the one before stays in use")


async def serve(settings: WebhookSettings) -> None:
    """Run until stopped. Raises CertificateError, OSError."""
    options = Options(
        image=settings.probe_image,
        manager_port=settings.manager_port,
        first_port=settings.probe_port,
        user=settings.probe_user,
        memory=settings.probe_memory,
        prefixes=settings.prefixes,
    )
    health, context = Health(), certificate(settings)
    async with HttpServer(application(options, health), settings.host, settings.port, tls=context) as server:
        app = web.Application()
        app.add_routes(health.routes())
        async with HttpServer(app, settings.health_host, settings.health_port) as probes:
            get_logger().info("webhook.serves", url=server.url, health=probes.url)
            await lifecycle.run(certificate=_renewed(context, settings))


def main() -> None:
    """The console script."""
    settings = WebhookSettings.from_env_or_exit("kyb-webhook")
    logs.configure("webhook", form=settings.log_format, level=settings.log_level)
    try:
        certificate(settings)
    except CertificateError as error:
        sys.stderr.write(f"kyb-webhook: {error}\n")
        raise SystemExit(1) from None
    lifecycle.main(lambda: serve(settings))


if __name__ == "__main__":
    main()
