"""``python -m services.router``: settings, open, run."""

import asyncio
import contextlib
import gc
import os
import signal
from typing import TYPE_CHECKING

from kybernate import lifecycle
from kybernate.bus.nats import NatsBus
from kybernate.config_errors import ConfigError
from kybernate.logs import configure, get_logger
from kybernate.roster import BUCKET
from kybernate.settings import refused
from services.router.service import check, open_router
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from services.router.request_spans import Tracer

ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


def open_tracer(instance: str, node: str) -> contextlib.AbstractContextManager["Tracer | None"]:
    """Open what makes spans of requests, where ``OTEL_*`` ask for them. What cannot be traced stops no router."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(os.environ.get, ENDPOINTS)) else "none")
    try:
        if "otlp" in exporter.lower():
            from services.router.request_spans import Tracer

            return contextlib.closing(Tracer(instance, node))
    except Exception as error:  # also whatever the SDK raises
        remedy = "install kybernate[otel], correct OTEL_*, or set OTEL_TRACES_EXPORTER=none"
        get_logger().warning("traces.unavailable", reason=str(error), remedy=remedy)
    return contextlib.nullcontext()


async def serve(settings: RouterSettings) -> None:
    """Open the bus and the ports, then run the jobs. Raises ConfigError."""
    source, name = f"kyb/router/{settings.instance}", settings.instance
    who = settings.credentials("router")
    with open_tracer(settings.instance, settings.node) as tracer:
        async with (
            NatsBus(settings.nats_url, source=source, name=name, credentials=who, follows=BUCKET).opened() as bus,
            open_router(settings, bus, tracer) as router,
        ):
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, router.announce)  # kyb-router-draining
            gc.collect()
            gc.freeze()  # modules and settings, which last as long as the process
            health = router.server.url if router.server is not None else router.url
            get_logger().info("router.listening", url=router.url, health=health)
            await lifecycle.run(bus=bus.closed(), **router.jobs())


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = RouterSettings.from_env_or_exit("kyb-router")
    configure("router", form=settings.log_format, level=settings.log_level, instance=settings.instance)
    with refused("kyb-router", ConfigError):
        check(settings)
    lifecycle.main(lambda: serve(settings), ConfigError)


if __name__ == "__main__":
    main()
