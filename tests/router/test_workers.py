"""Workers of one router: several processes on one port, replaced without a refused connection."""

import asyncio
import gc
import json
import math
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.config_errors import ConfigError
from kybernate.dev.nats_server import NatsServer, free_port
from kybernate.messages import Presence
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from kybernate.settings import SettingsError
from services.router import worker
from services.router.service import check
from services.router.settings import RouterSettings
from tests.router.engine import Engine
from tests.router.test_process import router, until_status
from tests.until import until

BODY = json.dumps({"model": "m"}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)

GET_MODEL = b"GET /v1/models/m HTTP/1.1\r\nHost: r\r\n\r\n"


@dataclass
class Stack:
    """A router with workers, an engine, and what the bus says of the workers."""

    process: asyncio.subprocess.Process
    port: int
    health_port: int
    log: Path
    engine: Engine
    present: dict[str, Presence] = field(default_factory=dict)

    def lines(self, event: str) -> list[dict[str, Any]]:
        rows = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [row for row in rows if row.get("event") == event]

    def pids(self) -> list[int]:
        return [row["worker_pid"] for row in self.lines("worker.started")]

    async def ask(self, request: bytes = REQUEST) -> bytes:
        """One call on a new connection; errors of the connection are raised."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            return head.split(b"\r\n", 1)[0]
        finally:
            writer.close()


@asynccontextmanager
async def workers(tmp_path: Path, count: int = 2, **more: str) -> AsyncIterator[Stack]:
    engine, port, health = Engine(), free_port(), free_port(count)  # a worker each
    await engine.start()
    log = tmp_path / "router.log"
    settings = {"KYB_WORKERS": str(count), "KYB_PORT": str(port), "KYB_HEALTH_PORT": str(health), **more}
    async with (
        NatsServer(tmp_path / "nats", free_port()) as server,
        NatsBus(server.url, source="kyb/test", name="test").opened() as bus,
    ):
        await init(server.url)
        await bus.until_connected()
        row = SeatRecord(
            node="n", seat="s0", state=SeatState.ACTIVE, epoch=1, model="m", endpoint=engine.endpoint, reported_at=1.0
        )
        await (await bus.bucket(BUCKET)).put(row.key, row.model_dump_json().encode())
        async with router(server.url, log, KYB_INSTANCE="r", **settings) as process, aiohttp.ClientSession() as http:
            stack = Stack(process, port, health, log, engine)

            async def listen() -> None:
                async with bus.subscribe(Presence.pattern(component="router")) as messages:
                    async for message in messages:
                        assert isinstance(message, Presence)
                        stack.present[message.instance] = message

            listener = asyncio.create_task(listen())
            for number in range(count):
                await until(lambda: len(stack.lines("router.listening")) >= count, what="all workers listen")
                await until_status(http, f"http://127.0.0.1:{health + number}/readyz", 200)
            yield stack
            listener.cancel()
    await engine.stop()


async def test_workers_are_routers_of_their_own_and_a_dead_one_is_started_again(tmp_path: Path) -> None:
    async with workers(tmp_path) as stack, aiohttp.ClientSession() as http:
        await until(lambda: {"r-0a", "r-1a"} <= stack.present.keys(), what="both are present")
        answered = [await stack.ask() for _ in range(40)]
        assert set(answered) == {b"HTTP/1.1 200 OK"}
        counts = []
        for number in (0, 1):
            async with http.get(f"http://127.0.0.1:{stack.health_port + number}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            counts += [float(line.split()[-1]) for line in lines if line.startswith("kybernate_router_requests_total{")]
        assert sum(counts) == 40
        assert len(counts) == 2, "the kernel spreads connections over both"
        before = stack.present["r-0a"].incarnation
        os.kill(stack.pids()[0], signal.SIGKILL)
        during = [await stack.ask() for _ in range(20)]  # some wait in the queue of the dead one
        assert set(during) == {b"HTTP/1.1 200 OK"}
        await until(lambda: stack.present["r-0a"].incarnation != before, what="its successor is present")
        assert [row["code"] for row in stack.lines("worker.ended")] == [-signal.SIGKILL]
        stack.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await stack.process.wait() == 0
        assert all(presence.leaving for presence in stack.present.values())
    assert "Traceback" not in stack.log.read_text()


async def test_a_restart_refuses_and_resets_no_connection_and_ends_no_answer(tmp_path: Path) -> None:
    async with workers(tmp_path) as stack, aiohttp.ClientSession() as http:
        answers: list[bytes] = []

        async def client() -> None:
            while True:
                answers.extend([await stack.ask(), await stack.ask(GET_MODEL)])

        stack.engine.end.clear()
        url = f"http://127.0.0.1:{stack.port}/v1/completions"
        stream = await http.post(url, json={"model": "m", "stream": True})
        clients = [asyncio.create_task(client()) for _ in range(8)]
        stack.process.send_signal(signal.SIGHUP)
        await until(lambda: len(stack.lines("worker.draining")) == 2, what="the predecessors drain")
        await until(lambda: stack.lines("workers.replaced"), what="the workers are replaced")
        stack.engine.end.set()
        assert b"[DONE]" in await stream.read()
        await until(
            lambda: {name for name, presence in stack.present.items() if presence.leaving} == {"r-0a", "r-1a"},
            what="the predecessors have left",
        )
        seen = len(answers)
        await until(lambda: len(answers) > seen + 20, what="calls are answered")
        assert stack.lines("workers.replaced")[0]["replaced"] == 2
        for task in clients:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert set(answers) == {b"HTTP/1.1 200 OK"}
        assert len(set(stack.pids())) == 4
        assert {name for name, presence in stack.present.items() if not presence.leaving} == {"r-0b", "r-1b"}
        stack.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await stack.process.wait() == 0
    assert "Traceback" not in stack.log.read_text()


async def test_workers_do_not_outlive_their_supervisor(tmp_path: Path) -> None:
    async with workers(tmp_path, 1) as stack:
        stack.process.kill()
        await until(lambda: stack.present["r-0a"].leaving, what="the worker left")


def test_each_worker_has_its_share_of_the_limits() -> None:
    settings = RouterSettings.from_env({"KYB_WORKERS": "4", "KYB_HEALTH_PORT": "9474", "KYB_INSTANCE": "r"})
    worker = settings.of_worker(3, "r-3a")
    assert (worker.instance, worker.health_port, worker.port) == ("r-3a", 9477, settings.port)
    assert worker.queue_limit == settings.queue_limit // 4
    assert worker.held_bytes == settings.held_bytes // 4
    assert worker.caller_bytes == settings.caller_bytes // 4
    assert worker.caller_requests == settings.caller_requests // 4
    assert worker.connections == settings.connections // 4
    assert worker.address_connections == settings.address_connections // 4
    assert worker.signals_per_second == settings.signals_per_second / 4
    assert worker.signal_sources == settings.signal_sources // 4
    assert worker.body_bytes == settings.body_bytes


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"KYB_HEALTH_PORT": "0"}, "KYB_HEALTH_PORT is not set"),
        ({"KYB_HEALTH_PORT": "65530"}, "above 65536"),
        ({"KYB_QUEUE_LIMIT": "7"}, "KYB_QUEUE_LIMIT=7 is too little: at least 8 is needed"),
        ({"KYB_HELD_BYTES": "200000000"}, "at least 8 times twice KYB_BODY_BYTES"),
    ],
)
def test_limits_that_cannot_be_divided_are_named(more: dict[str, str], text: str) -> None:
    enough = {"KYB_HELD_BYTES": str(2**30)}
    with pytest.raises(SettingsError, match=text):
        RouterSettings.from_env({"KYB_HEALTH_PORT": "9474", **enough, **more, "KYB_WORKERS": "8"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"KYB_ALIASES": "a"},
        {"KYB_ENGINE_PATHS": "/x"},
        {"KYB_PROMETHEUS_QUERIES": "'*"},
        {"KYB_API_KEYS_FILE": "/nonexistent"},
    ],
)
def test_a_wrong_configuration_is_named_before_workers_are_started(wrong: dict[str, str]) -> None:
    settings = RouterSettings.from_env({"KYB_WORKERS": "1", "KYB_HEALTH_PORT": "9474", **wrong})
    with pytest.raises(ConfigError, match=re.escape(*wrong.values())):
        check(settings)


def test_a_worker_that_refuses_its_configuration_says_why_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(_: RouterSettings, inherited: worker.Inherited) -> None:
        for sock in (inherited.api, inherited.operations, inherited.supervisor):
            sock.close()
        raise ConfigError("keys.yaml: is empty")

    settings = ("KYB_WORKERS", "1"), ("KYB_HEALTH_PORT", "9474")
    for name, value in settings:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "serve", refuse)
    monkeypatch.setattr(worker, "configure", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    descriptors = [str(socket.socket().detach()) for _ in range(3)]
    with pytest.raises(SystemExit) as ended:
        worker.main(["0", "r-0a", "inf", *descriptors])
    assert ended.value.code == 2
    assert "keys.yaml: is empty" in capsys.readouterr().err


class Unready:
    """What a worker's report needs of a router."""

    def __init__(self) -> None:
        self.health, self.url, self.listens, self.reported = self, "", False, b""
        self.missing = {"roster": "the roster was not read yet"}

    def unmet(self) -> dict[str, str]:
        return self.missing

    async def listen(self) -> None:
        self.listens = True

    def write(self, data: bytes) -> None:
        self.reported += data


async def test_a_successor_takes_connections_once_it_is_ready() -> None:
    router = Unready()
    report = asyncio.create_task(worker._report(router, router, math.inf))  # type: ignore[arg-type]
    await until(lambda: len(router.reported) > 3, what="it reports")
    assert not router.listens, "its predecessor still answers"
    router.missing = {}
    await until(lambda: worker.READY in router.reported, what="it reports that it is ready")
    assert router.listens
    report.cancel()


async def test_a_worker_alone_takes_connections_soon_so_that_its_health_can_be_asked() -> None:
    router = Unready()
    report = asyncio.create_task(worker._report(router, router, 0.2))  # type: ignore[arg-type]
    await until(lambda: router.listens, what="it listens")
    assert set(router.reported) <= set(worker.LIVE), "it is not ready"
    report.cancel()
