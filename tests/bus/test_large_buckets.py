"""Buckets larger than what one message of JetStream, a server's buffer or a reader's queue holds."""

import asyncio

import pytest
from nats.aio.msg import Msg

from kybernate.bus import nats_bucket
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_bucket import Run
from kybernate.bus.port import NotSetUpError
from tests.bus.worlds import changed, snapshot, within

ROOT, STREAM = "$KV.kyb_seats.", "KV_kyb_seats"
MORE_THAN_AN_ANSWER = 100_100
"""nats-server names 100,000 subjects in an answer."""


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


async def test_the_server_sends_no_more_than_the_reader_takes_and_closes_no_connection(bus: NatsBus) -> None:
    """Without flow control the server closes a connection on which 64 MiB wait, again after each connection."""
    keys = [f"n1.s{number}" for number in range(100)]
    await write(bus, keys, b"x" * 1_000_000)
    link, bucket = bus.link, await bus.bucket("kyb_seats")

    async with bucket.watch() as entries:
        reading, lost = asyncio.create_task(snapshot(entries, pause=0.01)), asyncio.create_task(link.lost.wait())
        await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
        assert reading.done(), "the server closed the connection"
        lost.cancel()
        assert sorted(entry.key for entry in reading.result()) == sorted(keys)
        await bucket.put("n1.later", b"1")
        assert (await changed(entries)).key == "n1.later"
    assert len(await bucket.entries()) == len(keys) + 1
    assert bus.link is link


async def test_a_reader_that_takes_one_entry_at_a_time_gets_all(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bucket, "AT_ONCE", 4)
    keys = [f"n1.s{number}" for number in range(200)]
    await write(bus, keys, b"1")
    bucket = await bus.bucket("kyb_seats")
    async with bucket.watch() as entries:
        await asyncio.sleep(0.3)  # all of them arrive, four may wait
        assert sorted(entry.key for entry in await snapshot(entries)) == sorted(keys)


async def test_a_bucket_with_more_keys_than_an_answer_names_is_read_whole(bus: NatsBus) -> None:
    keys = [f"n{number % 7}.s{number}" for number in range(MORE_THAN_AN_ANSWER)]
    await write(bus, keys, b"1")
    bucket = await bus.bucket("kyb_seats")

    assert {entry.key for entry in await bucket.entries()} == {*keys}
    assert {entry.key for entry in await bucket.entries("n3")} == {key for key in keys if key.startswith("n3.")}


async def test_keys_that_json_escapes_and_none_at_all(bus: NatsBus) -> None:
    bucket = await bus.bucket("kyb_seats")
    assert await bucket.entries() == []
    odd = ['a"b', "a\\b", "a}b", "<&>", "é", '"subjects":{"x":1}', "a"]
    await write(bus, odd, b"1")
    assert {entry.key for entry in await bucket.entries()} == {*odd}
    assert await bucket.entries("none") == []


async def test_a_stream_that_is_missing_is_an_error(bus: NatsBus) -> None:
    bucket = await bus.bucket("kyb_seats")
    await bus.link.client.jetstream().delete_stream(STREAM)
    with pytest.raises(NotSetUpError, match="kyb bus init"):
        await bucket.entries()
    assert await bus.link.leader_seconds(STREAM) == 0, "no other server has its leader"


async def test_flow_control_is_answered_in_turn_and_a_stalled_consumer_is_not_idle() -> None:
    answered = []

    async def go_on(subject: str) -> None:
        answered.append(subject)

    def message(reply: str, **headers: str) -> Msg:
        return Msg(None, subject="_INBOX.1", reply=reply, data=b"", headers={"Status": "100", **headers})  # type: ignore[arg-type]

    run = Run(ROOT, go_on)
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
