"""The roster has one writer, and what another one writes does not stay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
import pytest
import structlog

from kybernate.bus.nats import NatsBus
from kybernate.bus.port import Bucket, Bus, BusError, Entry
from kybernate.bus.setup import init
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.dev.nats_server import NatsServer
from kybernate.messages import DrainNode, ResumeNode
from kybernate.roster import BUCKET, SeatRecord, seat_key
from kybernate.seat import SeatState
from services.gpu_manager import publish
from services.gpu_manager.core.inputs import DrainAnnounced, ForeignProcess, ForeignProcessesSeen, Published
from services.gpu_manager.publish import RosterWriter
from tests.manager.world import World
from tests.until import until


async def ignore(_: object) -> None:
    """Nobody receives what the writer says."""


async def recorded() -> None:
    """Everything is in the ledger."""


@asynccontextmanager
async def writing(world: World, bus: Bus | None = None) -> AsyncIterator[tuple[Bucket, RosterWriter]]:
    """The roster of this world's board."""
    async with AsyncExitStack() as stack:
        bus = bus or await stack.enter_async_context(MemoryBus.connect(MemoryServer()))
        writer = RosterWriter(bus, lambda: world.now, world.node, ignore, recorded)
        writer.all_changed()
        task = asyncio.create_task(writer.run())
        try:
            yield await bus.bucket(BUCKET), writer
        finally:
            task.cancel()
            await asyncio.wait([task])


async def entry_of(bucket: Bucket, key: str) -> Entry | None:
    return next((entry for entry in await bucket.entries() if entry.key == key), None)


async def row_of(bucket: Bucket, key: str) -> SeatRecord:
    entry = await entry_of(bucket, key)
    return SeatRecord.model_validate_json((entry and entry.value) or b"")


async def state_of(bucket: Bucket, key: str) -> SeatState | None:
    entry = await entry_of(bucket, key)
    try:
        return SeatRecord.model_validate_json(entry.value or b"").state if entry is not None else None
    except ValueError:
        return None


async def until_state(bucket: Bucket, key: str, wanted: SeatState | None) -> None:
    async def reached() -> bool:
        return await state_of(bucket, key) is wanted

    await until(reached, what=f"the row of {key} is {wanted}")


async def test_what_another_one_wrote_is_replaced_and_logged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "COMPARE_SECONDS", 0.02)
    seat, free = world.seat(0, 0), world.seat(0, 1)
    world.serve(seat, "m")
    node = world.node.name
    key, unused, strange = seat_key(node, seat), seat_key(node, free), seat_key(node, "unknown")
    async with writing(world) as (bucket, _):
        await until_state(bucket, key, SeatState.ACTIVE)
        other = seat_key("another-node", "s1")
        record = SeatRecord(node="another-node", seat="s1", state=SeatState.PARKED)
        await bucket.put(other, record.model_dump_json().encode())
        with structlog.testing.capture_logs() as logs:
            row = await row_of(bucket, key)
            await bucket.put(key, row.model_copy(update={"state": SeatState.PARKED}).model_dump_json().encode())
            await until_state(bucket, key, SeatState.ACTIVE)
            await bucket.put(key, b'{"stream":"KYB_AUDIT","seq":1}')
            await until_state(bucket, key, SeatState.ACTIVE)
            for forged in (unused, strange):
                await bucket.put(forged, row.model_dump_json().encode())
                await until_state(bucket, forged, None)
            await bucket.delete(key)
            await until_state(bucket, key, SeatState.ACTIVE)
        logged = [line for line in logs if line["event"] == "roster.differs"]
        assert {found for line in logged for found in line["keys"]} == {key, unused, strange}
        assert await state_of(bucket, other) is SeatState.PARKED


async def test_rows_that_a_purge_took_are_written_again_within_seconds(world: World, a: str, tmp_path: Path) -> None:
    """A purge sends no message. Until then a router that starts knows by the count that rows are missing."""
    world.serve(a, "m")
    key = seat_key(world.node.name, a)
    async with NatsServer(tmp_path) as server:
        await init(server.url)
        async with NatsBus(server.url, source="kyb/x", name="x").opened() as bus:
            await bus.until_connected()
            async with writing(world, bus) as (bucket, writer):
                await until_state(bucket, key, SeatState.ACTIVE)
                assert writer.rows() == (1, world.node.seq)
                client = await nats.connect(server.url)
                await client.jetstream().purge_stream(f"KV_{BUCKET}")
                await client.close()
                assert key not in await bucket.keys()
                await until_state(bucket, key, SeatState.ACTIVE)
                assert key in await bucket.keys(world.node.name)


async def test_a_change_under_way_is_no_difference(world: World, a: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "COMPARE_SECONDS", 0.02)
    world.serve(a, "m")
    key = seat_key(world.node.name, a)
    with structlog.testing.capture_logs() as logs:
        async with writing(world) as (bucket, _):
            await until_state(bucket, key, SeatState.ACTIVE)
            strange = seat_key(world.node.name, "unknown")
            await bucket.put(strange, b"{}")  # once it is gone, the whole roster was compared
            while await entry_of(bucket, strange) is not None:
                await asyncio.sleep(0.005)
    assert [line["keys"] for line in logs if line["event"] == "roster.differs"] == [[strange]]


async def test_a_manager_that_has_not_recovered_leaves_the_rows_of_its_seats_alone() -> None:
    """Its bus comes before it has recovered: all seats look free to it, and rows of free seats are deleted."""
    world = World()
    key = seat_key(world.node.name, world.seat(0, 0))
    async with MemoryBus.connect(MemoryServer()) as bus:
        bucket = await bus.bucket(BUCKET)
        await bucket.put(key, b"by the manager before")
        bus.cut()
        writer = RosterWriter(bus, lambda: world.now, world.node, ignore, recorded)
        task = asyncio.create_task(writer.run())
        await asyncio.sleep(0)  # it listens to the bus now
        bus.restore()
        while writer._dirty:
            await asyncio.sleep(0)
        entry = await entry_of(bucket, key)
        task.cancel()
        await asyncio.wait([task])
    assert entry.value == b"by the manager before"


async def test_what_blocks_a_seat_is_written_when_it_begins_and_when_it_ends_without_an_event(world: World) -> None:
    seat, _ = world.fill("m", "n")
    key = seat_key(world.node.name, seat)
    async with writing(world) as (bucket, writer):

        async def blocked() -> bool:
            return bool((await row_of(bucket, key)).blocked)

        async def free() -> bool:
            return not await blocked()

        await until_state(bucket, key, SeatState.PARKED)
        for strangers, written in (((ForeignProcess("GPU-0", 7, "python3"),), blocked), ((), free)):
            world.receive(ForeignProcessesSeen(strangers))
            writer.refresh()
            await until(written, what=f"the record is {written.__name__}")


async def test_a_start_whose_process_has_come_has_its_own_deadline_in_the_roster(world: World, a: str) -> None:
    """The row kept the end of a start without a process, and everybody called the start late after 270 s."""
    key = seat_key(world.node.name, a)
    world.at_gate(a, "m")
    async with writing(world) as (bucket, writer):

        async def ends() -> bool:
            row = await row_of(bucket, key)
            return abs(row.deadline_at - row.since - 3600.0) < 1

        await until_state(bucket, key, SeatState.STARTING)
        world.start(a)
        writer.refresh()
        await until(ends, what="the row has the end of the start")


async def test_a_drained_node_without_pods_is_still_known_by_its_rows_until_it_is_resumed(world: World) -> None:
    key = seat_key(world.node.name, world.seat(0, 0))
    async with writing(world) as (bucket, writer):
        world.order(DrainNode, purpose="upgrade")
        writer.refresh()
        await until_state(bucket, key, SeatState.FREE)
        assert "node n1 is drained for upgrade" in (await row_of(bucket, key)).drained
        world.order(ResumeNode)
        writer.refresh()
        await until_state(bucket, key, None)


@dataclass
class FullBucket:
    """A bucket that takes no row while it is full."""

    bucket: Bucket
    full: bool = True
    refused: int = 0

    async def put(self, key: str, value: bytes) -> int:
        if self.full:
            self.refused += 1
            raise BusError("maximum bytes exceeded")
        return await self.bucket.put(key, value)

    async def delete(self, key: str) -> None:
        await self.bucket.delete(key)


async def test_a_row_that_could_not_be_written_is_written_later_and_a_drain_is_announced_only_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "RETRY_SECONDS", 0.01)
    _, drains = world.draining()
    received: list[object] = []

    async def receive(message: object) -> None:
        received.append(message)

    async with MemoryBus.connect(MemoryServer()) as bus:
        bucket = FullBucket(await bus.bucket(BUCKET))

        async def full(_: str) -> FullBucket:
            return bucket

        monkeypatch.setattr(bus, "bucket", full)
        writer = RosterWriter(bus, lambda: world.now, world.node, receive, recorded)
        writer.changed(drains)
        task = asyncio.create_task(writer.run())
        try:
            await until(lambda: bucket.refused >= 2, what="the row was refused twice")
            assert received == []
            bucket.full = False
            await until(lambda: received, what="the drain is announced")
            assert received == [DrainAnnounced(drains, world.managed(drains).epoch)]
            assert await state_of(bucket.bucket, seat_key(world.node.name, drains)) is SeatState.DRAINING
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_manager_that_starts_reads_the_epochs_that_routers_have_seen(world: World) -> None:
    name, seat = world.node.name, world.seat(0, 0)
    async with MemoryBus.connect(MemoryServer()) as bus:
        bucket = await bus.bucket(BUCKET)
        row = SeatRecord(node=name, seat=seat, state=SeatState.PARKED, epoch=77, seq=5)
        await bucket.put(row.key, row.model_dump_json().encode())
        await bucket.put(seat_key(name, "torn"), b"{")
        other = row.model_copy(update={"node": "another-node", "epoch": 99})
        await bucket.put(other.key, other.model_dump_json().encode())
        writer = RosterWriter(bus, lambda: world.now, world.node, ignore, recorded)

        assert await writer.published() == Published(77, 5)
        bus.cut()
        assert await writer.published() == Published()


async def test_what_a_pod_shows_names_no_model_or_pod_of_another_namespace(world: World) -> None:
    """The start gate hid these names, and the pod's Events and its condition had them."""
    a, b = world.fill("secret", "b")
    world.shows(a, namespace="other")
    world.managed(a).learn(unlocated=True)
    world.managed(b).reason = "there is room for secret without it"
    shown: dict[str, SeatRecord] = {}
    async with writing(world) as (bucket, writer):
        writer.on_record.append(lambda row: shown.update({row.seat: row}))
        await until(lambda: {a, b} <= shown.keys(), what="both rows are written")
        row = await row_of(bucket, seat_key(world.node.name, b))
    assert row.reason == "there is room for secret without it", "operators read the roster"
    assert shown[b].reason == "there is room for a seat of another namespace without it"
    assert (shown[a].model, shown[a].pod) == ("secret", "other/secret")


@pytest.mark.parametrize("lasting", [False, True])
async def test_the_row_of_a_seat_on_its_way_goes_with_the_next_one_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """And is not put off by looking for reasons again, as often as pods change."""
    monkeypatch.setattr(publish, "LATE_SECONDS", 0.05 if lasting else 1e6)
    world = World()
    world.boot()
    incoming, victim = world.fill("a", "b")
    world.tick(10)
    world.traffic(incoming, waiting=1)
    written: list[tuple[str, SeatState]] = []
    async with writing(world) as (_, writer):
        writer.on_record.append(lambda row: written.append((row.seat, row.state)))
        await until(lambda: (victim, SeatState.DRAINING) in written, what="the row of the drain is written at once")
        written.clear()
        world.quiet(victim)
        world.progress(world.job(), activate="started", done=False)
        way = [(victim, SeatState.PARKED), (incoming, SeatState.ACTIVATING)]
        assert [(seat, world.state(seat)) for seat, _ in way] == way
        for seat, _ in way:
            writer.changed(seat)

        def looked() -> bool:
            for seat, _ in way:
                writer.changed(seat)
            return written == way

        if lasting:
            await until(looked, what="the rows that were late are written")
        world.progress(world.job())
        assert written == way * lasting
        writer.changed(incoming)
        await until(lambda: (incoming, SeatState.ACTIVE) in written, what="the row of the active seat is written")
    assert (victim, SeatState.PARKED) in written
    assert ((incoming, SeatState.ACTIVATING) in written) == lasting
