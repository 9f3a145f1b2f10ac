"""``python -m services.router``: settings, open, run."""

import asyncio
import signal

from kybernate import lifecycle
from kybernate.bus.nats import NatsBus
from kybernate.config_errors import ConfigError
from kybernate.logs import configure, get_logger
from kybernate.roster import BUCKET
from kybernate.settings import refused
from kybernate.tracing import open_tracer
from services.router.garbage import exempt_all
from services.router.service import check, open_router
from services.router.settings import RouterSettings


async def serve(settings: RouterSettings) -> None:
    """Open the bus and the ports, then run the jobs. Raises ConfigError."""
    source = f"kyb/router/{settings.instance}"
    with open_tracer("router", settings.instance, settings.node) as tracer:
        async with (
            NatsBus(
                settings.nats_url,
                source=source,
                name=settings.instance,
                credentials=settings.credentials("router"),
                follows=BUCKET,
            ).opened() as bus,
            open_router(settings, bus, tracer) as router,
        ):
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, router.announce)  # kyb-router-draining
            exempt_all()
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
