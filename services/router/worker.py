"""One router: a whole process, or one of the workers that ``supervisor.py`` starts with this module."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

from kybernate import lifecycle
from kybernate.bus import open_bus
from kybernate.config_errors import ConfigError
from kybernate.logs import configure, get_logger
from kybernate.tracing import open_tracer
from services.router.garbage import exempt_all
from services.router.service import RunningRouter, open_router
from services.router.settings import RouterSettings

BEAT_SECONDS = 0.5
"""How often a worker reports."""
WAIT_SECONDS = 0.05
"""How often it looks whether it is ready to listen."""
REFUSED = 2
"""The exit code of a worker that refuses its configuration."""
LIVE, READY, DRAIN = b".", b"r", b"d"
"""What a worker reports: that its loop runs, or also that it is ready; what its supervisor orders."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """The sockets of a worker. The first two listen; their queues outlive it."""

    patience: float
    """Seconds until it takes connections though it is not ready: health can be asked then."""
    api: socket.socket
    operations: socket.socket
    supervisor: socket.socket


async def serve(settings: RouterSettings, inherited: Inherited | None = None) -> None:
    """Open the bus and the ports, then run the jobs. Raises ConfigError."""
    api, operations = (inherited.api, inherited.operations) if inherited is not None else (None, None)
    with open_tracer("router", settings.instance, settings.node) as tracer:
        async with (
            open_bus(
                settings.nats_url,
                source=f"kyb/router/{settings.instance}",
                name=settings.instance,
                credentials=settings.credentials("router"),
            ) as bus,
            open_router(settings, bus, api, operations, tracer) as router,
        ):
            exempt_all()
            jobs = router.jobs()
            if inherited is None:
                get_logger().info("router.listening", url=router.url)
            else:
                reader, writer = await asyncio.open_connection(sock=inherited.supervisor)
                jobs |= {"report": _report(router, writer, inherited.patience), "obey": _obey(router, reader)}
            await lifecycle.run(bus=bus.closed(), **jobs)


async def _report(router: RunningRouter, writer: asyncio.StreamWriter, patience: float) -> NoReturn:
    """Listen when the router is ready, or has no patience left; report."""
    clock = asyncio.get_running_loop().time
    until = clock() + patience
    while router.health.unmet() and clock() < until:
        writer.write(LIVE)
        await asyncio.sleep(WAIT_SECONDS)
    await router.listen()
    get_logger().info("router.listening", url=router.url)
    while True:
        writer.write(LIVE if router.health.unmet() else READY)
        await asyncio.sleep(BEAT_SECONDS)


async def _obey(router: RunningRouter, reader: asyncio.StreamReader) -> NoReturn:
    """Drain when the supervisor says so; stop after that, and when the supervisor has ended."""
    if await reader.read(1) == DRAIN:
        get_logger().info("worker.draining")
        await router.drain()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()
    raise AssertionError("SIGTERM cancels this")


def main(argv: list[str]) -> None:
    """Run a worker: its number, its name, its patience, and the descriptors of its sockets."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a supervisor's, but a terminal or systemd may send it to all
    number, name, patience, *descriptors = argv
    settings = RouterSettings.from_env().of_worker(int(number), name)
    configure("router", form=settings.log_format, level=settings.log_level, instance=settings.instance)
    inherited = Inherited(float(patience), *(socket.socket(fileno=int(descriptor)) for descriptor in descriptors))
    lifecycle.main(lambda: _serve_or_exit(settings, inherited))


async def _serve_or_exit(settings: RouterSettings, inherited: Inherited) -> None:
    try:
        await serve(settings, inherited)
    except ConfigError as error:  # of a file that changed since the supervisor checked it
        sys.stderr.write(f"kyb-router: {error}\n")
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main(sys.argv[1:])
