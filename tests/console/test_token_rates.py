"""Tokens per second on the page: what engines report, per model."""

from itertools import count

import aiohttp
import pytest
from aiohttp import web

from kybernate.engines import tokens_in
from kybernate.fetch import MOST_BYTES, fetch
from kybernate.health import HttpServer
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.console import token_rates
from services.console.token_rates import TokenRates, readable


def record(seat: str, model: str, endpoint: str, state: SeatState = SeatState.ACTIVE) -> SeatRecord:
    return SeatRecord.model_validate(
        {"node": "n1", "seat": seat, "model": model, "endpoint": endpoint, "state": state, "cause": "c"}
    )


async def test_rates_of_a_models_seats_add_up_and_engines_without_the_metric_have_none():
    reads = count()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:generation_tokens_total{{model_name="a"}} {1000.0 * next(reads)}\n')

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
        rates = TokenRates(http)
        seats = {"s0": record("s0", "llama", server.url), "s1": record("s1", "silent", f"{server.url}/without")}
        await rates.read(seats)
        assert rates.of_model == {}  # there is one reading
        await rates.read(seats)
        assert rates.of_model.keys() == {"llama"}
        assert rates.of_model["llama"] > 0
        await rates.read({})
        assert rates.of_model == {}


async def test_a_seat_that_comes_back_has_a_rate_at_once_over_its_time_in_vram(monkeypatch: pytest.MonkeyPatch):
    now, tokens = [1000.0], [500]

    async def metrics(_: aiohttp.ClientSession, url: str) -> bytes:
        return b"vllm:generation_tokens_total %d\n" % tokens[0]

    monkeypatch.setattr(token_rates, "fetch", metrics)
    monkeypatch.setattr(token_rates.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(token_rates.time, "time", lambda: now[0])
    async with aiohttp.ClientSession() as http:
        rates = TokenRates(http)
        await rates.read({"s0": record("s0", "llama", "e")})
        now[0] += 60.0
        await rates.read({"s0": record("s0", "llama", "e", SeatState.PARKED)})
        assert rates.of_model == {}
        now[0], tokens[0] = now[0] + 60.0, 600
        back = record("s0", "llama", "e").model_copy(update={"since": now[0] - 4.0})
        await rates.read({"s0": back, "s1": record("s1", "qwen", "e")})
        assert rates.of_model == {"llama": 25.0}
        now[0], tokens[0] = now[0] + 5.0, 700
        await rates.read({"s0": back, "s1": record("s1", "qwen", "e")})
        assert rates.past("llama") == [(1000.0, 0.0), (1060.0, 0.0), (1120.0, 25.0), (1125.0, 20.0)]
        assert rates.past("")[-1] == (1125.0, 40.0)


def test_only_engines_of_active_seats_are_asked():
    assert readable(record("s0", "llama", "http://e"))
    assert not readable(record("s0", "llama", "http://e", SeatState.PARKED))
    assert not readable(record("s0", "llama", ""))


async def test_of_many_engines_each_is_asked_in_its_turn(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def metrics(_: aiohttp.ClientSession, url: str) -> bytes:
        asked.append(url)
        return b"vllm:generation_tokens_total %d\n" % len(asked)

    monkeypatch.setattr(token_rates, "fetch", metrics)
    monkeypatch.setattr(token_rates, "MOST_READ", 2)
    async with aiohttp.ClientSession() as http:
        rates, seats = TokenRates(http), {f"s{n}": record(f"s{n}", f"m{n}", f"e{n}") for n in range(4)}
        for _ in range(4):
            await rates.read(seats)
        assert sorted(asked) == sorted(2 * [f"e{number}/metrics" for number in range(4)])
        assert rates.of_model.keys() == {f"m{number}" for number in range(4)}


def test_tokens_are_those_generated_by_vllm_sglang_and_llama_cpp():
    assert tokens_in(b'vllm:generation_tokens_total{model_name="a"} 12.0\n') == 12
    assert tokens_in(b'sglang:generation_tokens_total 3\nsglang:generation_tokens_total{x="1"} 4\n') == 7
    assert tokens_in(b"llamacpp:tokens_predicted_total 1e3\n") == 1000
    assert tokens_in(b"vllm:prompt_tokens_total 12\n") is None
    assert tokens_in(b"llamacpp:tokens_predicted_total 1e999\n") is None


async def test_metrics_without_end_and_redirects_are_no_metrics():
    asked: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="vllm:generation_tokens_total 5\n" + "#" * MOST_BYTES)

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/metrics")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/other/metrics", elsewhere)
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
        rates = TokenRates(http)
        for path, paths in (("", ["/metrics"]), ("/other", [])):
            seats, asked[:] = {"s0": record("s0", "llama", f"{server.url}{path}")}, []
            await rates.read(seats)
            await rates.read(seats)
            assert rates.of_model == {}
            assert asked == paths * 2


@pytest.mark.parametrize(
    "url", ["http://a..b:90", "http://" + "a" * 64 + ".b", "http://:90", "http://127.0.0.1:99999", "x"]
)
async def test_an_address_that_is_none_has_no_answer(url: str):
    async with aiohttp.ClientSession() as http:
        assert await fetch(http, url, query="q") is None
