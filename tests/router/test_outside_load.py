"""Load of callers that do not come through a router: engines' metrics and Prometheus, over real HTTP."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from kybernate.config_errors import ConfigError
from kybernate.health import HttpServer
from kybernate.messages import ActivateSeat, TrafficSignal
from kybernate.seat import SeatState
from services.router.outside_load import queries_of, samples_of
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
        await until(lambda: published() != [], what="the two that no other source reports", saw=published)
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


# --- Prometheus ---------------------------------------------------------------------------------------------------


class Prometheus:
    """Answers instant queries by their text; anything else is an error, as Prometheus answers it."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    async def query(self, request: web.Request) -> web.Response:
        result = self.results.get(request.query["query"])
        if result is None:
            return web.json_response({"status": "error", "errorType": "bad_data", "error": "parse error"}, status=400)
        return web.json_response({"status": "success", "data": result})


def vector(*samples: tuple[dict[str, str], str]) -> dict[str, Any]:
    return {"resultType": "vector", "result": [{"metric": labels, "value": [1.5, count]} for labels, count in samples]}


@asynccontextmanager
async def prometheus() -> AsyncIterator[tuple[Prometheus, str]]:
    here, app = Prometheus(), web.Application()
    app.router.add_get("/base/api/v1/query", here.query)
    async with HttpServer(app, "127.0.0.1", 0) as server:
        yield here, f"{server.url}/base/"


async def test_what_prometheus_knows_to_wait_for_a_model_waits_for_it():
    queries = '"ll*": queue\n"qwen": broken\n'
    async with prometheus() as (server, url):
        server.results["queue"] = vector(({"model": "llama"}, "3"), ({"model": "llm"}, "7"), ({"model": "qwen"}, "8"))
        settings = {"prometheus_url": url, "prometheus_queries": queries, "prometheus_seconds": 0.05}
        async with world(**settings, aliases="lla=llama") as w:
            await w.seat("s0", "llama")
            await w.seat("s1", "qwen")
            published = partial(levels, w, "prometheus/ll*")
            await until(lambda: published() != [], what="the level of llama")
            assert set(published()) == {("llama", None, "standard", 3, 0)}, "llm has no seat, and qwen does not fit"
            server.results["queue"] = vector(({"model_name": "lla"}, "4.1"), ({"model": "llama"}, "-1"))
            await until(lambda: published()[-1] == ("llama", None, "standard", 5, 0), what="the alias")
            del server.results["queue"]
            failed = readings(w, "prometheus", "failed")
            await until(lambda: readings(w, "prometheus", "failed") > failed + 4, what="both queries fail")
            assert published()[-1][3] == 5, "its level expires, and is not withdrawn"
            server.results["queue"] = vector()
            await until(
                lambda: published()[-1] == ("llama", None, "standard", 0, 0), what="a last level of zero", saw=published
            )
            assert levels(w, "prometheus/qwen") == []
            assert w.manager.of(ActivateSeat) == [], "the manager decides"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (vector(({"model": "m"}, "3"), ({"model": "n"}, "1")), [("m", 3)]),
        (vector(({}, "3")), [("m", 3)]),
        (vector(({"model_name": "m"}, "0.2"), ({"model": "m"}, "NaN")), [("m", 1), ("m", 0)]),
        (vector(({"model": "m"}, "+Inf"), ({"model": "m"}, "1e300")), [("m", 0), ("m", math.ceil(1e300))]),
        ({"resultType": "scalar", "result": [1.5, "4"]}, [("m", 4)]),
        ({"resultType": "string", "result": [1.5, "x"]}, None),
        ({"resultType": "matrix", "result": [{"metric": {}, "values": [[1.5, "4"]]}]}, None),
        (vector(({"model": 5}, "3")), None),  # type: ignore[dict-item]
        ([], None),
    ],
)  # fmt: skip
def test_samples_of_an_answer(data: Any, expected: Any):
    assert samples_of(json.dumps({"status": "success", "data": data}).encode(), "m") == expected


def test_what_is_no_answer_to_a_query_has_no_samples():
    for body in (b"", b"<html>", b"[]", b"null", b"[" * 100_000, b'{"status": "error"}'):
        assert samples_of(body, "m") is None


@pytest.mark.parametrize(
    ("url", "queries", "text"),
    [
        ("http://p:9090", "llama", "write lines"),
        ("http://p:9090", "llama: 5", "write lines"),
        ("http://p:9090", "*: a: b: c", "write lines"),
        ("", "llama: queue", "KYB_PROMETHEUS_URL=''"),
        ("p:9090", "llama: queue", "KYB_PROMETHEUS_URL='p:9090'"),
    ],
)
def test_queries_that_cannot_be_made_are_refused(url: str, queries: str, text: str):
    with pytest.raises(ConfigError, match=text):
        queries_of(RouterSettings(prometheus_url=url, prometheus_queries=queries))
