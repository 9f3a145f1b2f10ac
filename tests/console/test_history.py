"""What happened before: stored events and decisions, and the story of one request."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kybernate.bus.port import Bus
from kybernate.envelope import Message
from kybernate.http_api import ApiError
from kybernate.messages import (
    GroupDecided,
    RequestEnded,
    SeatActivated,
    SeatClosed,
    SeatEvent,
    SeatEvicted,
    SeatLeased,
    SeatParked,
    SeatQuarantined,
)
from kybernate.seat import SeatState
from services.console import history
from services.console.history import History, story
from services.router.core.step import Forward
from tests.console.world import Shown, shown
from tests.spans import Spans
from tests.until import until


async def story_of(w: Shown, request: str) -> Any:
    """The story, once the record was published."""
    found: list[Any] = []

    async def published() -> bool:
        answer = await w.call("GET", f"/v1/requests/{request}")
        found[:] = [answer.json]
        return answer.status == 200

    await until(published, what=f"the record of {request} is stored", saw=lambda: found)
    return found[0]


async def test_the_stream_of_events_begins_with_the_stored_ones_since_a_time_if_no_id_is_given(w: Shown):
    begin, known = time.time() - 60, [decided(decision="stay", at=time.time() - age) for age in (90, 30)]
    w.store(*known)

    async def first(query: str, **headers: str) -> str:
        async with w.http.get(f"{w.url}/v1/events?since={begin}{query}", headers=headers) as stream:
            async for line in stream.content:
                if line.startswith(b"id: "):
                    return line[4:-1].decode()
        raise AssertionError("the stream has ended")

    assert await first("") == known[1].id
    assert await first("", **{"Last-Event-ID": known[0].id}) == known[1].id
    assert await first("&after=unknown") == known[0].id
    assert (await w.call("GET", "/v1/events?since=soon")).code == "invalid_field"


async def test_readers_of_the_past_take_turns(w: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    event = decided(decision="stay", at=time.time() - 30)
    w.store(event)
    replay, reading, most = w.console.history._bus.replay, 0, 0

    async def counted(**how: Any) -> AsyncIterator[Message]:
        nonlocal reading, most
        reading, most = reading + 1, max(most, reading + 1)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            async for one in replay(**how):
                yield one
        finally:
            reading -= 1

    monkeypatch.setattr(w.console.history._bus, "replay", counted)

    async def first() -> bytes:
        async with w.http.get(f"{w.url}/v1/events?since=1") as stream:
            return b"".join([await stream.content.readline() for _ in range(3)])

    async def listed() -> bytes:
        return (await w.call("GET", "/v1/history")).body

    answers = await asyncio.gather(*(ask() for _ in range(4) for ask in (first, listed)))
    assert all(event.id.encode() in answer for answer in answers)
    assert most == 1


async def test_who_waits_for_another_reader_is_told_so_and_has_all_of_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = History(cast(Bus, None))
    async with past._turn:
        monkeypatch.setattr(history, "LONGEST_READ_SECONDS", 0.01)
        with pytest.raises(ApiError, match="another reader of the past has the turn; try again") as refused:
            async with past.reading("events", "begin later"):
                raise AssertionError("it has the turn")
        assert (refused.value.status, refused.value.code) == (503, "history_busy")
    with pytest.raises(ApiError, match=r"too many events to be read in 0\.01 s; begin later"):
        async with past.reading("events", "begin later"):
            await asyncio.Event().wait()

    monkeypatch.setattr(history, "LONGEST_READ_SECONDS", 1000.0)
    loop, later = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + later)

    async def read() -> str:
        nonlocal later
        async with past.reading("events", "begin later"):
            later += 600.0
            await asyncio.sleep(0.01)
        return "read"

    async with past._turn:
        reading = asyncio.create_task(read())
        await until(lambda: bool(past._turn._waiters), what="it waits for the turn")
        later += 600.0
    assert await reading == "read"


async def test_an_id_is_looked_for_among_the_events_since_a_time_if_both_are_given(
    w: Shown,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, known = time.time() - 60, [decided(decision="stay", at=time.time() - age) for age in (90, 30, 20)]
    w.store(*known)
    replay, asked = w.console.history._bus.replay, list[dict[str, Any]]()

    def noted(**how: Any) -> AsyncIterator[Message]:
        asked.append(how)
        return replay(**how)

    monkeypatch.setattr(w.console.history._bus, "replay", noted)
    headers = {"Last-Event-ID": known[1].id}
    async with w.http.get(f"{w.url}/v1/events?since={begin}", headers=headers) as stream:
        text = b"".join([await stream.content.readline() for _ in range(3)]).decode()
    assert f"id: {known[2].id}" in text
    assert asked == [{"since": begin}]


def decided(**fields: Any) -> GroupDecided:
    facts = {"cause": "c", "node": "n1", "group": "G0", "decision": "switch", "op": "G0-7"}
    return GroupDecided.model_validate(facts | fields)


async def test_history_is_selected_by_kind_model_group_op_and_time(w: Shown):
    await w.seat("s0", "llama")
    await w.seat("s1", "qwen")
    await w.manager.move("s0", SeatState.ACTIVATING)
    await w.manager.bus.publish(decided(model="llama", victim_model="qwen"))
    await w.manager.bus.publish(decided(model="llama", decision="stay", op="", group="G1"))

    async def found(query: str = "") -> list[str]:
        body = (await w.call("GET", f"/v1/history{query}")).json
        assert body["complete"] is True
        return [event.get("decision") or event["state"] for event in body["events"]]

    assert await found() == ["activating", "switch", "stay"]
    assert await found("?model=qwen") == ["switch"]
    assert await found("?model=llama&kind=stay") == ["stay"]
    assert await found("?kind=decided&group=G0") == ["switch"]
    assert await found("?kind=leased") == ["activating"]
    assert await found("?op=G0-7") == ["switch"]
    for future in ("99999999999", "1e30"):
        assert await found(f"?since={future}") == []
    assert await found("?since=-1e15") == await found("")
    newest = (await w.call("GET", "/v1/history?limit=1")).json
    assert (newest["events"][0]["decision"], newest["complete"]) == ("stay", False)
    for query in ("?since=soon", "?since=nan", "?limit=0", "?limit=inf"):
        assert (await w.call("GET", f"/v1/history{query}")).status == 400
    unknown = await w.call("GET", "/v1/history?kind=swich")
    assert (unknown.status, "stay, switch" in unknown.json["error"]["message"]) == (400, True)
    w.bus.cut()
    assert (await w.call("GET", "/v1/history")).status == 503


async def test_stored_events_of_another_release_are_skipped_and_not_logged(w: Shown):
    """The stream keeps a week, over upgrades; a kind of this release that cannot be read is logged."""
    known = decided(decision="stay", at=time.time())
    w.store(known)
    w.server.stored["old"] = ("kyb.v1.evt.n1.G0.operation", b'{"cause": "c"}', known.at)
    w.server.stored["torn"] = ("kyb.v1.evt.n1.G0.decided", b"{", known.at)
    with capture_logs() as logs:
        found = (await w.call("GET", "/v1/history")).json
    assert [one["id"] for one in found["events"]] == [known.id]
    unreadable = [line["subject"] for line in logs if line["event"] == "message.unreadable"]
    assert unreadable == ["kyb.v1.evt.n1.G0.decided"]
    assert (await w.call("GET", "/v1/history?kind=operation")).status == 400


async def test_one_event_is_found_by_its_own_time_also_if_the_clock_of_its_node_is_ahead(w: Shown, url: str):
    """The page asks so for the event that its address names."""
    before, event, after = (decided(decision="stay", at=time.time() - age) for age in (5000, 4000, 3000))
    w.store(before, event, after)
    w.server.stored[event.id] = (event.subject, event.body(), event.at - 2.0)
    found = (await w.fetch("GET", f"{url}history?since={event.at}&until={event.at}")).json
    assert [one["id"] for one in found["events"]] == [event.id]


async def test_a_held_request_leaves_its_story_and_one_that_was_served_at_once_does_not(w: Shown):
    await w.seat("s0", "llama")
    w.manager.auto = False
    held = await w.hold("llama", X_Request_Id="req-7")
    await w.manager.bus.publish(decided(model="llama", incoming="s0", cause="req-7", reason="it waits"))
    await w.manager.activate("s0", "req-7")
    assert (await held).status == 200
    assert (await w.ask("llama", X_Request_Id="req-8")).status == 200

    story = await story_of(w, "req-7")
    assert story["request"]["model"] == "llama"
    assert (story["request"]["seat"], story["request"]["status"]) == ("s0", 200)
    assert story["request"]["held_seconds"] > 0
    assert set(story["phases"]) == {"hold", "control", "first_byte"}
    steps = [step["step"] for step in story["steps"]]
    assert steps == ["arrived", "decided", "leased", "activated", "forwarded", "first-byte", "ended"]
    assert [step["at"] for step in story["steps"]] == sorted(step["at"] for step in story["steps"])
    missing = await w.call("GET", "/v1/requests/req-8")
    assert (missing.status, missing.code) == (404, "no_record")


def test_a_request_is_forwarded_after_its_seat_was_activated_also_when_its_hold_began_late():
    facts = {"cause": "c", "request": "r", "router": "r0", "model": "llama", "seat": "s0", "status": 200}
    record = RequestEnded.model_validate(
        facts | {"arrived_at": 100.0, "held_seconds": 1.0, "first_byte_seconds": 1.5, "seconds": 2.0}
    )
    seat = {"cause": "c", "node": "n1", "seat": "s0", "model": "llama", "epoch": 1, "state": "active", "at": 101.2}
    steps = [step["step"] for step in story(record, [SeatActivated.model_validate(seat)])["steps"]]
    assert steps == ["arrived", "activated", "forwarded", "first-byte", "ended"]


def test_a_wait_for_the_switch_of_another_seat_is_blamed_on_that():
    """A park of its group hung for 93 s; its own switch took a second and a half."""
    facts = {"cause": "c", "request": "r", "router": "r0", "model": "mistral", "seat": "s1", "status": 200}
    record = RequestEnded.model_validate(
        facts | {"arrived_at": 1000.0, "held_seconds": 96.0, "first_byte_seconds": 96.5, "seconds": 97.0}
    )

    def event(kind: type[SeatEvent], seat: str, model: str, state: str, at: float, **more: Any) -> SeatEvent:
        names = {"cause": "c", "node": "n1", "group": "G0", "epoch": 1}
        return kind.model_validate(names | {"seat": seat, "model": model, "state": state, "at": at} | more)

    events = [
        event(SeatClosed, "s0", "qwen3-32b", "draining", 1000.5, op="G0-1"),
        event(SeatEvicted, "s0", "qwen3-32b", "parking", 1001.0, op="G0-1"),
        event(SeatQuarantined, "s0", "qwen3-32b", "quarantined", 1094.0, op="G0-1"),
        event(SeatEvicted, "s2", "llama", "parking", 1094.2, op="G0-2"),
        event(SeatParked, "s2", "llama", "parked", 1095.0, op="G0-2"),
        event(SeatLeased, "s1", "mistral", "activating", 1095.0, op="G0-2"),
        event(SeatEvicted, "t0", "other", "parking", 1001.0, op="G1-1", group="G1"),
        event(SeatActivated, "s1", "mistral", "active", 1095.9, op="G0-2", seconds={"park": 0.8, "activate": 0.9}),
    ]
    phases = story(record, events)["phases"]
    assert phases == {"hold": 96.0, "parking qwen3-32b": 93.0, "park": 0.8, "activate": 0.9, "first_byte": 0.5}


async def test_a_request_that_waited_in_vain_leaves_the_reasons_for_it():
    async with shown(router={"hold_seconds": 2.0}) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        waits = await w.hold("llama", X_Request_Id="req-9")
        await w.manager.bus.publish(decided(model="llama", decision="stay", op="", reason="pinned"))
        assert (await waits).status == 503

        story = await story_of(w, "req-9")
        assert (story["request"]["reason"], story["request"]["seat"]) == ("hold_timeout", "")
        assert [step["step"] for step in story["steps"]] == ["arrived", "decided", "ended"]
        assert story["steps"][1]["reason"] == "pinned"


@pytest.mark.parametrize("served", [True, False])
async def test_every_report_of_a_call_that_was_cut_twice_has_the_sum_of_its_waits(
    monkeypatch: pytest.MonkeyPatch, served: bool
):
    forwards: list[Forward] = []
    with Spans() as spans, capture_logs() as logs:
        async with shown(router={"tracer": spans.tracer, "access_log": True}) as w:
            w.manager.auto, perform = False, w.router.dispatcher._perform

            def recorded(effect: Any) -> None:
                if isinstance(effect, Forward):
                    forwards.append(effect)
                perform(effect)

            monkeypatch.setattr(w.router.dispatcher, "_perform", recorded)
            engine = await w.seat("s0", "llama", SeatState.ACTIVE)
            engine.silent.clear()
            call = w.ask("llama", x_request_id="req-1")
            for comes_back in (True, served):
                await until(lambda: engine.running == 1, what="the engine has the request")
                await w.manager.move("s0", SeatState.DRAINING)
                await w.manager.move("s0", SeatState.PARKING)
                await until(lambda: engine.running == 0, what="the engine has lost it")
                await w.manager.move("s0", SeatState.PARKED)
                if comes_back:
                    await w.manager.activate("s0")
            if served:
                await until(lambda: engine.running == 1, what="the engine has the request")
                engine.silent.set()
                answer = await call
            else:
                await until(lambda: w.held("llama") == 1, what="it waits again")
                call.cancel()
            reported = await story_of(w, "req-1")
            async with w.http.get(f"{w.router.url}/metrics") as scraped:
                metrics = await scraped.text()
        [request] = spans.of("POST /v1/chat/completions")
    [line] = [line for line in logs if line["event"] == "request.ended"]
    record, waits = reported["request"], [forward.held_seconds for forward in forwards]
    steps = {step["step"]: step["at"] for step in reported["steps"]}
    assert steps["forwarded"] == record["forwarded_seconds"] <= record["seconds"]
    assert line["held_seconds"] == record["held_seconds"]
    assert reported["phases"]["hold"] == round(record["held_seconds"], 4)
    if served:
        assert len(waits) == 3
        assert waits == sorted(waits)
        assert record["held_seconds"] == request.attributes["kybernate.held_seconds"] == waits[-1]
        assert record["held_seconds"] < record["forwarded_seconds"], "time at the lost engines was no wait"
        assert answer.headers["X-Kyb-Held-Seconds"] == f"{waits[-1]:.3f}"
        [total] = [row for row in metrics.splitlines() if row.startswith("kybernate_router_hold_seconds_sum")]
        assert float(total.split()[-1]) == waits[-1]
    else:
        assert (record["status"], len(waits)) == (499, 2)
        assert record["held_seconds"] > waits[-1], "its third wait counts, too"
        assert record["held_seconds"] <= request.attributes["kybernate.held_seconds"] < record["seconds"]


@pytest.mark.parametrize("access_log", [True, False])
async def test_each_call_has_one_access_line_if_they_are_wanted(access_log: bool):
    async with shown(router={"access_log": access_log}) as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        with capture_logs() as logs:
            assert (await w.ask("llama", x_request_id="served")).status == 200
            assert (await w.ask("no/such model *", x_request_id="unknown")).status == 404
        lines = [line for line in logs if line["event"] == "request.ended"]
        assert [(line["cause"], line["seat"], line["status"], line["reason"]) for line in lines] == (
            [("served", "s0", 200, ""), ("unknown", "", 404, "model_not_found")] if access_log else []
        )
        for line in lines[:1]:
            assert 0 == line["held_seconds"] <= line["first_byte_seconds"] <= line["seconds"]
