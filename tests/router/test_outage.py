"""The router and the bus: the order at the start and after a loss, and service without the bus."""

import asyncio
import time

import pytest
import structlog

from kybernate.messages import Presence, TrafficSignal
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from services.router.core import managers, trust
from services.router.core.step import RosterRead
from tests.router.world import NODE, World, world
from tests.until import until, until_logged


async def test_presence_is_on_the_bus_before_the_roster_is_read():
    async with world(connected=False) as w:
        order: list[str] = []
        publish, bucket = w.bus.publish, w.bus.bucket

        async def published(message):
            order.append(type(message).__name__)
            await publish(message)

        async def opened(name):
            opened = await bucket(name)
            entries = opened.entries

            async def read(prefix=""):
                order.append("read")
                return await entries(prefix)

            opened.entries = read
            return opened

        w.bus.publish, w.bus.bucket = published, opened
        await w.seat("s0", "llama", SeatState.ACTIVE)
        answer = await w.call("GET", "/readyz")
        assert answer.status == 503
        assert set(answer.json["unmet"]) == {"bus", "roster"}
        assert (await w.call("GET", "/healthz")).status == 200
        call = await w.hold("llama")
        w.bus.restore()
        assert (await call).status == 200
        order.clear()  # the presence of every 2 s may have come before the first read by chance
        await w.router.sync._read()
        assert order.index("Presence") < order.index("read")
        assert (await w.call("GET", "/readyz")).status == 200
        (presence,) = w.manager.of(Presence)[:1]
        assert (presence.component, presence.url) == ("router", w.url)


async def test_seats_stay_closed_until_the_manager_lists_the_router_and_the_roster_was_read_after_that():
    """Its nats-server may have lost the routes to the manager's: that this server answers proves nothing."""
    async with world(connected=False) as w:
        w.manager.lists = False
        await w.seat("s0", "llama", SeatState.ACTIVE, manager_url="")  # no manager confirms it over HTTP instead
        w.bus.restore()
        call = await w.hold("llama")
        await until(lambda: w.router.traffic.trust.ever_synced, what="the roster was read")
        assert w.held("llama") == 1
        w.manager.lists = True
        await w.manager.list_routers()
        assert (await call).status == 200


async def test_without_nats_active_seats_keep_their_traffic_and_the_manager_is_queried_later(monkeypatch):
    monkeypatch.setattr(trust, "TRUST_SECONDS", 0.4)
    async with world() as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        await w.seat("s1", "qwen")
        w.bus.cut()
        assert (await w.ask("llama")).status == 200
        assert w.manager.http_queries == 0
        ready = await w.call("GET", "/readyz")  # otherwise a Service would have no ready router
        assert ready.status == 200
        assert "not connected to NATS" in ready.json["notes"]["bus"]
        async with w.http.get(f"{w.url}/metrics") as metrics:
            assert "kybernate_router_nats_connected 0.0" in await metrics.text()
        sure = w.router.traffic.trust.sure
        await until(lambda: not sure(NODE, time.monotonic()), what="the router no longer trusts the node's records")
        assert (await w.ask("llama")).status == 200
        assert (await w.ask("llama")).status == 200
        assert w.manager.http_queries == 1
        parked = await w.hold("qwen")
        w.bus.restore()
        assert (await parked).status == 200


async def test_a_seat_that_cannot_be_asked_for_in_an_outage_is_logged_once_and_then_counted(w: World, monkeypatch):
    monkeypatch.setattr(managers, "UNANSWERED_SECONDS", 0.01)
    await w.seat("s0", "llama")
    tries, request = [], w.bus.request

    async def counted(*arguments, **more):
        tries.append(arguments)
        return await request(*arguments, **more)

    w.bus.request = counted
    with structlog.testing.capture_logs() as logs:
        w.bus.cut()
        call = w.ask("llama")
        await until(lambda: len(tries) > 3, what="the seat was asked for again and again")
        w.bus.restore()
        assert (await call).status == 200
    lines = [line for line in logs if line["event"] == "activation.unanswered"]
    assert [line.get("seat") for line in lines] == ["s0", None]
    assert lines[1]["repeated"] >= 2


async def test_changes_during_an_outage_are_read_before_calls_are_forwarded(w: World):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    w.manager.auto = False
    w.bus.cut()
    await w.manager.put("s0", SeatState.PARKED)
    w.bus.restore()
    await w.ready()
    call = await w.hold("llama")
    assert not engine.requests
    await w.manager.activate("s0")
    assert (await call).status == 200


async def test_a_list_after_an_outage_extends_no_lease_before_the_roster_is_read(w: World):
    trust, now = w.router.traffic.trust, asyncio.get_running_loop().time()
    assert not trust.count(NODE, now, now)
    w.bus.cut()
    assert trust.count(NODE, now, now), "the roster is to be read first"


async def test_levels_are_published_again_after_an_outage(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    w.bus.cut()
    call = await w.hold("llama")
    w.bus.restore()
    await w.last(TrafficSignal, lambda level: level.waiting == 1)
    await w.manager.activate("s0")
    assert (await call).status == 200


async def test_models_are_served_after_the_nats_server_lost_its_disk(w: World):
    await w.seat("s0", "llama")
    for _ in range(3):
        await w.manager.put("s0", SeatState.PARKED)
    w.manager.auto = False
    w.server.stop()
    w.server.wipe()
    w.server.start()
    await w.ready()
    call = await w.hold("llama")
    await w.manager.put("s0", SeatState.PARKED)
    await w.manager.activate("s0")
    assert (await call).status == 200


@pytest.mark.parametrize("wrong", [{"seat": ""}, {"node": ""}, {"model": "m" * 513}])
async def test_a_row_that_its_manager_cannot_have_written_is_ignored(w: World, wrong: dict[str, str]):
    """Its key would be none, and no signal could name its model."""
    await w.seat("s1", "m", SeatState.ACTIVE)
    bucket = await w.manager.bus.bucket(BUCKET)
    with structlog.testing.capture_logs() as logs:
        await bucket.put("n1.s1", w.manager.rows["s1"].model_copy(update=wrong).model_dump_json().encode())
        await until_logged(logs, "row.invalid")
    assert (await w.ask("m")).status == 200


async def test_a_row_under_the_key_of_another_seat_is_ignored(w: World):
    engine = await w.seat("s1", "m", SeatState.ACTIVE)
    other = w.manager.rows["s1"].model_copy(update={"seat": "s2", "endpoint": "http://127.0.0.1:9"})
    bucket = await w.manager.bus.bucket(BUCKET)
    with structlog.testing.capture_logs() as logs:
        await bucket.put("n1.s1", other.model_dump_json().encode())
        await until_logged(logs, "row.misplaced")
    assert w.upstream("s1").record.endpoint == engine.endpoint
    assert (await w.ask("m")).status == 200


async def test_a_reading_parses_no_row_that_is_known_already_and_lets_others_run_between_rows(
    w: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kybernate.bus.follow.SLICE_SECONDS", 0.0)
    for number in range(30):
        await w.manager.put(f"s{number}", model="m")
    await until(lambda: len(w.router.traffic.table.upstreams) == 30, what="the router knows all rows")
    parsed, parse, pauses = list[bytes](), SeatRecord.model_validate_json, list[float]()
    feed, sleep, read = w.router.dispatcher.feed, asyncio.sleep, asyncio.Event()

    def fed(message: object) -> None:
        feed(message)
        if isinstance(message, RosterRead) and message.at is not None:
            read.set()

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(SeatRecord, "model_validate_json", lambda row: parsed.append(row) or parse(row))
    monkeypatch.setattr(w.router.dispatcher, "feed", fed)
    monkeypatch.setattr(asyncio, "sleep", paused)
    w.router.dispatcher.on_resync()
    await asyncio.wait_for(read.wait(), 60)
    assert parsed == []
    assert pauses.count(0) >= 30
