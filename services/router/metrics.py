"""Metrics of a router, ``kybernate_router_*``. Seconds are wall seconds."""

from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.bus.port import Bus
from kybernate.clock import Clock
from kybernate.http.intake import BodyMemory
from kybernate.messages import WAITED_IN_VAIN
from kybernate.roster import SeatRecord
from services.router.connections import ConnectionLimits
from services.router.core.tenants import Tenants, Used
from services.router.core.upstreams import UpstreamTable
from services.router.request_log import CallRecord, RequestLog

_SWITCH = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 120)
_CONTROL = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)


class Metrics(Collector):
    """All metrics of one router. The gauges are read from its parts at scrape time."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        bus: Bus,
        table: UpstreamTable,
        memory: BodyMemory,
        connections: ConnectionLimits,
        records: RequestLog,
        tenants: Tenants | None,
    ) -> None:
        """``tenants``: None if what they used is not shown."""
        self._clock, self._bus, self._table, self._memory = clock, bus, table, memory
        self._connections, self._records, self._tenants = connections, records, tenants
        registry.register(self)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.requests = counter("kybernate_router_requests", "Answered requests", "model", "code")
        text = "Calls that failed at an engine before the first byte and were routed again"
        self.retries = counter("kybernate_router_retries", text)
        self.cuts = counter("kybernate_router_cuts", "Calls cut because their seat lost its VRAM", "code")
        for code in ("before_first_byte", "after_first_byte"):
            self.cuts.labels(code)
        text = "Requests and connections that were rejected to protect the router and its engines"
        self.rejections = counter("kybernate_router_rejections", text, "reason")
        text = "Requests by whether they were forwarded within their SLO; one that failed while it waited missed it"
        self.slo = counter("kybernate_router_slo_requests", text, "model", "tier", "outcome")
        self.disconnects = counter("kybernate_nats_disconnects", "Losses of the bus")
        self.hold_seconds = histogram(
            "kybernate_router_hold_seconds", "Wait of requests that were held", _SWITCH, "model", "tier"
        )
        text = "From arrival until the first byte of the engine's response"
        self.first_byte_seconds = histogram(
            "kybernate_router_time_to_first_byte_seconds", text, _SWITCH, "model", "tier"
        )
        text = "Part of a hold that is Kybernate's own: arrival to accepted, decision to journal, restored to sent"
        self.control_seconds = histogram("kybernate_router_control_overhead_seconds", text, _CONTROL)
        text = "The three parts of the control overhead: accept, journal, send"
        self.control_part_seconds = histogram("kybernate_router_control_part_seconds", text, _CONTROL, "part")
        text = "From the last backend call of an activation until a held request was sent upstream"
        self.release_seconds = histogram("kybernate_router_release_seconds", text, _CONTROL)
        # Of each request. To find a metric by its labels takes longer than to count.
        self._answered = cache(self.requests.labels)
        self._slo = cache(self.slo.labels)
        self._first_byte = cache(self.first_byte_seconds.labels)

    def answered(self, model: str, code: str) -> None:
        """Count a request."""
        self._answered(model, code).inc()

    def ended(self, call: CallRecord, status: int, *, known: bool, served: bool, seat: SeatRecord | None) -> None:
        """The call has ended. ``served``: with a complete answer of ``seat``, which may be gone; ``known``: its model
        exists."""
        self.answered(call.model if known else "unknown", str(status))
        if served and call.to is not None:
            tier, slo = (seat.tier, seat.slo_seconds) if seat is not None else ("", 0.0)
            if call.to.held_seconds > 0:
                self.hold_seconds.labels(call.model, tier).observe(call.to.held_seconds)
            if call.first_byte_at is not None:
                self._first_byte(call.model, tier).observe(call.first_byte_at - call.arrived_at)
            missed, met = self._slo(call.model, tier, "missed"), self._slo(call.model, tier, "met")  # both begin at 0
            (missed if 0 < slo < self._clock.to_model(call.to.held_seconds) else met).inc()
        elif known and call.reason in WAITED_IN_VAIN:
            self.slo.labels(call.model, "", "missed").inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges. The counters of misses begin at 0 for each model: one that begins at 1 has no increase."""
        upstreams = self._table.upstreams.values()
        for model, tier in {(seat.model, seat.record.tier) for seat in upstreams if seat.model}:
            self.slo.labels(model, tier, "missed")
            self.slo.labels(model, "", "missed")
        text = "Requests that wait for a model now"
        held = GaugeMetricFamily("kybernate_router_held_requests", text, labels=["model"])
        for name, of in self._table.models.items():
            held.add_metric([name], len(of.held))
        yield held
        text = "Requests that an engine answers now"
        in_flight = sum(len(upstream.in_flight) for upstream in upstreams)
        yield GaugeMetricFamily("kybernate_router_in_flight_requests", text, value=in_flight)
        text = "Request bodies in memory, from their first byte until they are answered"
        yield GaugeMetricFamily("kybernate_router_body_bytes", text, value=self._memory.total)
        text = "Open connections of callers"
        yield GaugeMetricFamily("kybernate_router_connections", text, value=self._connections.open)
        text = "Records of requests that were not published: too many, or the bus was away"
        yield CounterMetricFamily("kybernate_router_request_records_dropped", text, value=self._records.dropped)
        if self._tenants is not None:
            yield from _tenants(self._tenants.used)
        text = "1 while connected to NATS"
        yield GaugeMetricFamily("kybernate_router_nats_connected", text, value=float(self._bus.connected))


def _tenants(used: Mapping[tuple[str, str], Used]) -> Iterable[Metric]:
    """Of all tenants, also without any: a reader sees that nothing was used."""
    text = "Requests of a tenant that were admitted"
    requests = CounterMetricFamily("kybernate_router_tenant_requests", text, labels=["tenant", "model"])
    text = "Tokens of a tenant as engines counted them, else estimated"
    tokens = CounterMetricFamily("kybernate_router_tenant_tokens", text, labels=["tenant", "model", "kind"])
    for (tenant, model), of in used.items():
        requests.add_metric([tenant, model], of.requests)
        tokens.add_metric([tenant, model, "prompt"], of.prompt_tokens)
        tokens.add_metric([tenant, model, "completion"], of.completion_tokens)
    return requests, tokens
