"""What is true of the bus over NATS alone."""

import asyncio
import datetime
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from kybernate.bus import nats_bucket
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_link import LEADER_SECONDS
from kybernate.bus.port import BusDownError, BusError, NoAnswerError
from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer
from kybernate.messages import ActivateSeat, AskJobs, CommandReply, JobReply, SeatActivated, SeatEvent, TrafficSignal
from tests.bus.worlds import activated, changed, connected, epoch_of, snapshot, within
from tests.until import until


@pytest.fixture
async def raw(server: NatsServer) -> AsyncIterator[Client]:
    """A client without our code."""
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def test_a_bus_may_be_opened_before_its_server_is_there(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    await server.stop()  # its port is known now, and no process listens there
    async with (
        NatsBus(server.url, source="test", name="test").opened() as bus,
        bus.subscribe(SeatEvent.pattern()) as got,
    ):
        assert not bus.connected
        with pytest.raises(BusDownError, match=r"not connected to NATS at 127\.0\.0\.1"):
            await bus.publish(activated(1))
        await server.start()
        try:
            await within(bus.until_connected())
            await bus.publish(activated(2))
            assert await epoch_of(got) == 2
        finally:
            await server.stop()


async def test_many_restarts_lose_no_subscription(server: NatsServer, bus: NatsBus) -> None:
    async with bus.subscribe(SeatEvent.pattern()) as got:
        for n in range(5):
            await within(bus.until_connected())
            await bus.publish(activated(n))
            assert await epoch_of(got) == n
            await server.kill()
            await until(lambda: not bus.connected, what="the client bus notices that the server is away")
            await server.start()


async def test_publishing_through_a_restart_ends_in_sent_or_down(server: NatsServer, bus: NatsBus) -> None:
    """Whatever the moment of the loss: publish returns or raises BusDownError, and no message arrives late."""
    arrived: list[int] = []
    refused: set[int] = set()

    async def write() -> None:
        for n in range(100_000):
            try:
                await bus.publish(activated(n))
            except BusDownError:
                refused.add(n)
            await asyncio.sleep(0.001)

    async def gather(got: AsyncIterator[object]) -> None:
        async for message in got:
            assert isinstance(message, SeatActivated)
            arrived.append(message.epoch)

    async with connected(server.url) as reader, reader.subscribe(SeatEvent.pattern()) as got:
        tasks = [asyncio.create_task(write()), asyncio.create_task(gather(got))]
        for restarts in range(4):
            count = len(arrived)
            await until(lambda: len(arrived) > count + 20, what="twenty more messages arrive")  # noqa: B023
            if restarts < 3:
                await server.kill()
                await until(lambda: not bus.connected, what="the writer notices that the server is away")
                await server.start()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert arrived == sorted(arrived)
    assert refused
    assert not refused & set(arrived)


async def test_a_flush_given_up_leaves_the_connection_alive(bus: NatsBus) -> None:
    """nats-py's own flush, cancelled, ends its reading task: the connection stays open and hears nothing more."""
    async with bus.subscribe(SeatEvent.pattern()) as got:
        for n in range(20):
            flush = asyncio.create_task(bus.flush())
            await asyncio.sleep(0)
            flush.cancel()
            with pytest.raises(BusError):
                await bus.flush(0.0)
            await bus.publish(activated(n))
            assert await epoch_of(got) == n


async def test_flush_returns_after_everything_published(server: NatsServer, bus: NatsBus) -> None:
    """Another client that subscribes after the flush gets nothing of it."""
    async with connected(server.url) as reader:
        for n in range(50):
            for _ in range(20):
                await bus.publish(activated(0))
            await bus.flush()
            async with reader.subscribe(SeatEvent.pattern()) as got:
                await bus.publish(activated(n + 1))
                assert await epoch_of(got) == n + 1


async def test_two_servers_are_two_buses(server: NatsServer, tmp_path: Path) -> None:
    async def accept(_: object) -> JobReply:
        return JobReply(accepted=True)

    async with (
        NatsServer(tmp_path / "node") as node_server,
        connected(server.url) as cluster,
        connected(node_server.url) as node,
        cluster.subscribe(SeatEvent.pattern()) as on_cluster,
        node.subscribe(SeatEvent.pattern()) as on_node,
        node.serve(AskJobs.pattern(node="n1"), accept),
    ):
        question = AskJobs(cause="test", node="n1", epoch=0)
        assert (await node.request(question, JobReply, timeout=5)).accepted
        with pytest.raises(BusError, match="no service handles"):
            await cluster.request(question, JobReply, timeout=5)
        await cluster.publish(activated(1))
        await node.publish(activated(2))
        assert (await epoch_of(on_cluster), await epoch_of(on_node)) == (1, 2)
        await server.kill()
        await until(lambda: not cluster.connected, what="the client cluster notices that the server is away")
        assert (await node.request(question, JobReply, timeout=5)).accepted


async def test_events_are_cloud_events_and_signals_are_plain(bus: NatsBus, raw: Client) -> None:
    got: asyncio.Queue[Msg] = asyncio.Queue()
    await raw.subscribe("kyb.v1.>", cb=got.put)
    await raw.publish("kyb.v1.here", b"")
    assert (await got.get()).subject == "kyb.v1.here"  # behind the subscription; nats-py's flush goes before it
    event = activated(3)
    await bus.publish(event)
    await bus.publish(TrafficSignal(cause="c", source="r", model="m"))
    first, second = await within(got.get()), await within(got.get())
    assert first.headers is not None
    assert first.headers["ce-type"] == "ai.kyb.v1.seat-activated"
    assert first.headers["ce-source"] == "test"
    assert first.headers["Nats-Msg-Id"] == first.headers["ce-id"] == event.id
    assert second.subject == "kyb.v1.sig.r.m"
    assert not second.headers


async def test_refused_credentials_end_the_bus(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats", arguments=("--user", "kyb", "--pass", "right")) as guarded:
        place = guarded.url.removeprefix("nats://")
        async with NatsBus(f"nats://kyb:wrong@{place}", source="test", name="test").opened() as bus:
            with pytest.raises(BusError, match="check its credentials") as caught:
                await within(bus.closed())
            assert "wrong" not in str(caught.value)
            with pytest.raises(BusDownError):
                await bus.publish(activated(1))
        async with connected(f"nats://kyb:right@{place}"):
            pass


async def test_a_watch_that_missed_a_change_is_found_and_healed(
    server: NatsServer, raw: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bucket, "COMPARE_SECONDS", 0.1)
    await init(server.url)
    js = raw.jetstream()
    with structlog.testing.capture_logs() as logs:
        async with connected(server.url) as bus:
            bucket = await bus.bucket("kyb_seats")
            async with bucket.watch() as entries:
                assert await snapshot(entries) == []
                # A paused consumer still sends heartbeats: the watch cannot know that it is deaf.
                (consumer,) = await js.consumers_info("KV_kyb_seats")
                end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
                await js.pause_consumer("KV_kyb_seats", consumer.name, end.isoformat())
                await bucket.put("n1.s1", b"1")
                assert (await changed(entries)).key == "n1.s1"
    assert [log["keys"] for log in logs if log["event"] == "watch.differs"] == [["n1.s1"]]


async def test_a_watch_whose_consumer_is_removed_goes_on(bus: NatsBus, raw: Client) -> None:
    js, bucket = raw.jetstream(), await bus.bucket("kyb_seats")
    async with bucket.watch() as entries:
        assert await snapshot(entries) == []
        (consumer,) = await js.consumers_info("KV_kyb_seats")
        await js.delete_consumer("KV_kyb_seats", consumer.name)
        await bucket.put("n1.s1", b"1")
        assert (await changed(entries)).key == "n1.s1"
    assert await js.consumers_info("KV_kyb_seats") == []


async def test_a_row_waits_for_its_leader_as_long_as_a_leader_counts_as_one(server: NatsServer, bus: NatsBus) -> None:
    """One that an election loses is never answered, and a drain waits for it: it took 5 s."""
    bucket, threads = await bus.bucket("kyb_seats"), Path(f"/proc/{server.pid}/task")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()), what="it is still")
        with pytest.raises(NoAnswerError, match=f"no answer within {LEADER_SECONDS:g} s"):
            await within(bucket.put("n1.s1", b"1"))
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_init_says_that_no_server_answers(server: NatsServer) -> None:
    await server.stop()
    with pytest.raises(BusDownError, match="is it running"):
        await init(server.url)


async def test_the_answer_of_another_version_may_have_more_fields(bus: NatsBus, raw: Client) -> None:
    async def reply(msg: Msg) -> None:
        await msg.respond(b'{"accepted": true, "later": 1}' if b'"s1"' in msg.data else b"nonsense")

    await raw.subscribe("kyb.v1.cmd.>", cb=reply)
    await raw.request("kyb.v1.cmd.n.s0.activate", timeout=5)  # behind the subscription; nats-py's flush goes before it
    assert (await bus.request(ActivateSeat(cause="c", node="n", seat="s1"), CommandReply, timeout=5)).accepted
    with pytest.raises(BusError, match="is no CommandReply"):
        await bus.request(ActivateSeat(cause="c", node="n", seat="s2"), CommandReply, timeout=5)


async def test_a_read_that_loses_its_server_half_way_is_a_bus_error(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services go on after a BusError; anything else ends them."""
    asked = asyncio.Event()

    async def swallow(self: object, msg: Msg) -> None:
        """The consumer was made, and nothing of it arrives."""
        asked.set()

    monkeypatch.setattr(nats_bucket.Run, "receive", swallow)
    bucket = await bus.bucket("kyb_seats")
    await bucket.put("k", b"1")
    reading = asyncio.create_task(bucket.entries())
    await within(asked.wait())
    await server.kill()
    with pytest.raises(NoAnswerError, match=r"read it again|connection was lost"):
        await within(reading)
