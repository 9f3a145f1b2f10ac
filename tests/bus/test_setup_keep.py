"""``kyb bus init``: adds what is missing, updates what differs, and repeats it after NATS has lost its disk."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.js.api import StreamInfo
from nats.js.client import JetStreamContext

from kybernate.bus.port import BusError
from kybernate.bus.setup import COMPLETE, init, keep, streams
from kybernate.dev.nats_server import NatsServer
from tests.until import until


async def test_streams_are_made_again_when_nats_has_lost_its_disk(tmp_path: Path) -> None:
    reports: list[str] = []
    tries: list[bool] = []
    made = f"changed: {', '.join(config.name or '' for config in streams())}"
    server = NatsServer(tmp_path / "nats")
    await server.start()
    try:
        keeping = asyncio.create_task(keep(server.url, every=0.05, report=reports.append, tried=tries.append))
        await until(lambda: reports[-1:] == [COMPLETE], what="setup reports that all streams and buckets exist")
        assert reports[0] == made
        assert set(tries) == {True}
        news, checks = list[str](), list[bool]()
        quiet = keep(server.url, every=0.05, report=news.append, tried=checks.append, last=COMPLETE)
        checking = asyncio.create_task(quiet)
        await until(lambda: len(checks) > 1, what="setup has looked twice", saw=lambda: checks)
        checking.cancel()
        assert news == [], "a caller that knows it already gets no report"
        await server.stop()
        shutil.rmtree(tmp_path / "nats")
        before = len(tries)
        await until(lambda: len(tries) > before and "no NATS server answers" in reports[-1], what="it tries again")
        assert tries[-1] is False
        await server.start()
        await until(lambda: reports.count(made) == 2, what="setup has created everything a second time")
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
    finally:
        await server.stop()


def _small_store(folder: Path, size: int) -> NatsServer:
    """A server whose store is limited to ``size`` bytes."""
    folder.mkdir(exist_ok=True)
    config = folder / "nats.conf"
    config.write_text(f"jetstream {{ max_file_store: {size} }}\n")
    return NatsServer(folder, arguments=("--config", str(config)))


async def test_init_runs_again_where_a_stream_exceeds_the_free_rest_of_the_store(tmp_path: Path) -> None:
    """The chart's server has 2 GiB, of which KYB_EVENTS reserves 1 GiB: adding it again would be refused."""
    names = tuple(config.name for config in streams())
    async with _small_store(tmp_path / "nats", 2 << 30) as server:
        assert await init(server.url) == names
        assert await init(server.url) == ()
        client = await nats.connect(server.url)
        js = client.jetstream()
        await js.delete_stream("KV_kyb_seats")
        other = (await js.stream_info("KYB_EVENTS")).config
        other.max_age = 3600.0
        other.max_msgs = 7
        await js.update_stream(other)
        assert await init(server.url) == ("KYB_EVENTS", "KV_kyb_seats")
        now = (await js.stream_info("KYB_EVENTS")).config
        assert (now.max_age, now.max_msgs) == (streams()[0].max_age, -1)
        assert await init(server.url) == ()
        await client.close()


async def test_a_refused_stream_does_not_keep_init_from_the_others(tmp_path: Path) -> None:
    async with _small_store(tmp_path / "nats", 1 << 29) as server:  # too small for KYB_EVENTS only
        for _ in range(2):
            with pytest.raises(
                BusError, match=r"KYB_EVENTS.*insufficient storage.*it reserves 1.0 GiB: give the server"
            ):
                await init(server.url)
        client = await nats.connect(server.url)
        there = {info.config.name for info in await client.jetstream().streams_info()}
        await client.close()
        assert there == {config.name for config in streams()} - {"KYB_EVENTS"}


async def test_a_stream_whose_server_is_away_does_not_keep_init_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy of each stream on one of three servers: those of the others are made, and the result names all."""
    look, away = JetStreamContext.stream_info, {"KYB_EVENTS"}

    async def stream_info(js: JetStreamContext, name: str) -> StreamInfo:
        if name in away:
            raise nats.errors.TimeoutError
        return await look(js, name)

    monkeypatch.setattr(JetStreamContext, "stream_info", stream_info)
    async with NatsServer(tmp_path / "nats") as server:
        with pytest.raises(BusError, match="KYB_EVENTS: no answer within 5 s") as caught:
            await init(server.url)
        assert "KYB_AUDIT" not in str(caught.value)
        away.clear()
        assert await init(server.url) == ("KYB_EVENTS",), "the others were made"

    async with NatsServer(tmp_path / "another") as server:
        away.add("KV_kyb_seats")
        made = await init(server.url, wait=60, on_wait=lambda _: away.clear())
        assert made == (*(config.name for config in streams() if config.name != "KV_kyb_seats"), "KV_kyb_seats")
