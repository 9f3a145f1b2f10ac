"""Metrics of a router, ``kybernate_router_*``. Seconds are wall seconds."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SWITCH = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 120)
_CONTROL = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)


class _Gauges(Collector):
    """Values that are read at scrape time."""

    def __init__(
        self, held: Callable[[], Iterable[tuple[str, int]]], in_flight: Callable[[], int], connected: Callable[[], bool]
    ) -> None:
        self._held, self._in_flight, self._connected = held, in_flight, connected

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily(
            "kybernate_router_held_requests", "Requests that wait for a model now", labels=["model"]
        )
        for model, count in self._held():
            gauge.add_metric([model], count)
        sent = GaugeMetricFamily(
            "kybernate_router_in_flight_requests", "Requests that an engine answers now", value=self._in_flight()
        )
        bus = GaugeMetricFamily(
            "kybernate_router_nats_connected", "1 while connected to NATS", value=float(self._connected())
        )
        return [gauge, sent, bus]


class Metrics:
    """All metrics of one router."""

    def __init__(
        self,
        registry: CollectorRegistry,
        held: Callable[[], Iterable[tuple[str, int]]],
        in_flight: Callable[[], int],
        connected: Callable[[], bool] = lambda: True,
    ) -> None:
        registry.register(_Gauges(held, in_flight, connected))
        self.requests = Counter("kybernate_router_requests", "Answered requests", ["model", "code"], registry=registry)
        self.hold_seconds = Histogram(
            "kybernate_router_hold_seconds", "Wait of requests that were held", buckets=_SWITCH, registry=registry
        )
        self.first_byte_seconds = Histogram(
            "kybernate_router_time_to_first_byte_seconds",
            "From arrival until the first byte of the engine's answer",
            buckets=_SWITCH,
            registry=registry,
        )
        self.control_seconds = Histogram(
            "kybernate_router_control_overhead_seconds",
            "Part of a hold that is Kybernate's own: arrival to accepted, decision to journal, restored to sent",
            buckets=_CONTROL,
            registry=registry,
        )
        self.release_seconds = Histogram(
            "kybernate_router_release_seconds",
            "From the last backend call of an activation until a held request was sent upstream",
            buckets=_CONTROL,
            registry=registry,
        )
        self.control_part_seconds = Histogram(
            "kybernate_router_control_part_seconds",
            "The three parts of the control overhead: accept, journal, send",
            ["part"],
            buckets=_CONTROL,
            registry=registry,
        )
        self.switches = Counter(
            "kybernate_router_switches_seen", "Activations that this router received as events", registry=registry
        )
        self.retries = Counter(
            "kybernate_router_retries",
            "Calls that failed at an engine before the first byte and were routed again",
            registry=registry,
        )
        self.cuts = Counter(
            "kybernate_router_cuts", "Calls cut because their seat lost its VRAM", ["code"], registry=registry
        )
        self.disconnects = Counter("kybernate_nats_disconnects", "Losses of the bus", registry=registry)
