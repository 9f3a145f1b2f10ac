"""The GPU manager of one node: settings → open → run."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp

from kybernate import lifecycle, logs
from kybernate.bus.nats import NatsBus
from kybernate.bus.node_socket import connecting
from kybernate.clock import Clock
from kybernate.config import ConfigError, NodeConfig, load
from kybernate.files import changes
from kybernate.gpus import GpuError, Gpus, open_gpus
from kybernate.health import BusMetrics, Health
from kybernate.kube import Kube, in_cluster
from kybernate.lifecycle import alone_in_both
from kybernate.logs import get_logger
from kybernate.node import known_gpus
from kybernate.node.config import label_decides, load_now
from kybernate.node.host_memory import open_host_memory
from kybernate.node.known_gpus import KnownGpus
from kybernate.policy import UNUSABLE
from kybernate.presence import NodePresence
from kybernate.roster import BUCKET
from kybernate.settings import refused
from kybernate.topology import Group, Topology, plan
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.riders import host_memory, lanes
from services.gpu_manager.core.seat_pod import with_owned
from services.gpu_manager.core.state import NodeSetup
from services.gpu_manager.engines import EngineProbes
from services.gpu_manager.gpu_processes import GpuProcesses
from services.gpu_manager.http import routes
from services.gpu_manager.ledger import LedgerFile
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.manager import Manager
from services.gpu_manager.metrics import ManagerMetrics
from services.gpu_manager.pod_conditions import PodConditions
from services.gpu_manager.pod_events import PodEvents
from services.gpu_manager.pods import ApiServerPods, KubeletPods, Pods, PodsError, wishes_matter
from services.gpu_manager.publish import GateFiles
from services.gpu_manager.settings import ManagerSettings

BUS_SECONDS = 1.0
"""Wall: how long a manager that starts waits for the cluster bus, on which another one of its node could object."""


@dataclass
class GroupSources:
    """What groups are formed of; a job that finds a change puts it here and raises ChangedError."""

    config: NodeConfig | None
    """None: the node's label says which of several it is."""
    known: KnownGpus | None = None
    """The GPUs; None: read them."""


async def serve(settings: ManagerSettings, sources: GroupSources, lock: str) -> None:
    """Run until cancelled. Raises ChangedError when it is to be called again. ``lock``: identity of the lock file."""
    clock = Clock(settings.speed)
    async with contextlib.AsyncExitStack() as stack:
        gpus = open_gpus(settings.fakes, settings.fake_driver)
        stack.push_async_callback(gpus.close)
        api = in_cluster()
        kube = None if api is None else Kube(api)
        if kube is not None:
            stack.push_async_callback(kube.close)
        config = sources.config = sources.config or await load_now(settings.config, settings.node, kube)
        known = sources.known = sources.known or await _read_gpus(settings, gpus)
        topology = _planned(config, known)
        _log_groups(config, topology)
        ledger = LedgerFile(settings.ledger)
        policy = GuardedPolicy(config.policy.name, config.policy.build())
        setup = NodeSetup(
            node=settings.node,
            groups=with_owned(topology.groups, ledger.read(), known),
            policy=policy,
            tiers=config.all_tiers,
            reserved=config.reserved,
            drain_seconds=config.drain_seconds,
            warmup=config.warmup,
            start_within_seconds=config.start_within_seconds,
            host_bytes=host_memory.budget(config.host_memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            lanes=lanes.resolve(config.lanes, known.gpus),
        )
        board = Board(setup)
        source, name = f"kyb/gpu-manager/{settings.node}", f"manager {settings.node}"
        who = settings.credentials("manager")
        bus = await stack.enter_async_context(
            NatsBus(settings.nats_url, source=source, name=name, credentials=who, follows=BUCKET).opened()
        )
        node_bus = await stack.enter_async_context(connecting(settings.node_socket))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        pods = open_pods(settings, setup.groups, kube)
        stack.push_async_callback(pods.close)
        health = Health()
        health.registry.register(BusMetrics(cluster=bus, node=node_bus))
        manager = Manager(
            board=board,
            bus=bus,
            node_bus=node_bus,
            pods=pods,
            gate=GateFiles(settings.run_dir),
            ledger=ledger,
            clock=clock,
            engines=EngineProbes(session),
            gpu_processes=GpuProcesses(gpus, settings.helpers_dir),
        )
        health.conditions["bus"] = lambda: (
            None if bus.connected else f"no connection to NATS at {settings.nats_url.rsplit('@')[-1]}"
        )
        health.conditions["checkpointer"] = lambda: (
            None if node_bus.connected else f"no checkpointer listens at {settings.node_socket}"
        )
        health.conditions["ledger"] = manager.stalled
        health.conditions["recovered"] = lambda: None if board.node.recovered else "still reading its seats"
        ManagerMetrics(health.registry, manager, policy)
        http = await stack.enter_async_context(
            health.server(settings, routes(manager, policy, open_host_memory(settings.fake_driver)))
        )
        board.node.manager_url = http.url
        presence = NodePresence(
            bus,
            instance=settings.instance,
            node=settings.node,
            lock=lock,
            url=http.url,
            routers=manager.counted,
            rows=manager.roster.rows,
        )
        manager.on_router = presence.at_once.set

        async def manage() -> None:
            await presence.claim(BUS_SECONDS)
            await manager.run()

        more = {}
        if kube is not None:
            events = PodEvents(kube)
            manager.roster.on_record.append(events.take)
            more["pod_events"] = events.run()
        if kube is not None and settings.pod_conditions:
            conditions = PodConditions(kube)
            manager.roster.on_record.append(conditions.take)
            more["pod_conditions"] = conditions.run()
        await lifecycle.together(
            **more,
            manager=manage(),
            config=_until_reconfigured(settings, sources, kube),
            gpus=_until_gpus_changed(settings, sources),
            presence=presence.keep(),
            bus=bus.closed(),
        )


class ChangedError(Exception):
    """Configuration or GPUs changed and can be used: restart with them in this process."""


async def _until_reconfigured(settings: ManagerSettings, sources: GroupSources, kube: Kube | None) -> None:
    """Raises ChangedError. A configuration that cannot be used is logged, and the present one stays."""
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    async for _ in changes(settings.config, hangup):
        try:
            fresh = await load_now(settings.config, settings.node, kube)
            _planned(fresh, sources.known or KnownGpus())
        except ConfigError as error:
            get_logger().error("config.refused", reason=str(error), meaning="the one before stays in force")
            continue
        if sources.config is None or fresh.model_dump() != sources.config.model_dump():
            get_logger().info("config.applied", config=fresh.chosen)
            sources.config = fresh
            raise ChangedError


async def _until_gpus_changed(settings: ManagerSettings, sources: GroupSources) -> None:
    """Raises ChangedError once the plugin has seen GPUs that make other groups here: both form the same."""
    async for _ in changes(settings.state_dir / known_gpus.FILE, asyncio.Event(), seconds=known_gpus.LOOK_SECONDS):
        fresh = await asyncio.to_thread(known_gpus.load, settings.state_dir)
        config, before = sources.config, sources.known
        if not fresh.gpus or fresh == before or config is None or before is None:
            continue
        try:
            same = _planned(config, fresh).groups == _planned(config, before).groups
        except ConfigError as error:
            get_logger().error("gpus.refused", reason=str(error), meaning="the groups stay as they are")
            continue
        sources.known = fresh
        if not same:
            get_logger().info("gpus.changed", gpus=[gpu.index for gpu in fresh.gpus])
            raise ChangedError


def _planned(config: NodeConfig, known: KnownGpus) -> Topology:
    """The groups. Raises ConfigError."""
    return plan(config, known.gpus, known.links, known.instances, lenient=True)


async def _read_gpus(settings: ManagerSettings, gpus: Gpus) -> KnownGpus:
    """Read the GPUs, and write them for the plugin. Raises GpuError."""
    seen = await gpus.list(), await gpus.links(), await gpus.instances()
    return await asyncio.to_thread(known_gpus.learn, settings.state_dir, *seen)


def _log_groups(config: NodeConfig, topology: Topology) -> None:
    """Log which configuration it is, which groups it forms here, and why."""
    log = get_logger()
    log.info("manager.configured", config=config.chosen, note=config.note)
    for group in topology.groups:
        indices = [gpu.index for gpu in group.gpus]
        log.info("group.formed", group=group.name, gpus=indices, resource=group.profile.resource, why=group.why)
    for warning in topology.warnings:
        log.warning("topology.warning", reason=warning)
    for policy, why in UNUSABLE.items():
        log.error("policy.unusable", policy=policy, reason=why, meaning="no configuration can name it")


def open_pods(settings: ManagerSettings, groups: Iterable[Group], kube: Kube | None) -> Pods:
    """The source of pods that the settings name. Raises PodsError without one."""
    if settings.kubelet_url:
        return KubeletPods(settings.kubelet_url, settings.pod_resources)
    if kube is None:
        raise PodsError("KUBERNETES_SERVICE_HOST is not set: this is no pod; set KYB_KUBELET_URL")
    return ApiServerPods(kube, settings.node, settings.pod_resources, wishes=wishes_matter(groups))


def main() -> None:
    """Settings, configuration, lock, serve."""
    settings = ManagerSettings.from_env_or_exit("kyb-gpu-manager")
    logs.configure("gpu-manager", form=settings.log_format, level=settings.log_level, node=settings.node)
    with refused("kyb-gpu-manager", ConfigError):
        config = None if label_decides(settings.config) else load(settings.config)

    async def run() -> None:
        sources, task = GroupSources(config), asyncio.current_task()
        while task is not None and not task.cancelling():  # a stop that arrived together with a change counts
            try:
                # A separate task: a TaskGroup of Python 3.11 that failed leaves its task marked as cancelled.
                await asyncio.create_task(serve(settings, sources, lock))
            except* ChangedError as group:
                get_logger().debug("manager.restarting", changes=len(group.exceptions))
        raise asyncio.CancelledError

    with alone_in_both(settings.run_dir, settings.state_dir, "gpu-manager") as lock:
        # Signals are handled all the time, also between the end of one run and the beginning of the next.
        lifecycle.main(lambda: lifecycle.run(manager=run()), ConfigError, GpuError)


if __name__ == "__main__":
    main()
