"""A request for a parked model is held, its seat is activated, and the response is streamed."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from kybernate.messages import ActivateSeat, CommandReply, TrafficSignal
from kybernate.seat import SeatState
from tests.router.world import NODE, World, world
from tests.until import until


async def test_a_stream_to_a_parked_model_is_held_and_passes_through_byte_for_byte(w: World):
    engine = await w.seat("s0", "llama")
    answer = await w.ask("llama", stream=True, x_request_id="r1")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream"
    events = answer.body.split(b"\n\n")
    assert [e[:6] for e in events[:-1]] == [b"data: "] * 4
    assert events[-2] == b"data: [DONE]"
    assert answer.headers["X-Kyb-Seat"] == "s0"
    assert answer.headers["X-Kyb-Cause"] == "r1"
    assert float(answer.headers["X-Kyb-Held-Seconds"]) > 0
    assert engine.headers[0]["X-Request-Id"] == "r1"
    (asked,) = w.manager.of(ActivateSeat)
    assert (asked.seat, asked.cause, asked.actor) == ("s0", "r1", "router")


async def test_the_overhead_header_adds_the_three_parts(w: World):
    await w.seat("s0", "llama")
    w.manager.control_seconds = 1.5
    answer = await w.ask("llama")
    overhead = float(answer.headers["X-Kyb-Overhead-Seconds"])
    assert 1.5 < overhead < 3.0
    again = await w.ask("llama")
    assert "X-Kyb-Overhead-Seconds" not in again.headers
    assert again.headers["X-Kyb-Held-Seconds"] == "0.000"


async def test_a_plain_response_keeps_the_engines_headers(w: World):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    answer = await w.ask("llama", x_request_id="mine")
    assert answer.status == 200
    assert answer.headers["X-Engine"] == "yes"
    assert answer.json["choices"][0]["message"]["content"] == "hello from llama"


async def test_levels_rise_at_once_and_end_with_a_zero(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    call = w.ask("llama", x_request_id="r1")
    await w.last(TrafficSignal, lambda level: level.waiting == 1)
    first = next(level for level in w.manager.of(TrafficSignal) if level.waiting)
    assert (first.seat, first.model, first.source, first.cause) == ("s0", "llama", "router-0", "r1")
    assert first.arrivals == 1
    await w.manager.activate("s0")
    assert (await call).status == 200
    last = await w.last(TrafficSignal, lambda level: level.waiting == level.in_flight == 0)
    assert last.seq > first.seq


async def test_the_level_falls_when_a_waiting_caller_disconnects(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    call = await w.hold("llama")
    await w.last(TrafficSignal, lambda level: level.waiting == 1)
    call.cancel()
    await w.last(TrafficSignal, lambda level: level.waiting == 0)


async def test_a_full_queue_returns_429_with_retry_after():
    async with world(queue_limit=1, speed=10) as w:
        await w.seat("s0", "llama", activate_seconds=25.0)
        w.manager.auto = False
        first = await w.hold("llama")
        second = await w.ask("llama")
        assert (second.status, second.code) == (429, "queue_full")
        assert "model llama has 1 request waiting already" in second.json["error"]["message"]
        assert 3 <= int(second.headers["Retry-After"]) <= 6, "the learned 2.5 s, spread up to twice as much"
        await w.manager.activate("s0")
        assert (await first).status == 200


async def test_held_bodies_are_bounded_over_all_models():
    async with world(held_bytes=400) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        answer = await w.call("POST", "/v1/embeddings", json={"model": "llama", "input": "x" * 500})
        assert (answer.status, answer.code) == (429, "queue_full")
        assert "Retry-After" in answer.headers


async def test_the_hold_ends_at_its_deadline_with_a_503():
    async with world(hold_seconds=5, speed=100) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        answer = await w.ask("llama")
        assert (answer.status, answer.code) == (503, "hold_timeout")
        assert int(answer.headers["Retry-After"]) >= 1
        text = "model llama could not be called within 5 s (KYB_HOLD_SECONDS)"
        assert answer.json["error"]["message"].startswith(f"{text}: it is parked (its seat on {NODE}/G0: parked)")


@pytest.mark.parametrize(
    ("headers", "limit"),
    [
        ({"X-Kyb-Timeout": "0.01"}, "0.01 s (X-Kyb-Timeout)"),
        ({"X-Kyb-Timeout": "20", "X-Envoy-Expected-Rq-Timeout-Ms": "50"}, "0.05 s (X-Envoy-Expected-Rq-Timeout-Ms)"),
    ],
)
async def test_a_hold_that_its_caller_ends_names_the_callers_limit(w: World, headers: dict[str, str], limit: str):
    await w.seat("s0", "llama")
    w.manager.auto = False
    answer = await w.ask("llama", **headers)
    assert (answer.status, answer.code) == (503, "hold_timeout")
    assert answer.json["error"]["message"].startswith(f"model llama could not be called within {limit}: it is")


async def test_a_temporary_refusal_keeps_the_hold(w: World):
    await w.seat("s0", "llama")
    w.manager.reply = CommandReply(accepted=False, code="not-ready", reason="still starting")
    call = w.ask("llama")
    await w.last(ActivateSeat, lambda asked: asked.seat == "s0")
    w.manager.reply = None
    await w.manager.activate("s0")
    assert (await call).status == 200


async def test_a_quarantined_model_is_refused_with_the_reason(w: World):
    await w.seat("s0", "llama", SeatState.QUARANTINED, reason="foreign process 4711 on GPU 0")
    answer = await w.ask("llama")
    assert (answer.status, answer.code) == (503, "seat_quarantined")
    assert "foreign process 4711" in answer.json["error"]["message"]


HI: list[Any] = [{"role": "user", "content": "hi"}]
FAILED = "llama has failed 3 times in a row since 08:16 UTC: exited with code 1: no such file"


async def test_a_request_for_a_model_that_fails_again_and_again_is_answered_at_once_with_the_reason(w: World):
    await w.seat("s0", "llama", SeatState.WAITING, failed=FAILED, failed_until=time.time() + 100.0)
    answer = await w.ask("llama")
    assert (answer.status, answer.code) == (503, "engine_failed")
    assert answer.json["error"]["message"].startswith(f"{FAILED}; try again in ")
    assert 90 <= int(answer.headers["Retry-After"]) <= 100
    assert not w.manager.of(ActivateSeat)


async def test_after_its_pause_a_request_is_held_for_one_attempt_and_answered_when_that_fails(w: World):
    await w.seat("s0", "llama", SeatState.WAITING, failed=FAILED)
    call = w.ask("llama")
    await until(lambda: w.manager.of(ActivateSeat), what="one attempt")
    await w.manager.put("s0", SeatState.STARTING)
    await w.manager.put("s0", SeatState.BACKOFF)
    assert w.held("llama") == 1
    again = FAILED.replace("3", "4")
    await w.manager.put("s0", SeatState.BACKOFF, failed=again, failed_until=time.time() + 20.0)
    answer = await call
    assert (answer.status, answer.code) == (503, "engine_failed")
    assert answer.json["error"]["message"].startswith(f"{again}; try again in ")


async def test_a_model_with_another_seat_is_served_there(w: World):
    await w.seat("s0", "llama", SeatState.WAITING, failed=FAILED, failed_until=time.time() + 100.0)
    await w.seat("s1", "llama")
    assert (await w.ask("llama")).status == 200


async def test_a_waiting_stream_gets_comments_if_keepalive_is_set():
    async with world(keepalive_seconds=0.05) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        async with w.http.post(f"{w.url}/v1/chat/completions", json={"model": "llama", "stream": True}) as response:
            for _ in range(2):
                assert await response.content.readuntil(b"\n\n") == b": waiting for the model\n\n"
            await w.manager.activate("s0")
            rest = await response.read()
        assert rest.rstrip().endswith(b"data: [DONE]")


async def test_the_openai_client_streams_from_a_parked_model(w: World):
    await w.seat("s0", "llama")
    async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="llama", messages=HI, stream=True)
        words = [chunk.choices[0].delta.content async for chunk in stream]
        assert words == ["w0 ", "w1 ", "w2 "]
        models = await client.models.list()
        assert [model.id for model in models.data] == ["llama"]


async def test_the_openai_client_raises_the_reason_of_a_cut_stream(w: World):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    engine.gate.clear()
    async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="llama", messages=HI, stream=True)
        await anext(stream)
        await w.manager.move("s0", SeatState.DRAINING)
        await w.manager.move("s0", SeatState.PARKING)
        with pytest.raises(openai.APIError, match="was parked before the answer was complete"):
            await anext(stream)


async def test_idle_connections_are_closed_when_a_seat_closes(w: World):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    assert (await w.ask("llama")).status == 200
    pool = next(iter(w.router.pools._pools.values()))
    await w.manager.move("s0", SeatState.DRAINING)
    await until(lambda: pool.closed and not pool.idle, what="the pool is closed")


@pytest.mark.parametrize(("lost", "code"), [(False, "seat_evicted"), (True, "upstream_failed")])
async def test_a_request_whose_seat_goes_away_three_times_before_the_first_byte_ends(w: World, lost: bool, code: str):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    engine.silent.clear()
    call = w.ask("llama")
    for _ in range(3):
        await until(lambda: engine.running == 1, what="the engine has the request", saw=lambda: engine.running)
        for state in (SeatState.LOST,) if lost else (SeatState.DRAINING, SeatState.PARKING):
            await w.manager.move("s0", state)
        await until(lambda: engine.running == 0, what="the engine has lost it", saw=lambda: engine.running)
        await w.manager.move("s0", SeatState.ACTIVE if lost else SeatState.PARKED)
    answer = await call
    assert (answer.status, answer.code) == (503, code)
    assert answer.headers["Retry-After"] == "1"
    assert len(engine.requests) == 3


async def test_eviction_cuts_a_running_stream_with_an_error_event_and_counts_it(w: World):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    engine.gate.clear()
    async with w.http.post(f"{w.url}/v1/completions", json={"model": "llama", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await w.manager.move("s0", SeatState.DRAINING)
        await w.manager.move("s0", SeatState.PARKING)
        last = (await response.read()).strip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "seat_evicted"
    await until(lambda: engine.aborted == 1, what="requests aborted at the engine: 1", saw=lambda: engine.aborted)
    text = (await w.call("GET", "/metrics")).body.decode()
    assert 'kybernate_router_cuts_total{code="after_first_byte"} 1.0' in text
    assert 'kybernate_router_requests_total{code="503",model="llama"} 1.0' in text


async def test_a_call_is_retried_at_an_engine_that_refuses_until_it_answers(w: World):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    await engine.stop()
    call = await w.hold("llama")
    await engine.start()
    assert (await call).status == 200


async def test_a_refused_call_goes_to_another_seat_of_its_model(w: World):
    one = await w.seat("s0", "llama", SeatState.ACTIVE)
    two = await w.seat("s1", "llama", SeatState.ACTIVE)
    await one.stop()
    answers = [await w.ask("llama") for _ in range(3)]
    assert {answer.headers["X-Kyb-Seat"] for answer in answers} == {"s1"}
    assert len(two.requests) == 3


@pytest.mark.parametrize(("last", "code"), [(b"data: [DONE]", "200"), (b"w0", "499")])
async def test_a_caller_that_leaves_at_the_last_event_of_a_stream_was_answered(w: World, last: bytes, code: str):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    engine.end.clear()
    if code == "499":
        engine.gate.clear()
    async with w.http.post(f"{w.url}/v1/completions", json={"model": "llama", "stream": True}) as response:
        async for line in response.content:
            if last in line:
                break
        response.close()
    await until(lambda: not w.upstream("s0").in_flight, what="nothing in flight on the seat")
    await until(lambda: engine.aborted == 1, what="the call has ended at the engine")
    metrics = (await w.call("GET", "/metrics")).body.decode()
    assert f'kybernate_router_requests_total{{code="{code}",model="llama"}} 1.0' in metrics


async def test_calls_go_to_the_active_seat_with_the_fewest_in_flight(w: World):
    engines = [await w.seat(f"s{n}", "llama", SeatState.ACTIVE) for n in range(2)]
    for engine in engines:
        engine.gate.clear()
    calls = [w.ask("llama", stream=True) for _ in range(4)]
    await until(lambda: [engine.running for engine in engines] == [2, 2], what="two requests run at each engine")
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*calls)


async def test_held_requests_are_rejected_when_the_router_stops(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    call = await w.hold("llama")
    w.router.front.stop()
    answer = await call
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "router_stopping", "1")
    assert answer.headers["Connection"] == "close", "the next request must not be sent into a closing connection"


async def test_after_a_comment_errors_are_sent_as_events():
    async with world(keepalive_seconds=0.02) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        async with w.http.post(f"{w.url}/v1/chat/completions", json={"model": "llama", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": waiting for the model\n\n"
            w.router.front.stop()
            last = (await response.read()).strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "router_stopping"
