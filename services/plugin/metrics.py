"""The device plugin's metrics."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_GATE = (0.1, 0.5, 1, 2.5, 5, 10, 15, 20, 25, 30)


class PluginMetrics(Collector):
    """Allocations, waits at the start gate, and offered seats."""

    def __init__(self, registry: CollectorRegistry, offered: Callable[[], Mapping[str, int]]) -> None:
        self._offered = offered
        text = "Seats that kubelet allocated to a container"
        self.allocations = Counter("kybernate_plugin_allocations", text, registry=registry)
        text = "Wall seconds of a call of kubelet at the start gate; granted: its container starts"
        self._gate = Histogram(
            "kybernate_plugin_gate_wait_seconds", text, ["outcome"], buckets=_GATE, registry=registry
        )
        registry.register(self)

    def waited(self, granted: bool, seconds: float) -> None:
        """One call at the start gate has ended."""
        self._gate.labels("granted" if granted else "refused").observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Yield the seats that are offered to kubelet."""
        text = "Seats that are offered to kubelet, by resource"
        gauge = GaugeMetricFamily("kybernate_plugin_seats", text, labels=["resource"])
        for resource, count in self._offered().items():
            gauge.add_metric([resource], count)
        yield gauge
