"""What every bus does: in memory and over NATS, and messages and requests also over the socket of a node."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kybernate.bus.port import Bus, BusDownError, Entry, NoAnswerError, NotSetUpError
from kybernate.envelope import Message
from kybernate.messages import (
    ActivateSeat,
    CommandReply,
    GroupDecided,
    ParkSeat,
    RequestEnded,
    SeatActivated,
    SeatClosed,
    SeatEvent,
    SeatEvicted,
    SeatParked,
    TrafficSignal,
)
from kybernate.seat import SeatState
from tests.bus.worlds import (
    MemoryWorld,
    NatsWorld,
    Pair,
    World,
    activated,
    changed,
    epoch_of,
    nats_world,
    pair_of,
    snapshot,
    socket_pair,
    within,
)
from tests.until import until

SEATS = "kyb_seats"


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with nats_world(tmp_path / "nats") as real:
        yield real


@pytest.fixture(params=["memory", "nats", "socket", "socket-back"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two ends of one bus. ``socket``: the near one connects to the far one; ``socket-back``: the other way round."""
    if request.param.startswith("socket"):
        async with socket_pair(tmp_path / "bus.sock", back=request.param.endswith("back")) as ends:
            yield ends
        return
    async with contextlib.AsyncExitStack() as stack:
        memory = request.param == "memory"
        world = MemoryWorld() if memory else await stack.enter_async_context(nats_world(tmp_path / "nats"))
        yield await stack.enter_async_context(pair_of(world))


async def stored(bus: Bus, message: Message) -> None:
    """Wait until the server has stored an event: nats-server does that a moment after it has passed it on."""

    async def found() -> bool:
        return message.id in [each.id async for each in bus.replay()]

    await until(found, what="the event in the stream")


def signal(n: int) -> TrafficSignal:
    return TrafficSignal(cause="test", source="r0", model="org/Model-7B", seq=n)


async def accept(_: Message) -> CommandReply:
    return CommandReply(accepted=True, op="op1")


async def test_messages_arrive_in_the_order_in_which_they_were_sent(pair: Pair) -> None:
    async with pair.far.subscribe(TrafficSignal.pattern()) as got:
        for n in range(500):
            await pair.near.publish(signal(n))
        messages = [await within(anext(got)) for _ in range(500)]
    assert [m.seq for m in messages if isinstance(m, TrafficSignal)] == list(range(500))
    assert messages[0] == signal(0).model_copy(update={"id": messages[0].id, "at": messages[0].at})


async def test_the_order_holds_between_kinds_of_one_subscription(pair: Pair) -> None:
    kinds = (SeatClosed, SeatEvicted, SeatParked)
    async with pair.far.subscribe(*(kind.pattern() for kind in kinds)) as got:
        for n in range(300):
            await pair.near.publish(activated(n))  # not asked for
            kind = kinds[n * n % 3]
            await pair.near.publish(kind(cause="test", node="n1", seat="s1", state=SeatState.PARKING, epoch=n))
        assert [await epoch_of(got) for _ in range(300)] == list(range(300))


async def test_overlapping_patterns_bring_a_message_once(pair: Pair) -> None:
    async with pair.far.subscribe(SeatEvent.pattern(), SeatActivated.pattern(seat="s1")) as got:
        await pair.near.publish(activated(1))
        await pair.near.publish(activated(2))
        assert [await epoch_of(got), await epoch_of(got)] == [1, 2]


async def test_a_subscription_brings_nothing_from_before(pair: Pair) -> None:
    await pair.near.publish(activated(1))
    with pytest.raises(NoAnswerError):  # a round trip
        await pair.near.request(ParkSeat(cause="test", node="n1", seat="s1"), CommandReply, timeout=5)
    async with pair.far.subscribe(SeatEvent.pattern()) as got:
        await pair.near.publish(activated(2))
        assert await epoch_of(got) == 2


async def test_a_subscription_ends_with_its_context(pair: Pair) -> None:
    async with pair.far.subscribe(SeatEvent.pattern()) as got:
        pass
    assert [m async for m in got] == []


async def test_a_message_that_cannot_be_read_is_skipped(pair: Pair) -> None:
    async with pair.far.subscribe(SeatEvent.pattern()) as got:
        await pair.inject("kyb.v1.evt.n1.s1.activated", b"{not json")
        await pair.inject("kyb.v1.evt.n1.s1.activated", b'{"cause": "x"}')
        await pair.inject("kyb.v1.evt.n1.s1.unheard-of", b"{}")
        await pair.near.publish(activated(7))
        assert await epoch_of(got) == 7


async def test_a_request_is_answered_by_the_one_who_serves_it(pair: Pair) -> None:
    async with pair.far.serve(ActivateSeat.pattern(node="n1"), accept):
        command = ActivateSeat(cause="test", node="n1", seat="s1")
        assert (await pair.near.request(command, CommandReply, timeout=5)).op == "op1"
        with pytest.raises(NoAnswerError, match="no service handles"):
            await pair.near.request(ParkSeat(cause="test", node="n1", seat="s1"), CommandReply, timeout=5)
    with pytest.raises(NoAnswerError, match="no service handles"):
        await pair.near.request(command, CommandReply, timeout=5)


async def test_a_handler_takes_one_request_at_a_time(pair: Pair) -> None:
    running, most = 0, 0

    async def count(_: Message) -> CommandReply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return CommandReply(accepted=True)

    async with pair.far.serve(ActivateSeat.pattern(), count):
        command = ActivateSeat(cause="test", node="n1", seat="s1")
        await asyncio.gather(*(pair.near.request(command, CommandReply, timeout=5) for _ in range(5)))
    assert most == 1


async def test_a_late_answer_is_not_taken_for_that_of_the_next_request(pair: Pair) -> None:
    go_on = asyncio.Event()

    async def slow(message: Message) -> CommandReply:
        await go_on.wait()
        return CommandReply(accepted=True, op=message.cause)

    async with pair.far.serve(ActivateSeat.pattern(), slow):
        with pytest.raises(NoAnswerError, match="may have been done or not"):
            await pair.near.request(ActivateSeat(cause="1", node="n1", seat="s1"), CommandReply, timeout=0.2)
        second = ActivateSeat(cause="2", node="n1", seat="s1")
        asking = asyncio.create_task(pair.near.request(second, CommandReply, timeout=60))
        await asyncio.sleep(0)
        go_on.set()
        assert (await within(asking)).op == "2"


async def test_a_handler_that_raises_ends_no_other_request(pair: Pair) -> None:
    async def moody(message: Message) -> CommandReply:
        assert isinstance(message, ActivateSeat)
        if message.seat == "bad":
            raise RuntimeError("a bug")
        return CommandReply(accepted=True)

    async with pair.far.serve(ActivateSeat.pattern(), moody):
        with pytest.raises(NoAnswerError):
            await pair.near.request(ActivateSeat(cause="test", node="n1", seat="bad"), CommandReply, timeout=0.2)
        await pair.inject("kyb.v1.cmd.n1.s1.activate", b"no json")
        good = ActivateSeat(cause="test", node="n1", seat="good")
        assert (await pair.near.request(good, CommandReply, timeout=5)).accepted


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_service_that_no_longer_answers_ends_instead_of_staying_silent(pair: Pair, cancelled: bool) -> None:
    async def broken(_: Message) -> CommandReply:
        if cancelled:
            raise asyncio.CancelledError
        return None  # type: ignore[return-value]

    async def serve() -> None:
        async with pair.far.serve(ActivateSeat.pattern(), broken):
            serving.set()
            await asyncio.Event().wait()

    serving = asyncio.Event()
    service = asyncio.create_task(serve())
    await within(serving.wait())
    with pytest.raises(NoAnswerError):
        await pair.near.request(ActivateSeat(cause="test", node="n1", seat="s1"), CommandReply, timeout=0.2)
    done, _ = await asyncio.wait([service], timeout=5)
    if not done:
        service.cancel()
    assert done, "the service goes on without answering"
    with pytest.raises(RuntimeError, match=r"serve kyb\.v1\.cmd"):
        await service


async def test_nothing_is_sent_later_after_an_outage(pair: Pair) -> None:
    changes: list[bool] = []
    near, far = pair.near, pair.far
    async with far.subscribe(SeatEvent.pattern()) as got:
        near.on_change(changes.append)
        await pair.stop()
        await until(lambda: not near.connected and not far.connected, what="both ends notice it")
        for forbidden in (
            near.publish(activated(1)),
            near.request(ActivateSeat(cause="x", node="n1", seat="s1"), CommandReply, timeout=1),
        ):
            with pytest.raises(BusDownError):
                await forbidden
        await pair.start()
        await until(lambda: near.connected and far.connected, what="both ends have each other again")
        await near.publish(activated(2))
        assert await epoch_of(got) == 2
        await until(lambda: changes == [False, True], what="the client reports that it is away and back")


async def test_nothing_is_written_later_after_an_outage(world: World) -> None:
    async with world.client() as bus:
        bucket = await bus.bucket(SEATS)
        await bucket.put("n1.s1", b"before")
        await world.stop()
        await until(lambda: not bus.connected, what="the client notices that the server is away")
        for forbidden in (bus.flush(), bucket.put("n1.s1", b"during"), bucket.entries("n1"), bus.bucket(SEATS)):
            with pytest.raises(BusDownError):
                await forbidden
        await world.start()
        await within(bus.until_connected())
        assert [entry.value for entry in await bucket.entries("n1")] == [b"before"]


async def test_a_request_under_way_ends_when_the_connection_is_lost(pair: Pair) -> None:
    asked = asyncio.Event()

    async def never(_: Message) -> CommandReply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with pair.far.serve(ActivateSeat.pattern(), never):
        command = ActivateSeat(cause="test", node="n1", seat="s1")
        asking = asyncio.create_task(pair.near.request(command, CommandReply, timeout=60))
        await within(asked.wait())
        await pair.stop()
        with pytest.raises(NoAnswerError, match="connection was lost"):
            await within(asking)


async def test_what_was_entered_during_an_outage_is_in_force_after_it(pair: Pair) -> None:
    await pair.stop()
    await until(lambda: not pair.far.connected, what="the far end notices that the connection is away")
    async with pair.far.subscribe(SeatEvent.pattern()) as got, pair.far.serve(ActivateSeat.pattern(), accept):
        await pair.start()
        await until(lambda: pair.far.connected and pair.near.connected, what="both ends have each other again")
        await pair.near.publish(activated(5))
        assert await epoch_of(got) == 5
        await pair.near.request(ActivateSeat(cause="test", node="n1", seat="s1"), CommandReply, timeout=5)


async def test_a_watch_entered_during_an_outage_is_in_force_after_it(world: World) -> None:
    async with world.client() as bus:
        bucket = await bus.bucket(SEATS)
        await bucket.put("n1.s1", b"1")
        await world.stop()
        await until(lambda: not bus.connected, what="the client bus notices that the server is away")
        async with bucket.watch() as entries:
            await world.start()
            await within(bus.until_connected())
            assert [entry.key for entry in await snapshot(entries)] == ["n1.s1"]


async def test_a_bucket_keeps_the_last_value_of_each_key(world: World) -> None:
    async with world.client() as bus:
        bucket = await bus.bucket(SEATS)
        assert await bucket.entries("n1") == []
        first = await bucket.put("n1.s1", b"1")
        second = await bucket.put("n1.s1", b"2")
        await bucket.put("n10.s1", b"other")
        assert second > first
        assert [e.key for e in await bucket.entries()] == ["n1.s1", "n10.s1"]
        assert await bucket.entries("n1") == [Entry("n1.s1", b"2", second)]
        await bucket.delete("n1.s1")
        assert await bucket.entries("n1") == []


async def test_a_watch_gives_the_present_then_none_then_changes(world: World) -> None:
    async with world.client() as writer, world.client() as reader:
        theirs, ours = await writer.bucket(SEATS), await reader.bucket(SEATS)
        async with ours.watch() as entries:
            assert await snapshot(entries) == []
        await theirs.put("n1.gone", b"0")
        await theirs.delete("n1.gone")
        await theirs.put("n1.s1", b"1")
        await theirs.put("n2.s1", b"2")
        async with ours.watch() as entries:
            assert [(e.key, e.value) for e in await snapshot(entries)] == [("n1.s1", b"1"), ("n2.s1", b"2")]
            await theirs.put("n1.s2", b"4")
            await theirs.put("n1.s1", b"5")
            await theirs.delete("n1.s2")
            changes = [await within(anext(entries)) for _ in range(3)]
        assert [(e.key, e.value) for e in changes if e] == [("n1.s2", b"4"), ("n1.s1", b"5"), ("n1.s2", None)]
        assert [e async for e in entries] == []


async def test_after_a_reconnect_a_watch_gives_the_whole_snapshot_again(world: World) -> None:
    async with world.client() as bus:
        bucket = await bus.bucket(SEATS)
        await bucket.put("n1.s1", b"1")
        await bucket.put("n1.s2", b"2")
        async with bucket.watch() as entries:
            assert len(await snapshot(entries)) == 2
            await world.stop()
            await until(lambda: not bus.connected, what="the client bus notices that the server is away")
            await world.start()
            again = await snapshot(entries)
            assert [(e.key, e.value) for e in again] == [("n1.s1", b"1"), ("n1.s2", b"2")]
            await bucket.put("n1.s3", b"3")
            assert (await changed(entries)).key == "n1.s3"


async def test_a_missing_bucket_says_what_to_run(world: World) -> None:
    async with world.client() as bus:
        with pytest.raises(NotSetUpError, match="kyb bus init"):
            await bus.bucket("kyb_nothing")


async def test_events_are_replayed_after_an_id(world: World) -> None:
    async with world.client() as bus:
        assert [m async for m in bus.replay()] == []
        sent = [activated(n) for n in range(5)]
        for message in sent:
            await bus.publish(message)
        await bus.publish(sent[1])  # published twice, stored once
        await bus.publish(signal(1))  # no event
        await stored(bus, sent[4])
        assert [m.id async for m in bus.replay()] == [m.id for m in sent]
        assert [m async for m in bus.replay(after_id=sent[2].id)] == sent[3:]
        assert [m async for m in bus.replay(after_id=sent[4].id)] == []
        assert [m async for m in bus.replay(after_id="unknown")] == sent


async def test_events_are_replayed_since_a_time_and_of_one_kind(world: World) -> None:
    async with world.client() as bus:
        await bus.publish(first := activated(1))
        await stored(bus, first)
        await asyncio.sleep(0.05)
        between = time.time()
        await asyncio.sleep(0.05)
        await bus.publish(decided := GroupDecided(cause="c", node="n1", group="G0", decision="stay"))
        await stored(bus, decided)
        assert [m async for m in bus.replay(since=between)] == [decided]
        assert [type(m) async for m in bus.replay(since=time.time() - 60)] == [SeatActivated, GroupDecided]
        assert [type(m) async for m in bus.replay(since=1.0, pattern=GroupDecided.pattern())] == [GroupDecided]
        assert [m async for m in bus.replay(since=time.time() + 60)] == []
        assert [m async for m in bus.replay(pattern=SeatParked.pattern())] == []


async def test_the_last_record_of_a_request_is_found_by_its_id(world: World) -> None:
    async with world.client() as bus:
        name, facts = "caller/7 ä", {"cause": "c", "router": "r", "model": "m", "arrived_at": 1.0, "seconds": 2.0}
        assert await bus.ended(name) is None
        for status in (503, 200):
            await bus.publish(RequestEnded.model_validate({**facts, "request": name, "status": status}))

        async def ended() -> RequestEnded | None:
            record = await bus.ended(name)
            return record if record is not None and record.status == 200 else None

        assert (await until(ended, what="the last record")).request == name
        assert await bus.ended("caller/8") is None


async def test_losing_the_disk_loses_history_and_no_seats(world: World) -> None:
    async with world.client() as bus:
        bucket = await bus.bucket(SEATS)
        await bucket.put("n1.s1", b"1")
        await bus.publish(activated(1))
        await bus.flush()
        async with bucket.watch() as entries:
            assert len(await snapshot(entries)) == 1
            await world.stop()
            await world.wipe()
            await world.start()
            await within(bus.until_connected())
            if isinstance(world, NatsWorld):
                with pytest.raises(NotSetUpError, match="kyb bus init"):
                    await bucket.put("n1.s1", b"2")
                with pytest.raises(NotSetUpError, match="kyb bus init"):
                    await bus.bucket(SEATS)
                await world.init()
            assert [(e.key, e.value) for e in await snapshot(entries)] == [("n1.s1", None)]
            await bucket.put("n1.s1", b"2")
            entry = await changed(entries)
            assert (entry.key, entry.value) == ("n1.s1", b"2")
        assert [m async for m in bus.replay()] == []
        again = activated(2)
        await bus.publish(again)
        await stored(bus, again)
        assert [m async for m in bus.replay()] == [again]
