"""The console as a process: before NATS, over a restart of its reader, with a refused configuration, and at its end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer, free_port
from kybernate.messages import SeatActivated
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from tests.bus.worlds import connected
from tests.until import until


@asynccontextmanager
async def console(log: Path, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    env |= {"KYB_PORT": "0", "KYB_LOG_FORMAT": "json", **settings}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.console", env=env, stderr=out)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def status(http: aiohttp.ClientSession, url: str) -> int:
    try:
        async with http.get(url) as answer:
            return answer.status
    except aiohttp.ClientError:
        return 0


async def test_it_starts_before_nats_resumes_events_and_ends_at_sigterm_while_a_stream_is_open(tmp_path: Path):
    log, port = tmp_path / "console.log", free_port()

    def url() -> str:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return next((line["url"] for line in lines if line["event"] == "console.listening"), "")

    async with console(log, KYB_NATS_URL=f"nats://127.0.0.1:{port}") as process, aiohttp.ClientSession() as http:
        here = await until(url, what="the console listens", timeout=30)

        async def answers(path: str, code: int) -> bool:
            return await status(http, here + path) == code

        await until(lambda: answers("/healthz", 200), what="it is alive")
        await until(lambda: answers("/readyz", 503), what="it is not ready without NATS")
        async with NatsServer(tmp_path / "nats", port) as server:
            await init(server.url)
            async with connected(server.url) as bus:
                row = SeatRecord(node="n", seat="s0", state=SeatState.ACTIVE, epoch=1, model="m", reported_at=1.0)
                await (await bus.bucket(BUCKET)).put(row.key, row.model_dump_json().encode())
                past = [
                    SeatActivated(cause="c", node="n", seat="s0", state=SeatState.ACTIVE, epoch=n, model="m")
                    for n in (2, 3)
                ]
                for event in past:
                    await bus.publish(event)
                await bus.flush()
            await until(lambda: answers("/readyz", 200), what="it is ready", timeout=30)
            headers = {"Last-Event-ID": past[0].id}
            async with http.get(f"{here}/v1/events", headers=headers) as stream, asyncio.timeout(30):
                async for line in stream.content:
                    if line.startswith(b"id: "):
                        assert line.decode().split()[1] == past[1].id
                        break
            async with http.get(f"{here}/ui/live") as stream:
                assert await stream.content.readline() == b"event: state\n"
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(30):
                    assert await process.wait() == 0
    assert "Traceback" not in log.read_text()


async def test_a_file_of_keys_that_cannot_be_used_is_named(tmp_path: Path):
    log, keys = tmp_path / "console.log", tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    async with console(log, KYB_API_KEYS_FILE=str(keys)) as process, asyncio.timeout(30):
        assert await process.wait() == 2
    assert "holds no key" in log.read_text()
