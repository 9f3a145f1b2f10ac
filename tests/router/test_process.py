"""The router as a process, with a real nats-server."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.counting import counting_routers
from kybernate.dev.nats_server import NatsServer, free_port
from kybernate.messages import Presence
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from services.gpu_manager.core.demand import Routers
from services.gpu_manager.core.inputs import ModelTime, Now, UnixTime, WallTime
from tests.bus.worlds import connected
from tests.router.engine import Engine
from tests.until import until


@asynccontextmanager
async def router(nats_url: str, log: Path, files: int = 0, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    env = clean | {"KYB_NATS_URL": nats_url, "KYB_PORT": "0", "KYB_LOG_FORMAT": "json", **more}
    with log.open("wb") as out:
        command = [sys.executable, "-m", "services.router"]
        if files:
            command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
        process = await asyncio.create_subprocess_exec(*command, env=env, stderr=out)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def url_of(log: Path) -> str:
    def logged() -> str | None:
        return next((url for line in log.read_text().splitlines() if (url := json.loads(line).get("url"))), None)

    return str(await until(logged, what="the router logs its address", saw=log.read_text))


async def until_status(http: aiohttp.ClientSession, url: str, status: int) -> None:
    seen: list[tuple[int, str]] = []

    async def answered() -> bool:
        async with http.get(url) as answer:
            seen[:] = [(answer.status, await answer.text())]
            return answer.status == status

    await until(answered, what=f"{url} answers {status}", saw=lambda: seen, interval=0.02)


async def test_a_router_whose_port_is_taken_names_the_setting(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        more = {"KYB_PORT": str(taken.getsockname()[1]), "KYB_HEALTH_PORT": str(free_port())}
        async with router("nats://127.0.0.1:9", log, **more) as process, asyncio.timeout(60):
            assert await process.wait() == 1
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], "exception" in last) == ("process.cannot_run", False)
    assert last["reason"].endswith("or set KYB_PORT")


async def test_a_router_that_may_open_few_files_says_how_many_it_needs(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    few = "it takes 1 connection at a time: it may open 64 files; 16384 need 33168 (ulimit -n)"
    async with router("nats://127.0.0.1:9", log, files=64), aiohttp.ClientSession() as http:
        url = await url_of(log)
        async with http.get(f"{url}/readyz") as answer:
            assert (await answer.json())["notes"]["files"] == few
        async with aiohttp.ClientSession() as second, second.get(f"{url}/readyz") as refused:
            assert (refused.status, (await refused.json())["error"]["message"]) == (503, few), "the first is kept"
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["meaning"] for line in logged if line["event"] == "connections.limited"] == [few]


@asynccontextmanager
async def cluster(folder: Path, port: int = 0) -> AsyncIterator[tuple[str, NatsBus, Engine]]:
    """The address of a nats-server, the bus of a manager that counts routers, and the engine of its active seat."""
    engine = Engine()
    await engine.start()
    async with (
        NatsServer(folder / "nats", port or free_port()) as server,
        connected(server.url) as bus,
        counting_routers(bus, "n"),
    ):
        await init(server.url)
        active = {"node": "n", "seat": "s0", "state": SeatState.ACTIVE, "epoch": 1, "reported_at": 1.0}
        row = SeatRecord.model_validate(active | {"model": "m", "endpoint": engine.endpoint})
        await (await bus.bucket(BUCKET)).put(row.key, row.model_dump_json().encode())
        yield server.url, bus, engine
    await engine.stop()


async def test_the_router_starts_before_nats_and_two_sigterms_end_it_cleanly(tmp_path: Path):
    log, port = tmp_path / "router.log", free_port()
    async with router(f"nats://127.0.0.1:{port}", log) as process, aiohttp.ClientSession() as http:
        url = await url_of(log)
        await until_status(http, f"{url}/healthz", 200)
        await until_status(http, f"{url}/readyz", 503)
        async with cluster(tmp_path, port) as (_, _, engine):
            await until_status(http, f"{url}/readyz", 200)
            await until_status(http, f"{url}/v1/models/m", 200)
            async with http.post(f"{url}/v1/completions", json={"model": "m"}) as answer:
                assert answer.status == 200
            engine.gate.clear()
            running = await http.post(f"{url}/v1/completions", json={"model": "m", "stream": True})
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):  # the engine never answers, so a router that waited for it would not end
                assert await process.wait() == 0
            running.close()
    assert "Traceback" not in log.read_text()


async def test_a_rollout_refuses_no_request_of_kept_connections(tmp_path: Path) -> None:
    """Steady traffic of eight clients: a Service moves new connections only."""
    logs = [tmp_path / f"router-{n}.log" for n in (1, 2)]
    async with (
        cluster(tmp_path) as (nats_url, _, _),
        router(nats_url, logs[0], KYB_INSTANCE="r1") as old,
        router(nats_url, logs[1], KYB_INSTANCE="r2"),
        aiohttp.ClientSession() as http,
    ):
        urls = [await url_of(log) for log in logs]
        for url in urls:
            await until_status(http, f"{url}/v1/models/m", 200)
            async with http.post(f"{url}/v1/completions", json={"model": "m"}) as answer:
                assert answer.status == 200
        service, ended, statuses = [urls[0]], asyncio.Event(), list[int]()

        async def client() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as kept:
                url = service[0]
                while not ended.is_set() or len(statuses) < 300:
                    async with kept.post(f"{url}/v1/completions", json={"model": "m"}) as answer:
                        statuses.append(answer.status)
                        url = service[0] if answer.headers.get("Connection") == "close" else url
                    await asyncio.sleep(0.005)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: len(statuses) > 80, what="the clients keep connections to the first router")
        service[0] = urls[1]  # its pod is being deleted
        hook = [sys.executable, "-m", "services.router.draining", "--url", urls[0], "--first", "1", "--seconds", "30"]
        draining = await asyncio.create_subprocess_exec(*hook, "--pid", str(old.pid))
        assert await draining.wait() == 0
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
        ended.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}, statuses


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_router_that_is_stopped_leaves_after_its_last_call_and_one_that_is_killed_does_not(
    tmp_path: Path, how: signal.Signals
):
    """No drain waits for a router that left; one that was killed counts until its presence expires."""
    log, known = tmp_path / "router.log", Routers()
    now = Now(WallTime(1.0), ModelTime(1.0), UnixTime(1.0))
    async with (
        cluster(tmp_path) as (nats_url, bus, engine),
        router(nats_url, log) as process,
        aiohttp.ClientSession() as http,
    ):

        async def listen() -> None:
            async with bus.subscribe(Presence.pattern(component="router")) as messages:
                async for message in messages:
                    known.update(message, now)

        listener = asyncio.create_task(listen())
        url = await url_of(log)
        await until_status(http, f"{url}/readyz", 200)
        await until(lambda: known.present, what="the router is present")
        engine.gate.clear()
        running = await http.post(f"{url}/v1/completions", json={"model": "m", "stream": True})
        reading = asyncio.create_task(running.content.read())  # notices the end of the call
        process.send_signal(how)
        await process.wait()
        await asyncio.gather(reading, return_exceptions=True)
        await bus.flush()
        if how is signal.SIGTERM:
            await until(lambda: not known.present, what="the router left", saw=lambda: known.present)
        else:
            await asyncio.sleep(0.2)
            assert len(known.present) == 1
        listener.cancel()


async def test_a_router_whose_nats_is_gone_ends_at_sigterm(tmp_path: Path):
    log, port = tmp_path / "router.log", free_port()
    async with router(f"nats://127.0.0.1:{port}", log) as process:
        async with NatsServer(tmp_path / "nats", port) as server, aiohttp.ClientSession() as http:
            await init(server.url)
            await until_status(http, f"{await url_of(log)}/readyz", 200)
        await until(lambda: '"bus.lost"' in log.read_text(), what="the router lost its bus")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
