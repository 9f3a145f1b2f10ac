"""``docs/metrics.md``, from the metrics that each service registers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kybernate.clock import Clock
from kybernate.health import BusMetrics, Health
from kybernate.machine import GpuSensors
from kybernate.policy.rules import Quantum
from services.checkpointer.metrics import CheckpointerMetrics
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.metrics import ManagerMetrics
from services.plugin.publish import PluginMetrics
from services.router.metrics import Metrics
from services.webhook.__main__ import application
from tests.manager.world import World

PATH = "docs/metrics.md"

_HEAD = """# Metrics

Every service answers `GET /metrics` in Prometheus' text format. This page is made from the metrics that the services
register. [Operate](operate.md#is-it-well) says which values are healthy, [alerts](alerts.md) what each alert means.

| service | port in the chart and in Compose |
|---|---|
| device plugin | 9470 |
| GPU manager | 9471 |
| checkpointer | 9472 |
| webhook | 9473 |
| router | 9474 |
| console | 9475; in Compose 8781 |

`make up` prints no such ports: its router serves metrics at the address of the API, for example
`http://127.0.0.1:8780/metrics`. In a cluster `monitoring.enabled=true` makes PodMonitors,
`monitoring.prometheusRule.enabled=true` the alerts and `monitoring.dashboards.enabled=true` the Grafana dashboards.

A *counter* only grows: use `rate()` or `increase()`. A *histogram* has the series `_bucket`, `_sum` and `_count`.
*Model seconds* differ from wall seconds only with fake GPUs at another speed. `seat` and `group` are the names that
`kyb status -o json` has; `gpu` is the UUID, as DCGM writes it. A model is a label once a seat serves it; other names
count as `unknown`. Every service also has the `process_` metrics of Prometheus' client. The labels `pod`, `job` and
`namespace` are added by Prometheus.
"""


def documents() -> dict[str, str]:
    """The page by its path."""
    sections = [_HEAD]
    for title, registry in _registries():
        rows = sorted(_rows(registry))
        lines = [f"| `{name}` | {kind} | {labels} | {text} |\n" for name, kind, labels, text in rows]
        sections.append(f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n" + "".join(lines))
    return {PATH: "".join(sections)}


def _registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """Title and the metrics of each service, on parts that hold nothing."""
    empty: Any = SimpleNamespace(waiting_seconds=0.0, hangs=0, stuck=(), reserved_bytes=lambda: 0)
    router = CollectorRegistry()
    parts: Any = SimpleNamespace(connected=True, upstreams={}, models={}, total=0, open=0, dropped=0, used={})
    Metrics(router, Clock(), *[parts] * 6)
    yield "Router", router
    world, manager = World(), CollectorRegistry()
    world.boot()
    shell: Any = SimpleNamespace(node=world.node, now=lambda: world.now, observe=None, observe_write=None)
    ManagerMetrics(manager, shell, GuardedPolicy("quantum", Quantum()))
    yield "GPU manager", manager
    checkpointer = CollectorRegistry()
    CheckpointerMetrics(checkpointer, "", empty, empty, empty)
    yield "Checkpointer", checkpointer
    plugin = CollectorRegistry()
    watch: Any = SimpleNamespace(sensors=(GpuSensors("", 0, 0.0, 0.0),))
    no_seats: Any = SimpleNamespace(offer=SimpleNamespace(seats={}))
    PluginMetrics(plugin, "", no_seats, watch)
    yield "Device plugin", plugin
    webhook, every = Health(), Health()
    settings: Any = SimpleNamespace(config=None)
    application(settings, webhook)
    own = {family.name for family in every.registry.collect()}
    for collector in list(webhook.registry._collector_to_names):
        if {family.name for family in collector.collect()} <= own:
            webhook.registry.unregister(collector)
    yield "Webhook", webhook.registry
    bus: Any = SimpleNamespace(troubles={})
    every.registry.register(BusMetrics(cluster=bus))
    yield "Every service", every.registry  # the bus' where a service has one


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, labels and help of each metric, without those of the client about its process. Labels are in no
    public attribute of either kind."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            of: Any = collector if isinstance(collector, MetricWrapperBase) else family
            labels = ", ".join(f"`{label}`" for label in getattr(of, "_labelnames", ()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith("process_"):
                continue
            yield name, family.type, labels, family.documentation.replace("|", "\\|")
