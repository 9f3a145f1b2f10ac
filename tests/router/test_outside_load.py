"""Load of callers that do not come through a router: engines' metrics, over real HTTP."""

import asyncio
import runpy
import time
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from kybernate.http.server import HttpServer
from kybernate.messages import TrafficSignal
from kybernate.seat import SeatState
from services.router.settings import RouterSettings
from tests.router.world import World, world
from tests.until import until


def metrics(running: int, waiting: int) -> str:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"


def levels(w: World, source: str) -> list[tuple[str, str | None, str, int, int]]:
    """The levels of a source in order: model, seat, tier, waiting, in flight."""
    signals = [signal for signal in w.manager.of(TrafficSignal) if signal.source == source]
    return [(one.model, one.seat, one.tier, one.waiting, one.in_flight) for one in signals]


def readings(w: World, source: str, outcome: str) -> float:
    name, labels = "kybernate_router_load_readings_total", {"source": source, "outcome": outcome}
    return w.router.health.registry.get_sample_value(name, labels) or 0.0


async def test_requests_of_callers_beside_the_router_are_in_flight_at_their_seat():
    async with world(engine_metrics_seconds=0.05) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE, tier="gold")
        parked = await w.seat("s1", "other")
        engine.gate.clear()
        engine.metrics = metrics(3, 2)
        ours = w.ask("llama")
        await until(lambda: engine.running == 1, what="the engine has our request")
        published = partial(levels, w, "engines/n1")
        await until(
            lambda: ("llama", "s0", "gold", 0, 4) in published(), what="the other four are published", saw=published
        )
        assert w.upstream("s0").share == 1, "three places, and one request of five is its own"
        assert engine.asked[0] == "model=llama&autoload=false"
        assert parked.asked == []
        engine.gate.set()
        assert (await ours).status == 200
        engine.metrics = metrics(0, 0)
        await until(
            lambda: published()[-1] == ("llama", "s0", "gold", 0, 0), what="a last level of zero", saw=published
        )
        engine.metrics = ""
        await until(lambda: readings(w, "engine", "failed") > 0, what="a reading that failed is counted")


async def test_routers_with_requests_at_a_seat_each_have_a_part_of_its_places():
    async with world(engine_metrics_seconds=0.05) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        for number in range(9):
            one = TrafficSignal(
                cause="c",
                source=f"router-{number}",
                model="llama",
                seat="s0",
                waiting=0,
                in_flight=1,
                seq=1,
                ttl_seconds=600,
            )
            w.router.outside.loads.add(one, time.monotonic())
        engine.metrics = metrics(30, 20)
        await until(lambda: w.upstream("s0").share > 0, what="the engine was asked")
        assert w.upstream("s0").share == 3, "ten routers, thirty places"


async def test_a_router_alone_tells_no_load_of_others():
    async with world(engine_metrics_seconds=0.02) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.gate.clear()
        ours = [w.ask("llama") for _ in range(3)]
        await until(lambda: engine.running == 3, what="the engine has our requests")
        engine.metrics = metrics(3, 0)
        read = readings(w, "engine", "ok")
        await until(lambda: readings(w, "engine", "ok") > read + 3, what="three further readings")
        assert levels(w, "engines/n1") == []
        engine.gate.set()
        for one in ours:
            assert (await one).status == 200


async def test_requests_that_another_source_tells_are_not_reported_twice():
    async with world(engine_metrics_seconds=0.02) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        theirs = TrafficSignal(cause="c", source="router-1", model="llama", seat="s0", in_flight=4, ttl_seconds=300)
        await w.manager.bus.publish(theirs)
        await until(
            lambda: w.router.outside.loads.of("llama", "s0", 0.0).in_flight == 4, what="the other router's level"
        )
        engine.metrics = metrics(5, 1)
        published = partial(levels, w, "engines/n1")
        await until(
            lambda: published() != [], what="the two that no other source reports", saw=lambda: w.manager.received
        )
        assert {level[-1] for level in published()} == {2}


async def test_an_engine_that_sends_nothing_is_asked_once_in_a_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kybernate.fetch.ANSWER_SECONDS", 0.1)
    asked: list[str] = []

    async def hang(request: web.Request) -> web.Response:
        asked.append(request.path)
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.+}", hang)
    async with HttpServer(app, "127.0.0.1", 0) as server, world(engine_metrics_seconds=0.02) as w:
        await w.manager.put("s0", SeatState.ACTIVE, model="llama", endpoint=server.url)
        await until(lambda: readings(w, "engine", "failed") >= 2, what="two readings that failed")
    assert set(asked) == {"/metrics"}


async def test_without_the_setting_no_engine_is_asked():
    assert RouterSettings().engine_metrics_seconds == 0
    async with world() as w:
        assert w.router.outside.jobs() == {}


async def test_the_example_reports_what_prometheus_knows_to_wait_for_a_model():
    async def query(request: web.Request) -> web.Response:
        assert request.query["query"] == "sum by (model) (queue)"
        samples = [
            {"metric": {"model": model}, "value": [1.5, count]} for model, count in (("llama", "3"), ("no", "7"))
        ]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": samples}})

    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/prometheus_load.py"))
    app = web.Application()
    app.router.add_get("/api/v1/query", query)
    async with HttpServer(app, "127.0.0.1", 0) as prometheus, world() as w:
        await w.seat("s0", "llama")
        await asyncio.to_thread(example["report"], prometheus.url, w.url, "sum by (model) (queue)")
        published = partial(levels, w, "prometheus")
        await until(lambda: published() == [("llama", "s0", "standard", 3, 0)], what="the level", saw=published)
