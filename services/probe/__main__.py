"""``kyb-probe``: settings → listen → until it is told to end."""

import asyncio
import gc
import signal
import sys

from services.probe.server import ProbeServer
from services.probe.settings import ProbeSettings, SettingsError, read


async def serve(settings: ProbeSettings) -> None:
    """Until SIGTERM or SIGINT. Raises OSError when a port is taken."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with ProbeServer(settings).serving():
        gc.collect()
        gc.freeze()
        await stop.wait()


def main() -> None:
    """The console script. Exit code 2: wrong settings; 1: a port is taken."""
    try:
        asyncio.run(serve(read()))
    except SettingsError as error:
        sys.stderr.write(f"kyb-probe: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        sys.stderr.write(f"kyb-probe: {error}; annotation kyb.ai/probe-port moves its ports\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
