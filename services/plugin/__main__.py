"""The device plugin: offers this node's seats to kubelet, and holds container starts until they have a ticket.

It works without NATS, which carries only hints, and without the API server, which it asks for conflicting GPU plugins.
"""

import asyncio
import contextlib
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from kybernate import kube, lifecycle, logs
from kybernate.bus.nats import NatsBus
from kybernate.config import ConfigError, NodeConfig, load
from kybernate.gpus import GpuError, open_gpus
from kybernate.health import BusMetrics, Health
from kybernate.lifecycle import PREDECESSOR_SECONDS, alone
from kybernate.node.config import label_decides, load_now
from kybernate.roster import INVENTORY_BUCKET
from kybernate.settings import refused
from services.plugin.coexistence import Neighbours
from services.plugin.gpu_watch import first_reading
from services.plugin.registration import remove_stale
from services.plugin.service import NodePlugin
from services.plugin.settings import PluginSettings


async def serve(settings: PluginSettings, config: NodeConfig | None) -> None:
    """Run until SIGTERM. ``config`` None: the node's label chooses among several configurations."""
    gpus = open_gpus(settings.fakes, settings.fake_driver)
    health = Health()
    health.conditions["gpus"] = lambda: "the GPUs have not been read yet"
    hangup, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    # A hanging driver or disk blocks threads; the start gate needs free ones, however few processors there are.
    loop.set_default_executor(ThreadPoolExecutor(32, "plugin"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(gpus.close)
        http = await stack.enter_async_context(health.server(settings))
        source, name = f"kyb/plugin/{settings.instance}", f"plugin {settings.instance}"
        who = settings.credentials("plugin")
        bus = await stack.enter_async_context(
            NatsBus(settings.nats_url, source=source, name=name, credentials=who, follows=INVENTORY_BUCKET).opened()
        )
        health.registry.register(BusMetrics(cluster=bus))
        url = kube.in_cluster()
        client = kube.Kube(url) if url is not None else None
        if client is not None:
            stack.push_async_callback(client.close)
        neighbours = Neighbours(client, settings.node)

        async def run_plugin() -> None:
            reading = await first_reading(gpus, settings.state_dir)
            chosen = config
            if chosen is None:
                health.conditions["gpus"] = lambda: (
                    "waits for the API server: the node's label chooses the configuration"
                )
                chosen = await load_now(settings.config, settings.node, client)
            plugin = NodePlugin(settings, chosen, reading, gpus, bus, health, neighbours, hangup=hangup)
            health.conditions.pop("gpus")
            await plugin.run()

        logs.get_logger().info("plugin.serving", url=http.url, config=str(settings.config))
        await lifecycle.run(plugin=run_plugin())


def _exit_unless_alone(settings: PluginSettings) -> None:
    """Exit if another plugin serves this node: kubelet would disconnect two plugins of one resource in turn."""
    deadline = time.monotonic() + PREDECESSOR_SECONDS
    folder = settings.device_plugin_dir
    while live := remove_stale(folder) if folder.is_dir() else []:
        if time.monotonic() > deadline:
            remedy = "one plugin per node; stop it, or give this one another KYB_KUBELET_DIR"
            sys.stderr.write(f"kyb-plugin: another device plugin serves {', '.join(live)}; {remedy}\n")
            raise SystemExit(1)
        time.sleep(0.1)


def main() -> None:
    """Read settings and configuration, take the node lock, serve."""
    settings = PluginSettings.from_env_or_exit("kyb-plugin")
    logs.configure("plugin", form=settings.log_format, level=settings.log_level, node=settings.node)
    with refused("kyb-plugin", ConfigError, GpuError):
        config = None if label_decides(settings.config) else load(settings.config)
        open_gpus(settings.fakes, settings.fake_driver)
    with alone(settings.run_dir, "plugin"):
        _exit_unless_alone(settings)
        lifecycle.main(lambda: serve(settings, config), ConfigError, GpuError)


if __name__ == "__main__":
    main()
