"""A router receives the levels of other sources while they are few, and otherwise while they are read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.messages import NodeTrafficSignal
from services.router import level_watch
from services.router.core.reports import Loads
from services.router.level_watch import FEW, LevelWatch
from services.router.outside_load import Place
from tests.router.world import world
from tests.until import until


def signal(number: int = 0, **more: object) -> NodeTrafficSignal:
    fields = {"cause": "c", "source": "router-1", "model": "gemma", "seat": "s1", "node": "n1", "waiting": 3}
    return NodeTrafficSignal.model_validate(fields | {"seq": number} | more)


class Cluster:
    """A watch of one router, and the signals of another."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus, self.other = MemoryBus(self.server), MemoryBus(self.server)
        self.server.buses += [self.bus, self.other]
        self.server.notify()
        self.watch = LevelWatch(self.bus, Loads())
        self.task: asyncio.Task[None] | None = None

    def start(self, **more: bool) -> None:
        self.watch = LevelWatch(self.bus, Loads(), **more)
        self.task = asyncio.create_task(self.watch.run())

    @property
    def waiting(self) -> int:
        return self.watch.loads.of("gemma", "s1", time.monotonic()).waiting

    async def many(self) -> None:
        """More signals than a router receives unread."""
        for number in range(FEW + 1):
            await self.other.publish(signal(number))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(level_watch, "COMPLETE_SECONDS", 0.1)
    monkeypatch.setattr(level_watch, "READ_SECONDS", 0.2)
    monkeypatch.setattr(level_watch, "WINDOW_SECONDS", 60.0)  # a slow machine sends few signals in 4 s
    cluster = Cluster()
    yield cluster
    if cluster.task is not None:
        cluster.task.cancel()
        with suppress(asyncio.CancelledError):
            await cluster.task


async def test_few_signals_are_received_though_none_is_read(cluster: Cluster) -> None:
    cluster.start()
    await until(lambda: cluster.watch.since, what="the watch has begun")
    await cluster.other.publish(signal())
    await until(lambda: cluster.waiting == 3, what="the level is known")
    assert await cluster.watch.read() is cluster.watch.loads


async def test_many_signals_are_received_only_while_they_are_read(cluster: Cluster) -> None:
    cluster.start()
    await until(lambda: cluster.watch.since, what="the watch has begun")
    await cluster.many()
    await until(lambda: cluster.watch.since is None, what="the watch has ended")
    assert not cluster.server.inboxes, "the server delivers no signal to this router"

    reading = asyncio.create_task(cluster.watch.read())
    await until(lambda: cluster.server.inboxes, what="it receives signals again")
    await cluster.other.publish(signal(FEW + 1, waiting=7))
    assert (await reading).of("gemma", "s1", time.monotonic()).waiting == 7

    await cluster.many()

    async def ended() -> bool:
        await cluster.other.publish(signal(FEW + 2))
        return cluster.watch.since is None

    await until(ended, what="the first signal after the reading ends the watch again")


async def test_a_reader_keeps_many_signals_coming(cluster: Cluster) -> None:
    cluster.start(always=True)
    await until(lambda: cluster.watch.since, what="the watch has begun")
    await cluster.many()
    await cluster.other.publish(signal(FEW + 1, waiting=7))
    await until(lambda: cluster.waiting == 7, what="the last level is known")
    assert cluster.watch.since is not None


async def test_it_looks_again_whether_signals_are_few(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_watch, "LOOK_SECONDS", 0.05)
    cluster.start()
    await until(lambda: cluster.watch.since, what="the watch has begun")
    await cluster.many()
    await until(lambda: cluster.watch.since is None, what="the watch has ended")
    await until(lambda: cluster.watch.since, what="it has looked")
    await cluster.other.publish(signal(FEW + 1, waiting=7))
    await until(lambda: cluster.waiting == 7, what="the level is known")


async def test_without_the_bus_a_reader_does_not_wait(cluster: Cluster) -> None:
    cluster.server.stop()
    await cluster.watch.read()
    assert cluster.watch.since is None


async def test_levels_that_a_router_publishes_for_others_are_its_own_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    async def many(_: LevelWatch) -> None:
        await asyncio.Event().wait()  # it is not subscribed

    monkeypatch.setattr(LevelWatch, "run", many)
    async with world() as w:
        await w.seat("s1", "gemma")
        event = {"specversion": "1.0", "id": "e", "source": "gateway", "data": {"model": "gemma", "waiting": 4}}
        assert (await w.call("POST", "/v1/signals", json=event)).status == 202
        assert w.router.loads.of("gemma", "s1", time.monotonic()).waiting == 4
        await w.router.outside._publish(Place("prometheus/*", "gemma"), 5, 60.0)
        assert w.router.loads.of("gemma", None, time.monotonic()).waiting == 9


async def test_seats_show_what_waits_at_another_router_while_signals_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_watch, "WINDOW_SECONDS", 60.0)
    async with world() as w:
        await w.seat("s1", "gemma")
        await until(lambda: w.router.level_watch.since, what="the watch has begun")
        for number in range(FEW + 1):
            await w.bus.publish(signal(number))
        await until(lambda: w.router.level_watch.since is None, what="the watch has ended")

        async def repeat() -> None:
            for number in range(FEW + 2, FEW + 600):
                await w.bus.publish(signal(number, waiting=5))
                await asyncio.sleep(0.1)

        repeating = asyncio.create_task(repeat())
        async with w.http.get(f"{w.url}/v1/seats") as answer:
            body = await answer.json()
        repeating.cancel()
        assert [(seat["seat"], seat["waiting"]) for seat in body["seats"]] == [("s1", 5)]
        assert body["levels_since"] <= time.time()
