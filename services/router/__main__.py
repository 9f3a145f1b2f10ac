"""``python -m services.router``: settings, open, run."""

import sys

from kybernate import lifecycle
from kybernate.config_errors import ConfigError
from kybernate.logs import configure
from services.router.service import check
from services.router.settings import RouterSettings
from services.router.supervisor import supervise
from services.router.worker import serve


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = RouterSettings.from_env_or_exit("kyb-router")
    configure("router", form=settings.log_format, level=settings.log_level, instance=settings.instance)
    try:
        check(settings)
    except ConfigError as error:
        sys.stderr.write(f"kyb-router: {error}\n")
        raise SystemExit(2) from None
    lifecycle.main(lambda: supervise(settings) if settings.workers else serve(settings), ConfigError)


if __name__ == "__main__":
    main()
