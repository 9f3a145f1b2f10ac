"""The page on the operations port: what it reads, who may command, and what it refuses."""

import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.nats_server import free_port
from kybernate.messages import ParkSeat, SeatActivated, TrafficSignal
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from kybernate.seat import SeatState
from services.console import page as page_module
from services.console.page import CHAT_BYTES, READER_BACKLOG, RECENT_EVENTS
from tests.console.world import Shown, shown
from tests.keys import key_file
from tests.router.world import NODE, Answered
from tests.until import until


@asynccontextmanager
async def page(**settings: Any) -> AsyncIterator[tuple[Shown, str]]:
    async with shown(health_port=free_port(), **settings) as w:
        yield w, f"{w.console.page_url}/ui/"


async def get(w: Shown, url: str, **how: Any) -> Answered:
    return await w.fetch("GET", url, **how)


async def post(w: Shown, url: str, **how: Any) -> Answered:
    return await w.fetch("POST", url, **how)


async def message(stream: aiohttp.ClientResponse, event: str = "") -> Any:
    """The next message of this kind of a stream that is open."""
    kind, data = "", b""
    while line := await stream.content.readline():
        if line.startswith(b"event: "):
            kind = line[7:-1].decode()
        elif line.startswith(b"data: "):
            data += line[6:]
        elif line == b"\n":
            if data and kind == event:
                return json.loads(data)
            kind, data = "", b""
    raise AssertionError("the stream has ended")


async def state_of(w: Shown, url: str) -> Any:
    """What a page shows first."""
    async with w.http.get(url + "live") as stream:
        return await message(stream, "state")


async def test_the_first_paint_is_one_answer_with_seats_blocks_loads_and_events(w: Shown, url: str):
    await w.seat("s0", "llama", slo_seconds=12.0)
    answer = await w.ask("llama")
    assert answer.status == 200
    received = w.console.events._recent  # the row of the roster may come before the event
    await until(lambda: any(isinstance(one, SeatActivated) for one in received), what="the event of the activation")
    state = await state_of(w, url)
    (seat,) = state["seats"]
    assert (seat["seat"], seat["model"], seat["state"], seat["slo_seconds"]) == ("s0", "llama", "active", 12.0)
    assert [block["state"] for block in state["blocks"]] == ["activating", "active"]
    assert dict(state["switches"])["llama"]["cause"] == answer.headers["X-Kyb-Cause"]
    assert {event["type"] for event in state["events"]} >= {"ai.kyb.v1.seat-activated"}
    assert state["keys"] is False


async def test_the_first_paint_has_each_recent_event_once(w: Shown, url: str):
    fields = {"node": NODE, "seat": "s0", "state": SeatState.ACTIVE, "cause": "c", "at": time.time()}
    for seq in range(2 * RECENT_EVENTS + 1):
        w.console.page.add(SeatActivated.model_validate({"seq": seq} | fields))
    events = (await state_of(w, url))["events"]
    assert [event["seq"] for event in events] == list(range(RECENT_EVENTS + 1, 2 * RECENT_EVENTS + 1))


async def test_the_page_shows_when_nats_is_away(w: Shown, url: str):
    assert (await state_of(w, url))["troubles"] == {}
    w.bus.cut()
    assert "not connected to NATS" in (await state_of(w, url))["troubles"]["bus"]
    async with w.http.get(url + "live") as live:
        assert "not connected to NATS" in (await message(live))["troubles"]["bus"]


async def test_the_timeline_reaches_back_before_the_start_of_the_router(w: Shown, url: str):
    fields = {"node": NODE, "seat": "s9", "group": "G0", "model": "old", "state": SeatState.ACTIVE}
    old = SeatActivated.model_validate({"cause": "c", "at": time.time() - 3000} | fields)
    w.store(old)
    assert (await state_of(w, url))["blocks"] == []
    window = (await get(w, url + "timeline?seconds=3600")).json
    assert [(block["model"], block["since"]) for block in window["blocks"]] == [("old", old.at)]
    assert (await get(w, url + "timeline?seconds=-1e30")).json["since"] <= time.time()
    for seconds in ("soon", "nan", "inf"):
        assert (await get(w, url + f"timeline?seconds={seconds}")).code == "invalid_field"


async def test_changes_come_as_a_stream(w: Shown, url: str):
    await w.seat("s0", "llama")
    async with w.http.get(url + "live") as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert [seat["state"] for seat in (await message(stream, "state"))["seats"]] == ["parked"]
        await w.manager.activate("s0")
        seats, events = [], []
        while "seat-activated" not in str(events) or not any(seat["state"] == "active" for seat in seats):
            change = await message(stream)
            seats += change["seats"]
            events += change["events"]
        assert seats[-1]["key"] == f"{NODE}.s0"
        gpu = GpuRecord(node=NODE, gpu="GPU-0", index=0, memory_bytes=1, healthy=False)
        inventory = await w.manager.bus.bucket(INVENTORY_BUCKET)
        await inventory.put("n1.unreadable", b"{")
        await inventory.put(gpu.key, gpu.model_dump_json().encode())
        while not (gpus := (await message(stream))["gpus"]):
            pass
        assert [(key, row["healthy"]) for key, row in gpus.items()] == [(gpu.key, False)]
        await inventory.delete(gpu.key)
        while not (gpus := (await message(stream))["gpus"]):
            pass
        assert gpus == {gpu.key: None}


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
async def test_what_changes_while_the_state_is_sent_comes_after_it_and_no_event_is_lost(
    w: Shown, url: str, monkeypatch: pytest.MonkeyPatch, accepted: str
):
    fields = {"node": NODE, "seat": "s0", "state": SeatState.ACTIVE, "cause": "c", "at": time.time()}
    encode = page_module._row
    await w.seat("s0", "llama")
    seats_now, seqs = w.console.cluster.seats, itertools.count(1000)

    def add() -> None:
        w.console.page.add(SeatActivated.model_validate({"seq": next(seqs)} | fields))

    def encoded(*what: Any) -> Any:
        row = encode(*what)
        if row["state"] == "parked":  # the state has this row; it changes now
            record = seats_now.rows[f"{NODE}.s0"]
            seats_now.put(record.key, record.model_copy(update={"state": SeatState.ACTIVE}))
            add()
        return row

    monkeypatch.setattr(page_module, "_row", encoded)
    add()
    async with w.http.get(url + "live", headers={"Accept-Encoding": accepted}) as stream:
        assert stream.headers.get("Content-Encoding", "identity") == accepted
        state = await message(stream, "state")
        assert [seat["state"] for seat in state["seats"]] == ["parked"]
        seen, revision, seats = [event["seq"] for event in state["events"]], state["revision"], []
        while not seats:
            change = await message(stream)
            seats = change["seats"]
            old = len(change["events"]) - (change["revision"] - revision)
            seen += [event["seq"] for event in change["events"][max(0, old) :]]
            revision = max(revision, change["revision"])
        assert [seat["state"] for seat in seats] == ["active"]
        assert seen[-2:] == [1000, 1001]
        assert len(seen) == len(set(seen))


async def test_a_page_that_reads_too_slowly_is_disconnected_and_gets_the_state_again(w: Shown, url: str):
    await w.seat("s0", "llama")
    async with w.http.get(url + "live") as stream:
        await message(stream, "state")
        (reader,) = w.console.page._readers
        for _ in range(READER_BACKLOG + 1):
            w.console.page._send(reader, b"data: {}\n\n")
        await w.manager.put("s0", SeatState.ACTIVE)
        with pytest.raises(AssertionError, match="has ended"):
            await message(stream, "state")
    rows = w.console.cluster.seats.rows
    await until(lambda: rows[f"{NODE}.s0"].state is SeatState.ACTIVE, what="the console knows the new state")
    assert [seat["state"] for seat in (await state_of(w, url))["seats"]] == ["active"]


async def test_a_page_that_is_disconnected_while_it_gets_the_state_gets_no_part_of_it(
    w: Shown, url: str, monkeypatch: pytest.MonkeyPatch
):
    await w.seat("s0", "llama")
    encode = page_module._row

    def encoded(*what: Any) -> Any:
        w.console.page.stop()
        return encode(*what)

    monkeypatch.setattr(page_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(page_module, "_row", encoded)
    with pytest.raises(AssertionError, match="has ended"):
        await state_of(w, url)


async def test_a_piece_costs_the_seats_that_changed(w: Shown, monkeypatch: pytest.MonkeyPatch):
    for number in range(20):
        await w.manager.put(f"s{number}", model="llama")
    seats, encode, encoded = w.console.cluster.seats, page_module._row, list[str]()
    await until(lambda: len(seats.of_model("llama")) == 20, what="the console knows the seats")
    seats.take()
    key = f"{NODE}.s3"
    seats.put(key, seats.rows[key].model_copy(update={"pinned": True}))
    monkeypatch.setattr(page_module, "_row", lambda key, *more: encoded.append(key) or encode(key, *more))
    piece = json.loads(w.console.page._changes(0.0, {}))
    assert ([each["key"] for each in piece["seats"]], piece["gone"]) == ([key], [])
    assert encoded == [key]


async def test_waiting_requests_count_for_the_lane_of_their_seat(w: Shown):
    for number in range(4):
        await w.manager.put(f"s{number}", model="llama", home_group=f"G{number}")
    cluster = w.console.cluster
    await until(lambda: len(cluster.seats.of_model("llama")) == 4, what="the console knows the seats")
    for seat in ("s0", "s1", "s2", None):
        level = TrafficSignal(cause="c", source="r", model="llama", seat=seat, waiting=3, ttl_seconds=600)
        cluster.loads.add(level, time.monotonic())
    cluster.loads.add(level.model_copy(update={"model": "gone"}), time.monotonic())
    assert w.console.page._waiting() == {f"{NODE}/G{number}": 3 for number in range(4)}


async def test_reading_needs_no_key_and_commands_need_an_operators(tmp_path: Path):
    file, keys = key_file(tmp_path, ops=["admin"], app=["infer"])
    operator, user = keys["ops"], keys["app"]
    async with page(api_keys_file=file) as (w, url):
        await w.seat("s0", "llama", SeatState.ACTIVE)
        assert (await state_of(w, url))["keys"] is True
        park = url + "seats/seat%2Fs0/park"
        assert (await post(w, park)).status == 401
        assert (await post(w, park, headers={"Authorization": f"Bearer {user}"})).status == 403
        assert w.manager.of(ParkSeat) == []
        assert (await get(w, url + "allowed", headers={"X-Kyb-Key": user})).status == 403
        assert (await get(w, url + "allowed", headers={"X-Kyb-Key": operator})).status == 200
        assert (await post(w, park, headers={"X-Kyb-Key": operator})).status == 202
        assert [command.actor for command in w.manager.of(ParkSeat)] == ["ops"]
        assert (await post(w, url + f"nodes/{NODE}/drain", headers={"X-Kyb-Key": operator})).status == 202
        chat = {"model": "llama", "messages": []}
        assert (await post(w, url + "chat", json=chat)).status == 401
        assert (await post(w, url + "chat", json=chat, headers={"X-Kyb-Key": user})).status == 200


async def test_a_page_of_another_site_cannot_command(w: Shown, url: str):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    foreign, own = {"Origin": "https://evil.example"}, {"Origin": url.removesuffix("/ui/")}
    for path in ("seats/s0/park", "groups/G0/drain", f"nodes/{NODE}/drain", "chat"):
        answer = await post(w, url + path, headers=foreign)
        assert (answer.status, answer.code) == (403, "wrong_origin"), path
    assert w.manager.of(ParkSeat) == []
    assert (await post(w, url + "seats/s0/park", headers=own)).status == 202


async def test_a_page_of_a_configured_site_reads_and_commands():
    own = {"Origin": "https://console.example"}
    async with page(cors_origins=own["Origin"]) as (w, url):
        await w.seat("s0", "llama", SeatState.ACTIVE)
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-kyb-key"}
        async with w.http.options(url + "seats/s0/park", headers=own | asks) as may:
            assert (may.status, may.headers["Access-Control-Allow-Headers"]) == (204, "x-kyb-key")
        for answer in (await get(w, url + "why", headers=own), await post(w, url + "seats/s0/park", headers=own)):
            assert answer.status in (200, 202)
            assert answer.headers["Access-Control-Allow-Origin"] == own["Origin"]


async def test_the_playground_streams_an_answer(w: Shown, url: str):
    await w.seat("s0", "llama")
    body = {"model": "llama", "messages": [], "stream": True}
    answer = await post(w, url + "chat", json=body, headers={"X-Request-Id": "page-1"})
    assert answer.headers["X-Kyb-Cause"] == "page-1"
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert b"[DONE]" in answer.body


async def test_the_playground_sends_a_long_message_whole_and_refuses_one_that_is_too_long(w: Shown, url: str):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    for length, status in ((CHAT_BYTES - 1000, 200), (CHAT_BYTES, 413)):
        body = {"model": "llama", "messages": [{"role": "user", "content": "x" * length}]}
        assert (await post(w, url + "chat", json=body)).status == status


async def test_files_come_with_a_content_policy_and_nothing_else_is_served(w: Shown, url: str):
    for path, kind in (("", "html"), ("load.js", "javascript"), ("style.css", "css"), ("icon.svg", "svg")):
        answer = await get(w, url + path)
        assert answer.status == 200
        assert kind in answer.headers["Content-Type"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert b"http://" not in answer.body.replace(b"http://www.w3.org", b"")
        assert b"https://" not in answer.body
    assert (await get(w, url.removesuffix("/"))).headers["Content-Type"].startswith("text/html")  # redirected
    for path in ("..%2Fpage.py", "%2Fetc%2Fpasswd", "nothing.js", "vendor", "%00", "a" * 5000, "index.html/"):
        assert (await get(w, url + path)).status == 404, path
    assert (await w.call("GET", "/ui/")).status == 404  # not on the public port


async def test_a_page_over_16384_seats_costs_a_router_no_message_and_no_request(
    w: Shown, url: str, monkeypatch: pytest.MonkeyPatch
):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    row = w.console.cluster.seats.rows[f"{NODE}.s0"]
    for number in range(16_384):
        one = row.model_copy(update={"node": f"n{number // 64}", "seat": f"t{number}", "model": f"m{number}"})
        w.console.cluster.seats.put(one.key, one)
    w.console.cluster.seats.take()  # the first change would be a line of 8 MB, which aiohttp's client refuses
    published: list[Any] = []
    publish = w.bus.publish

    async def recorded(message: Any) -> None:
        published.append(message)
        await publish(message)

    monkeypatch.setattr(w.bus, "publish", recorded)
    known, open_before = len(w.router.traffic.table.upstreams), w.router.connections.open
    async with w.http.get(url + "live") as stream:
        assert len((await message(stream, "state"))["seats"]) == 16_385
        for _ in range(2):
            await message(stream)
    assert (published, len(w.router.traffic.table.upstreams)) == ([], known)
    asks = w.router.connections.open - open_before
    assert asks <= 1, "the page reads the console, which asks each router once in 10 s which problems it has"


CHROME = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"}


@pytest.mark.parametrize("host", ["evil.example:8781", "localhost.evil.example", "127.0.0.1.evil.example"])
async def test_a_browser_under_a_foreign_host_is_refused_as_after_dns_rebinding(w: Shown, url: str, host: str):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    base = url.removesuffix("/ui/")
    own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    for path in ("/ui/seats/s0/park", "/v1/seats/s0/park", "/v1/nodes/n1/drain"):
        answer = await post(w, base + path, headers=own)
        assert (answer.status, answer.code) == (403, "wrong_host"), path
    for path in ("/ui/", "/ui/live", "/v1/seats", "/metrics"):
        answer = await get(w, base + path, headers=CHROME | {"Host": host})
        assert (answer.status, answer.code) == (403, "wrong_host"), path
    assert w.manager.of(ParkSeat) == []
    assert (await get(w, url, headers={"Host": host})).status == 200, "a program's Host is any"


async def test_a_page_elsewhere_may_link_to_the_page_and_to_nothing_else(w: Shown, url: str):
    base = url.removesuffix("/ui/")
    link = CHROME | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await get(w, url, headers=link)).status == 200
    assert (await get(w, base + "/v1/seats", headers=link)).code == "wrong_origin"
    framed = await get(w, url, headers=link | {"Sec-Fetch-Dest": "iframe"})
    assert (framed.status, framed.code) == (403, "wrong_origin")
    assert (await post(w, url + "seats/s0/park", headers=link)).code == "wrong_origin"
