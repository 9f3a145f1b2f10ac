"""The tolerated failures of a bus, as a metric of the service that uses it."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.bus.port import Bus


class BusMetrics(Collector):
    """``kybernate_bus_troubles_total`` by bus and kind, read at scrape time. One bus under two names counts once."""

    def __init__(self, **buses: Bus) -> None:
        self._buses = {id(bus): (name, bus) for name, bus in reversed(buses.items())}

    def collect(self) -> Iterable[Metric]:
        """The counts of now."""
        counter = CounterMetricFamily(
            "kybernate_bus_troubles",
            "Messages dropped by a slow reader, requests ignored as forged, reads of a bucket that were incomplete",
            labels=["bus", "kind"],
        )
        for name, bus in self._buses.values():
            for kind, count in bus.troubles.items():
                counter.add_metric([name, kind], count)
        yield counter
