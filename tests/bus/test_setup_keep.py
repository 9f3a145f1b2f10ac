"""``kyb bus init --every``: streams are there again after NATS has lost its disk."""

import asyncio
import contextlib
import shutil
from pathlib import Path

from kybernate.bus.server import NatsServer
from kybernate.bus.setup import keep, streams
from tests.bus.worlds import eventually


async def test_streams_are_made_again_when_nats_has_lost_its_disk(tmp_path: Path) -> None:
    said: list[str] = []
    tries: list[None] = []
    made = f"changed: {', '.join(config.name or '' for config in streams())}"
    server = NatsServer(tmp_path / "nats")
    await server.start()
    try:
        keeping = asyncio.create_task(
            keep(server.url, every=0.05, timeout=2, report=said.append, tried=lambda: tries.append(None))
        )
        await eventually(lambda: said[-1:] == ["all streams and buckets are there"])
        assert said[0] == made
        await server.stop()
        shutil.rmtree(tmp_path / "nats")
        before = len(tries)
        await eventually(lambda: len(tries) > before and "no NATS server answers" in said[-1])
        await server.start()
        await eventually(lambda: said.count(made) == 2)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
    finally:
        await server.stop()
