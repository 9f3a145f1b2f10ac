"""``python -m services.console``: settings, open, run."""

from kybernate import lifecycle
from kybernate.bus.nats import NatsBus
from kybernate.config_errors import ConfigError
from kybernate.logs import configure, get_logger
from kybernate.roster import BUCKET
from kybernate.settings import refused
from services.console.service import open_auth, open_console
from services.console.settings import ConsoleSettings


async def serve(settings: ConsoleSettings) -> None:
    """Open the bus and the ports, then run the jobs. Raises ConfigError, CannotListenError."""
    source, name = f"kyb/console/{settings.instance}", settings.instance
    who = settings.credentials("console")
    async with (
        NatsBus(settings.nats_url, source=source, name=name, credentials=who, follows=BUCKET).opened() as bus,
        open_console(settings, bus) as console,
    ):
        get_logger().info("console.listening", url=console.url, page=console.page_url)
        await lifecycle.run(bus=bus.closed(), **console.jobs())


def main() -> None:
    """Run the console until SIGTERM or SIGINT."""
    settings = ConsoleSettings.from_env_or_exit("kyb-console")
    configure("console", form=settings.log_format, level=settings.log_level, instance=settings.instance)
    with refused("kyb-console", ConfigError):
        open_auth(settings)
    lifecycle.main(lambda: serve(settings), ConfigError)


if __name__ == "__main__":
    main()
