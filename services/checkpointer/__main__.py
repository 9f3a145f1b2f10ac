"""The checkpointer of one node: settings → open → run. The only program that touches engine processes."""

import asyncio
import contextlib
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from kybernate import lifecycle, logs
from kybernate.bus import Bus, BusDownError, open_bus
from kybernate.health import Health, HttpServer
from kybernate.messages import Presence
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.fake import fake_helper_command
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.patience import Patience
from services.checkpointer.settings import CheckpointerSettings
from services.checkpointer.worker import Worker

PRESENCE_SECONDS = 2.0
PROBE_SECONDS = 5.0
PREDECESSOR_SECONDS = 5.0
"""How long a predecessor that is still ending is waited for."""


async def serve(settings: CheckpointerSettings) -> None:
    """Run until SIGTERM."""
    assert settings.fake_driver is not None
    command = fake_helper_command(settings.fake_driver)
    patience = Patience(
        lock_seconds=settings.lock_seconds,
        base_seconds=settings.transfer_base_seconds,
        seconds_per_gib=settings.transfer_seconds_per_gib,
        speed=settings.speed,
    )
    journal = Journal(settings.state_dir)
    journal.load()
    url = settings.node_nats_url or settings.nats_url
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(journal.close)
        pool = await stack.enter_async_context(HelperPool(command, settings.state_dir / "helpers"))
        source = f"kyb/checkpointer/{settings.node}"
        bus = await stack.enter_async_context(open_bus(url, source=source, name=f"checkpointer {settings.node}"))
        backends = open_backends(pool, patience)
        worker = Worker(settings.node, bus, journal, pool, backends)
        driver_says: list[str] = ["not asked yet"]
        health = Health()
        health.conditions["bus"] = lambda: None if bus.connected else f"no connection to {url}"
        health.conditions["driver"] = lambda: driver_says[0] or None
        health.conditions["replay"] = lambda: (
            f"finishing what a restart interrupted: {', '.join(sorted(worker.replaying))}" if worker.replaying else None
        )
        app = web.Application()
        app.add_routes(health.routes())
        http = await stack.enter_async_context(HttpServer(app, settings.health_host, settings.health_port))
        unfinished = [op for op, job in journal.jobs.items() if not job.done]
        logs.get_logger().info("checkpointer.serving", health=http.url, bus=url, unfinished=unfinished)

        async def probe() -> None:
            while True:
                driver_says[0] = await backends["cuda"].probe() or ""
                await asyncio.sleep(PROBE_SECONDS)

        await lifecycle.run(
            worker=worker.serve(), reports=worker.reporter.run(), probe=probe(), presence=_presence(bus, settings)
        )


async def _presence(bus: Bus, settings: CheckpointerSettings) -> None:
    incarnation = uuid.uuid4().hex
    while True:
        with contextlib.suppress(BusDownError):
            await bus.publish(
                Presence(
                    cause="presence",
                    component="checkpointer",
                    instance=settings.instance,
                    incarnation=incarnation,
                    node=settings.node,
                )
            )
        await asyncio.sleep(PRESENCE_SECONDS)


@contextlib.contextmanager
def alone(run_dir: Path, *, patience_seconds: float = PREDECESSOR_SECONDS) -> Iterator[None]:
    """Hold the lock of this node's one checkpointer. Ends the process with code 1 when another one holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "checkpointer.lock"
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        holder = os.read(file, 32).decode().strip()
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = (
                        f"kyb-checkpointer: process {holder} holds {path}; one per node: stop it, or set KYB_RUN_DIR\n"
                    )
                    sys.stderr.write(text)
                    raise SystemExit(1) from None
                time.sleep(0.05)
        if holder:
            logs.get_logger().warning("lock.left_behind", file=str(path), by_pid=holder)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def main() -> None:
    """Settings, lock, serve."""
    settings = CheckpointerSettings.from_env_or_exit("kyb-checkpointer")
    logs.configure("checkpointer", form=settings.log_format, level=settings.log_level, node=settings.node)
    if settings.fake_driver is None:
        sys.stderr.write("kyb-checkpointer: KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket\n")
        raise SystemExit(2)
    with alone(settings.run_dir):
        lifecycle.main(lambda: serve(settings))


if __name__ == "__main__":
    main()
