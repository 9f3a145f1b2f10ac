"""The plugin and the fakes as processes."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.dev.nats_server import NatsServer
from services.gpu_manager.ledger import Ledger, LedgerFile
from services.plugin import allocations
from tests.kubelet.stand import running_kubelet, short_folder
from tests.plugin.stand import config
from tests.until import until

PATIENCE = 30.0
"""Seconds that a condition may take on a busy machine."""


@asynccontextmanager
async def process(*arguments: str, log: Path, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=clean | env, stdout=output, stderr=output
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def environment(folder: Path, kubelet_dir: Path, **more: str) -> dict[str, str]:
    """Settings of a node whose manager has run before."""
    (folder / "config.yaml").write_text(json.dumps(config()))
    LedgerFile(folder / "state" / "ledger").write(Ledger(), durable=False)
    return {
        "KYB_CONFIG": str(folder / "config.yaml"),
        "KYB_NODE": "node-0",
        "KYB_FAKE_DRIVER": str(folder / "driver.sock"),
        "KYB_KUBELET_DIR": str(kubelet_dir.parent),
        "KYB_RUN_DIR": str(folder / "run"),
        "KYB_STATE_DIR": str(folder / "state"),
        "KYB_LOG_FORMAT": "json",
        "KYB_NATS_URL": "nats://127.0.0.1:9",
    } | more


def all_logged(log: Path, event: str) -> list[dict[str, Any]]:
    """Every line of this event."""
    found = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("event") == event:
                found.append(entry)
    return found


def logged(log: Path, event: str) -> dict[str, Any] | None:
    return next(iter(all_logged(log, event)), None)


async def until_logged(log: Path, event: str) -> dict[str, Any]:
    return await until(lambda: logged(log, event), what=f"the log event {event}", saw=log.read_text, timeout=PATIENCE)


async def readyz(log: Path) -> tuple[int, dict[str, Any]]:
    """Status and body, once it serves."""
    url = (await until_logged(log, "plugin.serving"))["url"]
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
        return answer.status, await answer.json()


async def until_readyz(log: Path) -> None:
    while (await readyz(log))[0] != 200:
        await asyncio.sleep(0.02)


async def until_started(folder: Path, seats: str) -> Path:
    """The announcement of a start of a seat of this kind that waits at the gate."""
    calls = (folder / "run" / "seats").glob
    found: list[Path] = await until(
        lambda: list(calls(f"{seats}-*/call.json")), what="a start waits at the gate", timeout=PATIENCE
    )
    return found[0]


async def until_stored(folder: Path) -> None:
    state = folder / "state"
    await until(lambda: allocations.load(state).seats, what="the plugin has stored its seats", timeout=PATIENCE)


@asynccontextmanager
async def machine() -> AsyncIterator[tuple[Kubelet, Path]]:
    """A kubelet, and a folder for the other processes of its node."""
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            yield kubelet, folder


@asynccontextmanager
async def nats(folder: Path) -> AsyncIterator[tuple[str, NatsBus]]:
    """The URL of a NATS server with all streams, and a connection."""
    async with (
        NatsServer(folder / "nats") as server,
        NatsBus(server.url, source="test", name="test").opened() as bus,
    ):
        await init(server.url)
        await bus.until_connected()
        yield server.url, bus


@asynccontextmanager
async def driver(folder: Path) -> AsyncIterator[FakeDriverClient]:
    """A fake GPU driver with four GPUs, and a connection to it."""
    arguments = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(folder / "driver.sock"), "--gpus", "4")
    async with process(*arguments, log=folder / "driver.log"):
        client = await FakeDriverClient.connect(folder / "driver.sock", wait_seconds=PATIENCE)
        async with client:
            yield client


@asynccontextmanager
async def plugin(folder: Path, kubelet_dir: Path, name: str = "plugin", **env: str) -> AsyncIterator[Path]:
    """A running plugin that has read its GPUs; gives its log. Lower-case names are constants."""
    log = folder / f"{name}.log"
    constants = [f"{name}={value}" for name, value in env.items() if name.islower()]
    settings = environment(folder, kubelet_dir) | {name: value for name, value in env.items() if name.isupper()}
    async with process("-m", "tests.quick", "services.plugin", *constants, log=log, **settings):
        await until(
            lambda: logged(log, "plugin.registered") or logged(log, "plugin.registration_failed"),
            what="the plugin has registered or was refused",
            saw=log.read_text,
            timeout=PATIENCE,
        )
        yield log
