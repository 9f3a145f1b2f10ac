"""The GPU manager of one node: settings → open → run."""

import asyncio
import contextlib
import signal
import sys
from typing import NoReturn

import aiohttp
from aiohttp import web

from kybernate import lifecycle, logs
from kybernate.bus import open_bus
from kybernate.clock import Clock
from kybernate.config import ConfigError, NodeConfig, load
from kybernate.config_watch import changes
from kybernate.gpus import GpuError, open_gpus
from kybernate.health import Health, HttpServer
from kybernate.kube import Kube, in_cluster
from kybernate.ledger import LedgerFile
from kybernate.logs import get_logger
from kybernate.node_config import label_decides, load_by_label, load_now
from kybernate.node_lock import alone
from kybernate.presence import be_present
from kybernate.topology import Topology, plan
from services.gpu_manager.board import Board
from services.gpu_manager.engines import Engines
from services.gpu_manager.foreign import Watch
from services.gpu_manager.gate import Gate
from services.gpu_manager.manager import Manager
from services.gpu_manager.owned import Machine, with_owned
from services.gpu_manager.pods import ApiServerPods, KubeletPods, Pods
from services.gpu_manager.settings import ManagerSettings
from services.gpu_manager.status import routes


async def serve(settings: ManagerSettings, config: NodeConfig | None, machine: Machine | None = None) -> None:
    """Run until SIGTERM. Without a configuration, the node's label says which of several it is.

    ``machine``: what was found before the configuration changed. The plugin forms groups of what it found at its start
    too: read anew, a GPU lost meanwhile would make groups of other GPUs here than there.
    """
    clock = Clock(settings.speed)
    source = f"kyb/gpu-manager/{settings.node}"
    async with contextlib.AsyncExitStack() as stack:
        gpus = open_gpus(settings.gpus, settings.fake_driver)
        stack.push_async_callback(gpus.close)
        config = config or await _by_label(settings)
        machine = machine or Machine(await gpus.list(), await gpus.links(), await gpus.instances())
        topology = plan(config, *machine)
        _say(config, topology)
        ledger = LedgerFile(settings.state_dir / "ledger")
        board = Board(
            node=settings.node,
            groups=with_owned(topology.groups, ledger.read(), machine),
            policy=config.policy.build(),
            drain_seconds=config.drain_seconds,
            warmup=config.warmup,
            start_within_seconds=config.start_within_seconds,
        )
        bus = await stack.enter_async_context(
            open_bus(settings.nats_url, source=source, name=f"manager {settings.node}")
        )
        node_bus = bus
        if settings.node_nats_url is not None:
            node_bus = await stack.enter_async_context(
                open_bus(settings.node_nats_url, source=source, name=f"manager {settings.node}")
            )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        pods = open_pods(settings)
        stack.push_async_callback(pods.close)
        health = Health()
        manager = Manager(
            board=board,
            bus=bus,
            node_bus=node_bus,
            pods=pods,
            gate=Gate(settings.run_dir),
            ledger=ledger,
            clock=clock,
            engines=Engines(session),
            strangers=Watch(gpus),
        )
        health.conditions["bus"] = lambda: None if bus.connected else f"no connection to {settings.nats_url}"
        health.conditions["recovered"] = lambda: None if board.recovered else "still looking at its seats"
        app = web.Application()
        app.add_routes([*health.routes(), *routes(manager, health.registry)])
        http = await stack.enter_async_context(HttpServer(app, settings.health_host, settings.health_port))
        board.manager_url = http.url
        await lifecycle.run(
            manager=manager.run(),
            config=_until_changed(settings, config, machine),
            presence=be_present(bus, "gpu-manager", instance=settings.instance, node=settings.node, url=http.url),
            bus=bus.closed(),
            node_bus=node_bus.closed(),
        )


class ReconfiguredError(Exception):
    """The configuration changed and can be used: begin again with it, as after a restart."""

    def __init__(self, config: NodeConfig, machine: Machine) -> None:
        super().__init__("the configuration changed")
        self.config, self.machine = config, machine


async def _until_changed(settings: ManagerSettings, config: NodeConfig, machine: Machine) -> NoReturn:
    """Raises ReconfiguredError. A configuration that cannot be used is said, and the present one stays."""
    url = in_cluster()
    client = Kube(url) if url is not None else None
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        async for _ in changes(settings.config, hangup):
            try:
                fresh = await load_now(settings.config, settings.config_name, settings.node, client)
                plan(fresh, *machine)
            except ConfigError as error:
                get_logger().error("config.refused", reason=str(error), meaning="the one before stays in force")
                continue
            if fresh.model_dump() != config.model_dump():
                get_logger().info("config.applied", config=fresh.chosen)
                raise ReconfiguredError(fresh, machine)
    finally:
        if client is not None:
            await client.close()
    raise AssertionError("changes ended")


async def _by_label(settings: ManagerSettings) -> NodeConfig:
    client = Kube(in_cluster() or "")
    try:
        return await load_by_label(settings.config, settings.node, client)
    finally:
        await client.close()


def _say(config: NodeConfig, topology: Topology) -> None:
    """Which configuration it is, what it makes here, and why."""
    log = get_logger()
    log.info("manager.configured", config=config.chosen, note=config.note)
    for group in topology.groups:
        indices = [gpu.index for gpu in group.gpus]
        log.info("group.formed", group=group.name, gpus=indices, resource=group.profile.resource, why=group.why)
    for warning in topology.warnings:
        log.warning("topology.warning", reason=warning)


def open_pods(settings: ManagerSettings) -> Pods:
    """The source of pods that the settings name."""
    if settings.pods == "kubelet":
        return KubeletPods(settings.kubelet_url, settings.pod_resources)
    return ApiServerPods(settings.node, settings.pod_resources)


def main() -> None:
    """Settings, configuration, lock, serve."""
    settings = ManagerSettings.from_env_or_exit("kyb-gpu-manager")
    logs.configure("gpu-manager", form=settings.log_format, level=settings.log_level, node=settings.node)
    try:
        by_label = label_decides(settings.config, settings.config_name)
        config = None if by_label else load(settings.config, settings.config_name)
    except ConfigError as error:
        sys.stderr.write(f"kyb-gpu-manager: {error}\n")
        raise SystemExit(2) from None

    async def run() -> None:
        present, machine = config, None
        while True:
            try:
                await serve(settings, present, machine)
                return
            except* (ConfigError, GpuError) as group:
                for error in group.exceptions:
                    logs.get_logger().error("manager.cannot_start", reason=str(error))
                raise
            except* ReconfiguredError as group:
                (changed,) = (error for error in group.exceptions if isinstance(error, ReconfiguredError))
                present, machine = changed.config, changed.machine

    with alone(settings.run_dir, "gpu-manager"):
        lifecycle.main(run)


if __name__ == "__main__":
    main()
