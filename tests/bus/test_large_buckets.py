"""Buckets larger than what one message of JetStream, a server's buffer or a reader's queue holds."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import nats.js.errors
import pytest
from nats.aio.msg import Msg

from kybernate.bus import nats_bucket, stream_subjects
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_bucket import Run
from kybernate.bus.port import NotSetUpError
from kybernate.bus.setup import init
from kybernate.bus.stream_subjects import stream_subjects as read_subjects
from kybernate.dev.nats_server import NatsServer
from tests.bus.worlds import within

ROOT, STREAM = "$KV.kyb_seats.", "KV_kyb_seats"
MORE_THAN_A_PAGE = 100_100
"""nats-server names 100,000 subjects in an answer."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with NatsServer(tmp_path / "nats") as server:
        await init(server.url)
        async with NatsBus(server.url, source="test", name="test").opened() as bus:
            await within(bus.until_connected())
            yield bus


async def write(bus: NatsBus, keys: list[str], value: bytes) -> None:
    """Write without waiting for each acknowledgement, then until all are stored."""
    for at, key in enumerate(keys):
        await bus.link.client.publish(ROOT + key, value)
        if at % 100 == 0:
            await bus.link.client.flush()
    await bus.link.client.flush()
    async with asyncio.timeout(60):
        while (await bus.link.client.jetstream().stream_info(STREAM)).state.messages < len(keys):
            await asyncio.sleep(0.05)


async def snapshot(entries: AsyncIterator[nats_bucket.Entry | None], pause: float = 0.0) -> list[str]:
    keys = []
    while (entry := await within(anext(entries), 30)) is not None:
        keys.append(entry.key)
        if pause:
            await asyncio.sleep(pause)
    return keys


async def test_the_server_sends_no_more_than_the_reader_takes_and_closes_no_connection(bus: NatsBus) -> None:
    """Without flow control the server closes a connection on which 64 MiB wait, again after each connection."""
    keys = [f"n1.s{number}" for number in range(100)]
    await write(bus, keys, b"x" * 1_000_000)
    link, bucket = bus.link, await bus.bucket("kyb_seats")

    async with bucket.watch() as entries:
        reading, lost = asyncio.create_task(snapshot(entries, pause=0.01)), asyncio.create_task(link.until_lost())
        await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
        assert reading.done(), "the server closed the connection"
        lost.cancel()
        assert sorted(reading.result()) == sorted(keys)
        await bucket.put("n1.later", b"1")
        entry = await within(anext(entries))
        assert entry is not None
        assert entry.key == "n1.later"
    assert len(await bucket.entries()) == len(keys) + 1
    assert bus.link is link


async def test_a_reader_that_takes_one_entry_at_a_time_gets_all(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bucket, "AT_ONCE", 4)
    keys = [f"n1.s{number}" for number in range(200)]
    await write(bus, keys, b"1")
    bucket = await bus.bucket("kyb_seats")
    async with bucket.watch() as entries:
        await asyncio.sleep(0.3)  # all of them arrive, four may wait
        assert sorted(await snapshot(entries)) == sorted(keys)


async def test_subjects_of_a_stream_are_read_over_pages(bus: NatsBus) -> None:
    keys = [f"n{number % 7}.s{number}" for number in range(MORE_THAN_A_PAGE)]
    await write(bus, keys, b"")

    assert await read_subjects(bus.link.client, STREAM, f"{ROOT}>", 30.0) == {ROOT + key for key in keys}
    assert await read_subjects(bus.link.client, STREAM, f"{ROOT}n3.*", 30.0) == {
        ROOT + key for key in keys if key.startswith("n3.")
    }


class OneAnswer:
    """A NATS client whose requests are answered at once."""

    def __init__(self, answer: Msg) -> None:
        self.answer = answer

    async def request(self, *_: object, **__: object) -> Msg:
        return self.answer


async def test_others_have_turns_while_subjects_are_decoded() -> None:
    """The answer is there at once, so each turn of the other task comes from a pause between slices."""
    names = {f"{ROOT}n1.s{number}": 1 for number in range(5 * stream_subjects.SLICE)}
    data = json.dumps({"total": len(names), "state": {"subjects": names}}, separators=(",", ":")).encode()
    client = OneAnswer(Msg(None, data=data))  # type: ignore[arg-type]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    found = await read_subjects(client, STREAM, f"{ROOT}>", 30.0)
    other.cancel()

    assert found == set(names)
    assert turns == 5


async def test_subjects_that_json_escapes_and_none_at_all(bus: NatsBus) -> None:
    client = bus.link.client
    assert await read_subjects(client, STREAM, f"{ROOT}>", 5.0) == set()
    odd = ['a"b', "a\\b", "a}b", "<&>", "é", '"subjects":{"x":1}', "a"]
    await write(bus, odd, b"1")
    assert await read_subjects(client, STREAM, f"{ROOT}>", 5.0) == {ROOT + key for key in odd}
    assert await read_subjects(client, STREAM, f"{ROOT}none.>", 5.0) == set()


async def test_a_stream_that_is_missing_is_an_error(bus: NatsBus) -> None:
    with pytest.raises(nats.js.errors.NotFoundError):
        await read_subjects(bus.link.client, "KV_other", "$KV.other.>", 5.0)
    bucket = await bus.bucket("kyb_seats")
    await bus.link.client.jetstream().delete_stream(STREAM)
    with pytest.raises(NotSetUpError, match="kyb bus init"):
        await bucket.entries()


async def test_flow_control_is_answered_in_turn_and_a_stalled_consumer_is_not_idle() -> None:
    answered = []

    async def go_on(subject: str) -> None:
        answered.append(subject)

    def message(reply: str, **headers: str) -> Msg:
        return Msg(None, subject="_INBOX.1", reply=reply, data=b"", headers={"Status": "100", **headers})  # type: ignore[arg-type]

    run = Run(ROOT, "", go_on)
    run.expect({f"{ROOT}n1.s0"}, 1)
    reading = asyncio.create_task(run.next())
    await run.receive(message("$JS.FC.KV_kyb_seats.c.1", Description="FlowControl Request"))
    stalled = {"Nats-Consumer-Stalled": "$JS.FC.KV_kyb_seats.c.2", "Nats-Last-Consumer": "0"}
    await run.receive(message("", Description="Idle Heartbeat", **stalled))
    ack = "$JS.ACK.KV_kyb_seats.c.1.7.1.1.0"
    await run.receive(Msg(None, subject=f"{ROOT}n1.s0", reply=ack, data=b"1"))  # type: ignore[arg-type]

    entry = await within(reading)

    assert entry is not None
    assert entry.key == "n1.s0"
    assert answered == ["$JS.FC.KV_kyb_seats.c.1", "$JS.FC.KV_kyb_seats.c.2"]
