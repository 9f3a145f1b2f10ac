"""What a router knows of the requests at others: reported every 2 s, all together; and of gateways at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.messages import NodeTrafficSignal, RouterLoad, TrafficSignal
from kybernate.messages.signals import LONGEST_NAME, MOST_LOAD_PARTS, MOST_REQUESTS
from services.router import level_publisher
from services.router.core.admission import Limits
from services.router.core.managers import RouterIdentity
from services.router.core.reports import MOST_PARTS, Loads, RouterLevel
from services.router.core.traffic import Traffic
from services.router.level_publisher import LevelPublisher
from services.router.level_watch import LevelWatch
from services.router.outside_load import Place
from tests.router.world import world
from tests.until import until


def signal(number: int = 0, **more: object) -> NodeTrafficSignal:
    fields = {"cause": "c", "source": "router-1", "model": "gemma", "seat": "s1", "node": "n1", "waiting": 3}
    return NodeTrafficSignal.model_validate(fields | {"seq": number} | more)


def load(waiting: int, in_flight: int = 0, *, source: str = "router-1", part: int = 0, seat: str = "s1") -> RouterLoad:
    flying: Mapping[str, Mapping[str, int]] = {"gemma": {seat: in_flight}} if in_flight else {}
    fields = {"cause": "c", "source": source, "part": part, "in_flight": flying}
    return RouterLoad.model_validate(fields | {"waiting": {"gemma": {seat: (waiting, 2.0)}} if waiting else {}})


class Cluster:
    """A watch of one router, and what others publish."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus, self.other = MemoryBus(self.server), MemoryBus(self.server)
        self.server.buses += [self.bus, self.other]
        self.server.notify()
        self.loads = Loads("router-0")
        self.task: asyncio.Task[None] | None = None

    async def start(self, *, exact: bool = False) -> None:
        self.watch = LevelWatch(self.bus, self.loads, exact=exact)
        self.task = asyncio.create_task(self.watch.run())
        await until(lambda: self.watch.since, what="the watch has begun")

    @property
    def waiting(self) -> int:
        return self.loads.of("gemma", "s1", time.monotonic()).waiting


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    if cluster.task is not None:
        cluster.task.cancel()
        with suppress(asyncio.CancelledError):
            await cluster.task


async def test_a_router_receives_what_another_one_has_in_one_message_and_none_of_its_levels(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.other.publish(signal(waiting=9))
    await cluster.other.publish(load(3))
    await until(lambda: cluster.waiting == 3, what="the load is known")
    await cluster.other.publish(load(0))
    await until(lambda: cluster.waiting == 0, what="the last one is forgotten")


async def test_a_router_that_decides_by_levels_receives_each(cluster: Cluster) -> None:
    await cluster.start(exact=True)
    await cluster.other.publish(load(3))
    await cluster.other.publish(signal(waiting=7))
    await until(lambda: cluster.waiting == 7, what="the level is known")


async def test_a_gateway_that_publishes_to_nats_is_known(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.other.publish(TrafficSignal(cause="c", source="pod-3", model="gemma", seat="s1", waiting=4))
    await until(lambda: cluster.waiting == 4, what="the level is known")


def test_loads_of_routers_add_up_and_replace_themselves() -> None:
    loads = Loads("router-0")
    loads.replace(load(3, 1), 0.0)
    loads.replace(load(4, source="router-2"), 0.0)
    loads.replace(load(2, part=1, seat=""), 0.0)
    loads.replace(load(50, source="router-0"), 0.0)
    assert loads.of("gemma", "s1", 0.0).waiting == 7, "its own levels are added as they change"
    assert loads.of("gemma", "s1", 0.0, unassigned=True).waiting == loads.of("gemma", None, 0.0).waiting == 9
    assert sorted(loads.waiting(0.0)) == [("gemma", "", 2, 2.0), ("gemma", "s1", 3, 2.0), ("gemma", "s1", 4, 2.0)]
    assert list(loads.in_flight(0.0)) == [("gemma", 1)]
    loads.replace(load(0), 1.0)
    assert loads.of("gemma", None, 1.0).waiting == 6
    assert loads.of("gemma", None, 6.5).waiting == 0, "those that were not repeated have expired"
    loads.forget(9.0)
    assert not loads._routers


def test_a_level_for_any_node_of_a_router_that_reported_it_counts_once() -> None:
    loads = Loads("router-0")
    loads.replace(load(3), 0.0)
    loads.add(TrafficSignal(cause="c", source="router-1", model="gemma", waiting=3), 0.0)
    assert loads.of("gemma", None, 0.0).waiting == 3


def test_a_report_replaces_what_its_router_sent_before_one_by_one() -> None:
    loads = Loads("router-0")
    loads.add(TrafficSignal(cause="c", source="router-1", model="gemma", waiting=3), 0.0)
    loads.add(TrafficSignal(cause="c", source="pod-1", model="gemma", waiting=5), 0.0)
    loads.replace(load(3), 1.0)
    assert (loads.of("gemma", None, 1.0).waiting, loads.count) == (8, 1)
    loads.replace(load(0), 2.0)
    assert loads.of("gemma", None, 2.0).waiting == 5


def test_a_level_for_any_node_counts_once_the_report_of_its_router_has_expired() -> None:
    loads = Loads("router-0")
    loads.replace(load(3), 0.0)
    loads.add(TrafficSignal(cause="c", source="router-1", model="gemma", waiting=4), 6.5)
    assert loads.of("gemma", None, 6.5).waiting == 4


def test_routers_without_end_are_ignored() -> None:
    loads = Loads("router-0")
    for number in range(MOST_PARTS + 10):
        loads.replace(load(1, source=f"router-{number + 1}"), 0.0)
    assert loads.of("gemma", "s1", 0.0).waiting == MOST_PARTS


async def test_a_router_tells_the_others_what_it_has_and_what_gateways_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(level_publisher, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(level_publisher, "PART_BYTES", 300)
    async with world() as w:
        await w.seat("s1", "gemma")
        reported: list[RouterLoad] = []
        async with w.bus.subscribe(RouterLoad.pattern()) as messages:
            for source in ("pod-1", "pod-2"):
                event = {"specversion": "1.0", "id": "e", "source": source, "data": {"model": "gemma", "waiting": 4}}
                assert (await w.call("POST", "/v1/signals", json=event)).status == 202
            async for message in messages:
                assert isinstance(message, RouterLoad)
                reported.append(message)
                if sum(len(each.relayed) for each in reported) == 2:
                    break
        assert {signal.source for each in reported for signal in each.relayed} == {"pod-1", "pod-2"}
        assert max(len(each.relayed) for each in reported) == 1
        other = Loads("router-1")
        for each in reported:
            other.replace(each, 0.0)
        assert other.of("gemma", "s1", 0.0).waiting == 8


class Wire:
    """A bus that takes a megabyte, as NATS does, and none of the parts that it ``refuses``."""

    def __init__(self, *refuses: int) -> None:
        self.refuses = refuses
        self.sent: list[RouterLoad] = []
        self.refused = 0

    async def publish(self, load: RouterLoad) -> None:
        if len(load.body()) > 2**20 or load.part in self.refuses:
            self.refused += 1
            raise BusError("nats: maximum payload exceeded")
        self.sent.append(load)

    def rows(self) -> set[tuple[str, str]]:
        return {(model, seat) for load in self.sent for model, seats in load.waiting.items() for seat in seats}

    def relayed(self) -> set[str]:
        return {signal.source for load in self.sent for signal in load.relayed}


def long(number: int) -> str:
    return f"{number:06}".ljust(LONGEST_NAME, "\N{SNOWMAN}")


@asynccontextmanager
async def reporting(monkeypatch: pytest.MonkeyPatch, wire: Wire, levels: int, waiting: int = 1) -> AsyncIterator[Any]:
    """A router with this many levels, of as many waiting requests, reports to the wire."""
    monkeypatch.setattr(level_publisher, "REPORT_SECONDS", 0.02)
    traffic = Traffic(Limits(), RouterIdentity("router-1", "i1"))
    publisher = LevelPublisher(cast(Bus, wire), traffic, Clock(), "router-1")
    for name in map(long, range(levels)):
        publisher._busy[name, "key"] = RouterLevel(waiting, seat=name, oldest_wait=1.0)
    task = asyncio.create_task(publisher.report())
    try:
        yield publisher
        assert not task.done()
    finally:
        task.cancel()


async def test_long_names_are_reported_in_parts_that_nats_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    async with reporting(monkeypatch, wire, 1000) as publisher:
        for name in map(long, range(500)):
            fields = {"cause": "c", "id": name, "source": name, "model": name, "tier": name}
            publisher.relay(TrafficSignal.model_validate(fields))
        await until(lambda: len(wire.rows()) == 1000 and len(wire.relayed()) == 500, what="all arrived")
    assert not wire.refused


async def test_a_part_that_is_refused_is_logged_once_and_the_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_publisher, "PART_BYTES", 1)
    wire = Wire(0)
    with capture_logs() as logs:
        async with reporting(monkeypatch, wire, 3):
            await until(lambda: wire.refused == 3, what="it was tried three times")
    assert wire.rows() == {(long(1), long(1)), (long(2), long(2))}
    assert [(line["event"], line["error"]) for line in logs] == [("load.not_sent", "nats: maximum payload exceeded")]


async def test_no_load_ends_the_reports_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_publisher, "PART_BYTES", 1)
    wire = Wire()
    with capture_logs() as logs:
        async with reporting(monkeypatch, wire, MOST_LOAD_PARTS + 1, waiting=MOST_REQUESTS + 1):
            await until(lambda: len(wire.sent) > MOST_LOAD_PARTS, what="the load was reported twice")
    assert {load.part for load in wire.sent} == set(range(MOST_LOAD_PARTS))
    assert wire.sent[0].waiting == {long(0): {long(0): (MOST_REQUESTS, 1.0)}}
    assert [line["event"] for line in logs] == ["load.not_sent"]


async def test_levels_that_a_router_publishes_for_others_are_its_own_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(_: LevelWatch) -> None:
        await asyncio.Event().wait()  # it is not subscribed

    monkeypatch.setattr(LevelWatch, "run", deaf)
    async with world() as w:
        await w.seat("s1", "gemma")
        event = {"specversion": "1.0", "id": "e", "source": "gateway", "data": {"model": "gemma", "waiting": 4}}
        assert (await w.call("POST", "/v1/signals", json=event)).status == 202
        assert w.router.loads.of("gemma", "s1", time.monotonic()).waiting == 4
        await w.router.outside._publish(Place("prometheus/*", "gemma"), 5, 60.0)
        assert w.router.loads.of("gemma", None, time.monotonic()).waiting == 9
