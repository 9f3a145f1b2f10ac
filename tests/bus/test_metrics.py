"""The tolerated failures of a bus as a metric."""

from prometheus_client import CollectorRegistry

from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.health import BusMetrics


async def test_tolerated_failures_are_a_metric() -> None:
    server, registry = MemoryServer(), CollectorRegistry()
    async with MemoryBus.connect(server) as bus, MemoryBus.connect(server) as other:
        registry.register(BusMetrics(cluster=bus, node=other))
        bus.dropped, other.dropped = 3, 4

        def count(name: str) -> float | None:
            return registry.get_sample_value("kybernate_bus_troubles_total", {"bus": name, "kind": "dropped"})

        assert (count("cluster"), count("node")) == (3.0, 4.0)
