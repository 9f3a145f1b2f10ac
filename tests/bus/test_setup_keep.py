"""``kyb bus init --every``: streams are there again after NATS has lost its disk."""

import asyncio
import contextlib
import shutil
from pathlib import Path

from kybernate.bus.setup import keep, streams
from kybernate.dev.nats_server import NatsServer
from tests.until import until


async def test_streams_are_made_again_when_nats_has_lost_its_disk(tmp_path: Path) -> None:
    reports: list[str] = []
    tries: list[None] = []
    made = f"changed: {', '.join(config.name or '' for config in streams())}"
    server = NatsServer(tmp_path / "nats")
    await server.start()
    try:
        keeping = asyncio.create_task(
            keep(server.url, every=0.05, timeout=2, report=reports.append, tried=lambda: tries.append(None))
        )
        await until(
            lambda: reports[-1:] == ["all streams and buckets are there"],
            what="setup reports that all streams and buckets exist",
            saw=lambda: reports,
        )
        assert reports[0] == made
        await server.stop()
        shutil.rmtree(tmp_path / "nats")
        before = len(tries)
        await until(
            lambda: len(tries) > before and "no NATS server answers" in reports[-1],
            what="setup tries again and reports that no server answers",
            saw=lambda: reports,
        )
        await server.start()
        await until(
            lambda: reports.count(made) == 2, what="setup has created everything a second time", saw=lambda: reports
        )
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
    finally:
        await server.stop()
