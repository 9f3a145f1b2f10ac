"""``kyb-probe``: settings, listen, run until SIGTERM."""

import asyncio
import gc
import signal
import sys

from services.probe.server import ProbeServer
from services.probe.settings import ProbeSettings, ProbeSettingsError, read


async def serve(settings: ProbeSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises OSError if a port is in use."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with ProbeServer(settings).serving():
        gc.collect()
        gc.freeze()
        await stop.wait()


def main() -> None:
    """The console script. Exit code 2: wrong settings; 1: a port is in use."""
    try:
        asyncio.run(serve(read()))
    except ProbeSettingsError as error:
        sys.stderr.write(f"kyb-probe: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        sys.stderr.write(f"kyb-probe: {error}; annotation kyb.ai/probe-port moves its ports\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
