"""Asking engines over real HTTP."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kybernate import http_api
from kybernate.engines import requests_in
from kybernate.seat import SeatState as S
from services.gpu_manager import engines
from services.gpu_manager.core.inputs import EngineProbe, EngineSeen
from services.gpu_manager.engines import EngineProbes
from tests.manager.world import World


class Engine:
    """An engine with any metrics; without any it does not answer."""

    def __init__(self) -> None:
        self.metrics: str | None = "vllm:num_requests_running 0\n"
        self.status = 200
        self.prometheus = ""
        """At TensorRT-LLM's path."""
        self.url = ""

    async def answer(self, _: web.Request) -> web.Response:
        if self.metrics is None:
            await asyncio.Event().wait()
        return web.Response(text=self.metrics, status=self.status)

    async def answer_prometheus(self, _: web.Request) -> web.Response:
        return web.Response(text=self.prometheus, status=200 if self.prometheus else 404)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", engine.answer),
            web.get("/metrics", engine.answer),
            web.get("/prometheus/metrics", engine.answer_prometheus),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


async def first_answer(url: str, *, idle: bool = True) -> EngineSeen:
    """Of an engine that is asked whether it computes, else whether it is healthy, long before its time is over."""
    answers: asyncio.Queue[EngineSeen] = asyncio.Queue()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        asking = EngineProbes(session)
        asking.follow([EngineProbe("s", url, "c", idle=idle, since=0.0 if idle else 1e12)], group, answers.put)
        seen = await answers.get()
        asking.follow([], group, answers.put)
    return seen


@pytest.mark.parametrize(
    ("metrics", "status", "running"),
    [
        ('vllm:num_requests_running{m="a"} 2.0\nvllm:num_requests_waiting 1\n', 200, 3),
        ("vllm:num_requests_running 1e999\n", 200, None),
        ("vllm:num_requests_running 1.2.3\n", 200, None),
        ("something_else 1\n", 200, None),
        ("vllm:num_requests_running 0\n", 503, None),
    ],
    ids=["two kinds", "too large", "no number", "another engine", "an error page"],
)
async def test_metrics_of_any_kind_are_an_answer(
    engine: Engine, metrics: str, status: int, running: int | None
) -> None:
    engine.metrics, engine.status = metrics, status

    seen = await first_answer(engine.url)

    assert (seen.healthy, seen.running) == (True, running)


async def test_metrics_that_would_fill_the_managers_memory_are_not_read_and_the_engine_may_compute(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_api, "MOST_BYTES", 2**20)
    engine.metrics = "vllm:num_requests_running 2.0\n" + "#" * 2**21

    seen = await first_answer(engine.url)

    assert (seen.healthy, seen.running) == (False, None)


@pytest.mark.parametrize(
    "line", [b"vllm:num_requests_running{\n", b"sglang:num_queue_reqs\n", b'llamacpp:requests_deferred{a="\n']
)
def test_metrics_that_are_none_are_read_in_one_pass(line: bytes) -> None:
    """Else the test times out: with a pass for each line this takes minutes, in which nothing else happens."""
    metrics = line * (http_api.MOST_BYTES // len(line))
    assert requests_in(metrics) is None


async def test_tensorrt_llm_counts_its_requests_elsewhere(engine: Engine) -> None:
    engine.metrics = "[]"  # statistics of iterations
    engine.prometheus = "trtllm_num_requests_running 2.0\ntrtllm_num_requests_waiting 1.0\n"

    assert (await first_answer(engine.url)).running == 3


async def test_an_engine_that_does_not_answer_in_time_may_compute(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ANSWER_SECONDS", 0.05)
    engine.metrics = None

    seen = await first_answer(engine.url)

    assert (seen.healthy, seen.running) == (False, None)


async def test_an_engine_that_refuses_connections_computes_nothing() -> None:
    seen = await first_answer("http://127.0.0.1:1")

    assert (seen.healthy, seen.running) == (False, 0)


@pytest.mark.parametrize("status", [401, 404, 503])
async def test_an_engine_that_is_not_healthy_is_quoted_at_once(engine: Engine, status: int) -> None:
    engine.status = status

    seen = await first_answer(engine.url, idle=False)

    assert (seen.healthy, seen.said) == (False, f"/health answered {status}")


@pytest.mark.parametrize(("idle", "path"), [(True, "/metrics"), (False, "/health")])
async def test_an_engine_that_cannot_be_asked_is_told_with_the_path(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, idle: bool, path: str
) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(engines, "ANSWER_SECONDS", 0.05)
    engine.metrics = None
    assert (await first_answer(engine.url, idle=idle)).said == f"{path}: no answer within 0 s"
    assert (await first_answer("http://127.0.0.1:1", idle=idle)).said == f"{path}: connection refused"
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    seen = await first_answer("http://engine:8000", idle=idle)
    assert (seen.healthy, seen.running, seen.said) == (False, None, f"{path}: name or service not known")


UNREACHABLE = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN),
    *(errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ECONNRESET, errno.EADDRNOTAVAIL),
)


@pytest.mark.parametrize("number", UNREACHABLE, ids=errno.errorcode.get)
async def test_an_engine_that_cannot_be_reached_may_compute(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fail)

    seen = await first_answer(engine.url)

    assert (seen.healthy, seen.running) == (False, None)


def test_a_silent_engine_is_parked_only_at_the_deadline(world: World) -> None:
    _, b = world.draining()
    world.answered(b)

    silent = EngineSeen(
        b, world.managed(b).durable.container_id or "", healthy=False, running=None, asked_at=world.wall
    )
    world.receive(silent)
    assert world.state(b) is S.DRAINING
    world.later(8.0, times=8)

    assert world.state(b) is S.PARKING
