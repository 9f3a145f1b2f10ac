"""The device plugin: offers this node's seats to kubelet, and holds container starts until they have a ticket.

Works without NATS: what it publishes are hints.
"""

import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from kybernate import lifecycle, logs
from kybernate.bus.nats import NatsBus
from kybernate.bus.port import Bus, BusError
from kybernate.config import ConfigError, NodeConfig, load
from kybernate.gpus import Gpu, GpuError, Gpus, open_gpus
from kybernate.health import Health, HttpServer
from kybernate.messages import SeatAllocated
from kybernate.presence import be_present
from kybernate.seat import SeatState
from kybernate.topology import plan
from services.plugin.devices import Offer, Probation, device_paths
from services.plugin.gate import StartGate
from services.plugin.kubelet import Registration, remove_stale
from services.plugin.servicer import Node
from services.plugin.settings import PluginSettings

GPU_RETRY_SECONDS = 1.0
HINTS = 1000
"""Allocations that wait to be published; more are dropped, since PodResources tells them too."""


async def serve(settings: PluginSettings, config: NodeConfig) -> None:
    """Run until SIGTERM."""
    log = logs.get_logger()
    gpus = open_gpus(settings.gpus, settings.fake_driver)
    health = Health()
    health.conditions["gpus"] = lambda: "the GPUs have not been read yet"
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(gpus.close)
        app = web.Application()
        app.add_routes(health.routes())
        http = await stack.enter_async_context(HttpServer(app, settings.health_host, settings.health_port))
        bus = await stack.enter_async_context(
            NatsBus.connect(
                settings.nats_url, source=f"kyb/plugin/{settings.instance}", name=f"plugin {settings.instance}"
            )
        )
        log.info("plugin.serving", url=http.url, config=str(settings.config))
        await lifecycle.run(plugin=_plugin(settings, config, gpus, bus, health, http.url))


async def _plugin(settings: PluginSettings, config: NodeConfig, gpus: Gpus, bus: Bus, health: Health, url: str) -> None:
    """Once the GPUs can be read: one registration per resource, beside watching the GPUs and telling the bus."""
    found = await _read_gpus(gpus)
    topology = plan(config, found)
    for warning in topology.warnings:
        logs.get_logger().warning("plugin.no_seats", reason=warning)
    offer = Offer(
        groups=topology.groups,
        gpus=found,
        seats_dir=settings.run_dir / "seats",
        present=await asyncio.to_thread(_present, found),
        fake_driver=settings.fake_driver if settings.gpus == "fake" else None,
    )
    hints: asyncio.Queue[str] = asyncio.Queue(HINTS)

    def allocated(seat_id: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            hints.put_nowait(seat_id)

    gate = StartGate(offer.seats_dir, settings.gate_seconds)
    node = Node(offer, gate, Probation(frozenset(gpu.uuid for gpu in found)), allocated)
    await asyncio.to_thread(_prepare, gate, offer, settings.device_plugin_dir)
    registrations = [Registration(node, resource, settings.device_plugin_dir) for resource in offer.resources]
    health.conditions.clear()
    health.conditions.update({registration.resource: registration.why_not for registration in registrations})
    async with asyncio.TaskGroup() as group:
        for registration in registrations:
            group.create_task(registration.keep(), name=f"register {registration.resource}")
        group.create_task(_reread(gpus, node, settings.reread_seconds), name="reread GPUs")
        group.create_task(_hint(bus, settings.node, offer, hints), name="hint allocations")
        presence = be_present(bus, "plugin", instance=settings.instance, node=settings.node, url=url)
        group.create_task(presence, name="presence")


async def _read_gpus(gpus: Gpus) -> tuple[Gpu, ...]:
    """The machine's GPUs; waits for a driver that is not there yet, saying so once."""
    said = ""
    while True:
        try:
            found = await gpus.list()
            if found:
                return found
            raise GpuError("this machine has no GPUs; keep the plugin off it with a node selector")
        except GpuError as error:
            if str(error) != said:
                logs.get_logger().warning("plugin.no_gpus", reason=str(error))
            said = str(error)
            await asyncio.sleep(GPU_RETRY_SECONDS)


async def _reread(gpus: Gpus, node: Node, seconds: float) -> NoReturn:
    """A GPU that fell off the bus makes its seats unhealthy; a driver that does not answer proves nothing."""
    while True:
        await asyncio.sleep(seconds)
        try:
            found = await gpus.list()
        except GpuError as error:
            logs.get_logger().warning("plugin.gpus_unread", reason=str(error))
            continue
        if node.probation.read(gpu.uuid for gpu in found):
            logs.get_logger().warning("plugin.health_changed", faulty=sorted(node.probation.faulty))
            node.changed()


async def _hint(bus: Bus, node: str, offer: Offer, hints: "asyncio.Queue[str]") -> NoReturn:
    """Tell that seats were allocated. A hint that cannot be sent is dropped: PodResources tells the same."""
    while True:
        seat = offer.seats[await hints.get()]
        with contextlib.suppress(BusError):
            await bus.publish(
                SeatAllocated(
                    cause=uuid.uuid4().hex,
                    node=node,
                    seat=seat.id,
                    state=SeatState.WAITING,
                    group=seat.group.name,
                )
            )


def _prepare(gate: StartGate, offer: Offer, folder: Path) -> None:
    gate.prepare(offer.seats)
    if folder.is_dir():
        remove_stale(folder)


def _present(gpus: tuple[Gpu, ...]) -> frozenset[str]:
    return frozenset(path for path in device_paths(gpus) if os.path.exists(path))


def main() -> None:
    """Settings, configuration, serve."""
    settings = PluginSettings.from_env_or_exit("kyb-plugin")
    logs.configure("plugin", form=settings.log_format, level=settings.log_level, node=settings.node)
    try:
        config = load(settings.config)
        open_gpus(settings.gpus, settings.fake_driver)
    except (ConfigError, GpuError) as error:
        sys.stderr.write(f"kyb-plugin: {error}\n")
        sys.exit(2)
    lifecycle.main(lambda: serve(settings, config))


if __name__ == "__main__":
    main()
