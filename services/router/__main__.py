"""``python -m services.router``: settings, open, run."""

import sys

from kybernate import lifecycle
from kybernate.bus import open_bus
from kybernate.config_errors import ConfigError
from kybernate.logs import configure, get_logger
from services.router.auth import open_auth
from services.router.garbage import exempt_all
from services.router.service import open_router
from services.router.settings import RouterSettings


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = RouterSettings.from_env_or_exit("kyb-router")
    configure("router", form=settings.log_format, level=settings.log_level, instance=settings.instance)
    try:
        open_auth(settings)
    except ConfigError as error:
        sys.stderr.write(f"kyb-router: {error}\n")
        raise SystemExit(2) from None
    lifecycle.main(lambda: serve(settings))


async def serve(settings: RouterSettings) -> None:
    """Open the bus and the port, then run the jobs."""
    async with (
        open_bus(
            settings.nats_url,
            source=f"kyb/router/{settings.instance}",
            name=settings.instance,
            credentials=settings.credentials("router"),
        ) as bus,
        open_router(settings, bus) as router,
    ):
        exempt_all()
        get_logger().info("router.listening", url=router.url)
        await lifecycle.run(bus=bus.closed(), **router.jobs())


if __name__ == "__main__":
    main()
