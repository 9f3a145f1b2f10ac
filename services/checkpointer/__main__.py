"""The checkpointer of one node: settings → open → run. The only program that touches engine processes."""

import asyncio
import contextlib
from collections.abc import Sequence

from kybernate import lifecycle, logs
from kybernate.bus.node_socket import listening
from kybernate.extras import ExtraMissingError
from kybernate.health import BusMetrics, Health
from kybernate.lifecycle import alone_in_both
from kybernate.settings import refused
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.host import Host, open_host
from services.checkpointer.core.refusals import comma_list
from services.checkpointer.engine_http import AnswerCheck, open_engines
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.metrics import CheckpointerMetrics
from services.checkpointer.settings import CheckpointerSettings, helper_command
from services.checkpointer.worker import CheckpointWorker

PROBE_SECONDS = 5.0
ROOM_MARGIN_BYTES = 512 * 2**20
"""Free VRAM required beyond a seat's footprint before a restore beside others; not applied to fake GPUs."""


async def serve(settings: CheckpointerSettings, command: Sequence[str], host: Host) -> None:
    """Run until SIGTERM. ``command`` starts a helper."""
    own = settings.run_dir / "checkpointer"  # the plugin wakes at each change of a file of run_dir itself
    own.mkdir(exist_ok=True)
    journal = Journal(settings.state_dir, own / "epochs.json")
    journal.load()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(journal.close)
        pool = await stack.enter_async_context(HelperPool(command, settings.helpers_dir))
        bus = await stack.enter_async_context(listening(settings.node_socket))
        margin_bytes = ROOM_MARGIN_BYTES if settings.fake_driver is None else 0
        http = await stack.enter_async_context(open_engines(settings.engine_keys_dir))
        backends = open_backends(pool, settings.timeouts, host, margin_bytes, fake=settings.fakes, http=http)
        check = AnswerCheck(http, speed=settings.speed)
        worker = CheckpointWorker(settings.node, bus, journal, pool, backends, check)
        driver_problem: list[str] = ["not probed yet"]
        health = Health()
        health.registry.register(BusMetrics(node=bus))
        metrics = CheckpointerMetrics(health.registry, settings.node, journal, pool, host.headroom)
        idle = f"no manager is connected at {settings.node_socket}: nothing is switched"
        health.notes["bus"] = lambda: None if bus.connected else idle
        health.notes["containers"] = lambda: host.containers.blind() or None
        health.conditions["driver"] = lambda: driver_problem[0] or None
        health.conditions["journal"] = journal.stalled
        health.conditions["replay"] = lambda: (
            f"finishing what a restart interrupted: {', '.join(sorted(worker.replaying))}" if worker.replaying else None
        )
        served = await stack.enter_async_context(health.server(settings))
        unfinished = [op for op, job in journal.jobs.items() if not job.done]
        facts = {"health": served.url, "bus": str(settings.node_socket), "unfinished": unfinished}
        logs.get_logger().info("checkpointer.serving", **facts)
        if blind := host.containers.blind():
            logs.get_logger().error("containers.not_seen", reason=blind, meaning="a seat that is parked is quarantined")

        async def probe() -> None:
            while True:
                driver_problem[0] = await backends["cuda"].probe() or ""
                await asyncio.sleep(PROBE_SECONDS)

        await lifecycle.run(worker=worker.serve(), probe=probe(), memory=metrics.read_memory())


def main() -> None:
    """Settings, lock, serve."""
    settings = CheckpointerSettings.from_env_or_exit("kyb-checkpointer")
    logs.configure("checkpointer", form=settings.log_format, level=settings.log_level, node=settings.node)
    with refused("kyb-checkpointer", ValueError, ExtraMissingError):
        command = helper_command(settings)
        allowed = comma_list(settings.park_allow)
        host = open_host(
            settings.fake_driver,
            settings.timeouts.settle(),
            allowed,
            fake_kubelet=settings.fake_kubelet,
            seats_dir=settings.run_dir / "seats",
        )
    with alone_in_both(settings.run_dir, settings.state_dir, "checkpointer"):
        lifecycle.main(lambda: serve(settings, command, host))


if __name__ == "__main__":
    main()
