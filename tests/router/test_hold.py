"""A request for a parked model is held, its seat is activated, and the response is streamed."""

import asyncio
import io
import json
import time

import aiohttp
import openai
import pytest

from kybernate.messages import ActivateSeat, CommandReply, DrainAck, TrafficSignal
from kybernate.seat import SeatState
from tests.router.world import NODE, world
from tests.until import until


async def test_a_stream_to_a_parked_model_is_held_and_passes_through_byte_for_byte():
    async with world() as w:
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


async def test_the_overhead_header_adds_the_three_parts():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.control_seconds = 1.5
        answer = await w.ask("llama")
        overhead = float(answer.headers["X-Kyb-Overhead-Seconds"])
        assert 1.5 < overhead < 3.0
        again = await w.ask("llama")
        assert "X-Kyb-Overhead-Seconds" not in again.headers
        assert again.headers["X-Kyb-Held-Seconds"] == "0.000"


async def test_a_plain_response_keeps_the_engines_headers():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        answer = await w.ask("llama", x_request_id="mine")
        assert answer.status == 200
        assert answer.headers["X-Engine"] == "yes"
        assert answer.json["choices"][0]["message"]["content"] == "hello from llama"


async def test_two_callers_of_one_parked_model_are_both_served_by_one_activation():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        calls = [w.ask("llama"), w.ask("llama", stream=True)]
        await until(lambda: w.held("llama") == 2, what="requests for llama that the router holds: 2")
        await w.manager.activate("s0")
        assert [(await call).status for call in calls] == [200, 200]
        assert len(w.manager.of(ActivateSeat)) == 1


async def test_levels_rise_at_once_and_end_with_a_zero():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        call = w.ask("llama", x_request_id="r1")
        first = await until(
            lambda: [s for s in w.manager.of(TrafficSignal) if s.waiting == 1],
            what="a traffic signal with one waiting request",
        )
        assert (first[0].seat, first[0].model, first[0].source, first[0].cause) == ("s0", "llama", "router-0", "r1")
        assert first[0].arrivals == 1
        await w.manager.activate("s0")
        assert (await call).status == 200
        last = await until(
            lambda: (s := w.manager.of(TrafficSignal)[-1]).waiting == s.in_flight == 0 and s,
            what="the last traffic signal has nothing waiting and nothing in flight",
            saw=lambda: w.manager.of(TrafficSignal),
        )
        assert last.seq > first[0].seq


async def test_the_level_falls_when_a_waiting_caller_disconnects():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        call = w.ask("llama")
        await until(
            lambda: [s for s in w.manager.of(TrafficSignal) if s.waiting == 1],
            what="a traffic signal with one waiting request",
        )
        call.cancel()
        await until(lambda: w.held("llama") == 0, what="requests for llama that the router holds: 0")
        await until(
            lambda: w.manager.of(TrafficSignal)[-1].waiting == 0,
            what="the last traffic signal has nothing waiting",
            saw=lambda: w.manager.of(TrafficSignal),
        )


async def test_a_full_queue_returns_429_with_retry_after():
    async with world(queue_limit=1, speed=10) as w:
        await w.seat("s0", "llama", activate_seconds=25.0)
        w.manager.auto = False
        first = w.ask("llama")
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
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
async def test_a_hold_that_its_caller_ends_names_the_callers_limit(headers: dict[str, str], limit: str):
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        answer = await w.ask("llama", **headers)
        assert (answer.status, answer.code) == (503, "hold_timeout")
        assert answer.json["error"]["message"].startswith(f"model llama could not be called within {limit}: it is")


async def test_a_final_refusal_of_the_manager_rejects_waiting_calls_with_its_reason():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.reply = CommandReply(accepted=False, code="pinned", reason="group G0 is held by s1, which is pinned")
        answer = await w.ask("llama")
        assert (answer.status, answer.code) == (503, "activation_refused")
        assert "which is pinned" in answer.json["error"]["message"]


async def test_a_temporary_refusal_keeps_the_hold():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.reply = CommandReply(accepted=False, code="not-ready", reason="still starting")
        call = w.ask("llama")
        await until(
            lambda: len(w.manager.of(ActivateSeat)) == 1,
            what="one command to activate a seat",
            saw=lambda: w.manager.of(ActivateSeat),
        )
        w.manager.reply = None
        await w.manager.activate("s0")
        assert (await call).status == 200


async def test_a_quarantined_model_is_refused_with_the_reason():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.QUARANTINED, reason="foreign process 4711 on GPU 0")
        answer = await w.ask("llama")
        assert (answer.status, answer.code) == (503, "seat_quarantined")
        assert "foreign process 4711" in answer.json["error"]["message"]


FAILED = "llama has failed 3 times in a row since 08:16 UTC: exited with code 1: no such file"


async def test_a_request_for_a_model_that_fails_again_and_again_is_answered_at_once_with_the_reason():
    async with world() as w:
        pauses = {"failed": FAILED, "failed_until": time.time() + 100.0}
        await w.seat("s0", "llama", SeatState.WAITING, **pauses)
        answer = await w.ask("llama")
        assert (answer.status, answer.code) == (503, "engine_failed")
        assert answer.json["error"]["message"].startswith(f"{FAILED}; try again in ")
        assert 90 <= int(answer.headers["Retry-After"]) <= 100
        assert not w.manager.of(ActivateSeat)


async def test_after_its_pause_a_request_is_held_for_one_attempt_and_answered_when_that_fails():
    async with world() as w:
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


async def test_a_model_with_another_seat_is_served_there():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.WAITING, failed=FAILED, failed_until=time.time() + 100.0)
        await w.seat("s1", "llama")
        assert (await w.ask("llama")).status == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"messages": []}', 400, "model_missing"),
        (b'{"model": "' + b"x" * 513 + b'"}', 400, "model_missing"),
        (b'{"model": "\\ud800"}', 400, "invalid_json"),
        (b'{"model": "m", "prompt": "\\ud83d"}', 400, "invalid_json"),
        (b"[" * 1000, 400, "invalid_json"),
        (b'{"model": "unknown"}', 404, "model_not_found"),
        (b'{"model": "' + b"x" * 2000 + b'"}', 413, "body_too_large"),
    ],
)
async def test_bad_requests_get_one_clear_answer(body: bytes, status: int, code: str):
    async with world(body_bytes=1024) as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        answer = await w.call("POST", "/v1/chat/completions", data=body)
        assert (answer.status, answer.code) == (status, code)
        assert set(answer.json["error"]) == {"message", "type", "code"}
        if status == 404:
            assert "known models: llama" in answer.json["error"]["message"]


async def test_other_paths_are_never_forwarded():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        answer = await w.call("POST", "/admin/sleep", json={"model": "llama"})
        assert (answer.status, answer.code) == (404, "not_found")
        answer = await w.call("GET", "/v1/chat/completions")
        assert (answer.status, answer.json["error"]["type"]) == (405, "invalid_request_error")
        assert not engine.requests


async def test_a_waiting_stream_gets_comments_if_keepalive_is_set():
    async with world(keepalive_seconds=0.05) as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        async with w.http.post(f"{w.url}/v1/chat/completions", json={"model": "llama", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": waiting for the model\n\n"
            await w.manager.activate("s0")
            rest = await response.read()
        assert rest.rstrip().endswith(b"data: [DONE]")


async def test_the_openai_client_streams_from_a_parked_model():
    async with world() as w:
        await w.seat("s0", "llama")
        client = openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            words = [chunk.choices[0].delta.content async for chunk in stream]
            assert words == ["w0 ", "w1 ", "w2 "]
            models = await client.models.list()
            assert [model.id for model in models.data] == ["llama"]


async def test_the_openai_client_raises_the_reason_of_a_cut_stream():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.gate.clear()
        client = openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            await anext(stream)
            await w.manager.move("s0", SeatState.DRAINING)
            await w.manager.move("s0", SeatState.PARKING)
            with pytest.raises(openai.APIError, match="was parked before the answer was complete"):
                await anext(stream)


async def test_a_draining_seat_gets_nothing_new_and_acks_count_down():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.gate.clear()
        running = w.ask("llama", stream=True)
        await until(lambda: engine.running == 1, what="requests running at the engine: 1", saw=lambda: engine.running)
        closed = await w.manager.move("s0", SeatState.DRAINING)
        await until(
            lambda: w.manager.acks("s0") == [1],
            what="an acknowledgement with one request in flight",
            saw=lambda: w.manager.acks("s0"),
        )
        later = w.ask("llama")
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
        assert engine.running == 1
        engine.gate.set()
        assert (await running).body.endswith(b"[DONE]\n\n")
        await until(
            lambda: w.manager.acks("s0")[-1] == 0,
            what="the last acknowledgement has no request in flight",
            saw=lambda: w.manager.acks("s0"),
        )
        ack = w.manager.of(DrainAck)[-1]
        assert (ack.epoch, ack.instance, ack.cause) == (closed.epoch, "router-0", "test")
        await w.manager.move("s0", SeatState.ACTIVE, epoch=closed.epoch)
        assert (await later).status == 200


async def test_acks_repeat_while_the_seat_drains():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        await w.manager.move("s0", SeatState.DRAINING)
        await until(
            lambda: len(w.manager.acks("s0")) >= 2, what="two acknowledgements", saw=lambda: w.manager.acks("s0")
        )
        assert set(w.manager.acks("s0")) == {0}


async def test_idle_connections_are_closed_when_a_seat_closes():
    async with world() as w:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        assert (await w.ask("llama")).status == 200
        pool = next(iter(w.router.pools._pools.values()))
        await w.manager.move("s0", SeatState.DRAINING)
        await until(lambda: pool.closed and not pool.idle, what="the pool is closed")


async def test_eviction_before_the_first_byte_holds_the_request_again():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        w.manager.auto = False
        engine.silent.clear()
        call = w.ask("llama")
        await until(lambda: engine.running == 1, what="requests running at the engine: 1", saw=lambda: engine.running)
        await w.manager.move("s0", SeatState.DRAINING)
        await w.manager.move("s0", SeatState.PARKING)
        await until(lambda: engine.running == 0, what="requests running at the engine: 0", saw=lambda: engine.running)
        await until(
            lambda: w.manager.acks("s0")[-1] == 0,
            what="the last acknowledgement has no request in flight",
            saw=lambda: w.manager.acks("s0"),
        )
        await w.manager.move("s0", SeatState.PARKED)
        await until(
            lambda: len(w.manager.of(ActivateSeat)) == 1,
            what="one command to activate a seat",
            saw=lambda: w.manager.of(ActivateSeat),
        )
        engine.silent.set()
        await w.manager.activate("s0")
        assert (await call).status == 200


@pytest.mark.parametrize(("lost", "code"), [(False, "seat_evicted"), (True, "upstream_failed")])
async def test_a_request_whose_seat_goes_away_three_times_before_the_first_byte_ends(lost: bool, code: str):
    async with world() as w:
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


async def test_eviction_cuts_a_running_stream_with_an_error_event_and_counts_it():
    async with world() as w:
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


async def test_a_call_is_retried_at_an_engine_that_refuses_until_it_answers():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        await engine.stop()
        call = w.ask("llama")
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
        await engine.start()
        assert (await call).status == 200


async def test_an_engine_that_never_answers_leads_to_a_503_at_the_deadline():
    async with world(hold_seconds=60, speed=100) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        await engine.stop()
        answer = await w.ask("llama")
        assert (answer.status, answer.code) == (503, "hold_timeout")


async def test_a_refused_call_goes_to_another_seat_of_its_model():
    async with world() as w:
        one = await w.seat("s0", "llama", SeatState.ACTIVE)
        two = await w.seat("s1", "llama", SeatState.ACTIVE)
        await one.stop()
        answers = [await w.ask("llama") for _ in range(3)]
        assert {answer.headers["X-Kyb-Seat"] for answer in answers} == {"s1"}
        assert len(two.requests) == 3


async def test_a_stream_that_breaks_ends_with_an_error_event():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.break_after_first = True
        answer = await w.ask("llama", stream=True)
        assert answer.status == 200
        last = answer.body.strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"


async def test_a_caller_that_disconnects_aborts_the_call_at_the_engine():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.gate.clear()
        call = w.ask("llama", stream=True)
        await until(lambda: engine.running == 1, what="requests running at the engine: 1", saw=lambda: engine.running)
        call.cancel()
        await until(lambda: engine.aborted == 1, what="requests aborted at the engine: 1", saw=lambda: engine.aborted)
        await until(lambda: not w.upstream("s0").in_flight, what="nothing in flight on the seat")


@pytest.mark.parametrize(("last", "code"), [(b"data: [DONE]", "200"), (b"w0", "499")])
async def test_a_caller_that_leaves_at_the_last_event_of_a_stream_was_answered(last: bytes, code: str):
    async with world() as w:
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
        metrics = (await w.call("GET", "/metrics")).body.decode()
        assert f'kybernate_router_requests_total{{code="{code}",model="llama"}} 1.0' in metrics


async def test_calls_go_to_the_active_seat_with_the_fewest_in_flight():
    async with world() as w:
        engines = [await w.seat(f"s{n}", "llama", SeatState.ACTIVE) for n in range(2)]
        for engine in engines:
            engine.gate.clear()
        calls = [w.ask("llama", stream=True) for _ in range(4)]
        await until(
            lambda: [engine.running for engine in engines] == [2, 2],
            what="two requests running at each engine",
            saw=lambda: [engine.running for engine in engines],
        )
        for engine in engines:
            engine.gate.set()
        await asyncio.gather(*calls)


async def test_a_large_body_is_forwarded():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        body = json.dumps({"model": "llama", "input": "x" * 3_000_000}).encode()
        answer = await w.call("POST", "/v1/embeddings", data=io.BytesIO(body))
        assert answer.status == 200
        assert len(engine.requests[0]["input"]) == 3_000_000


async def test_held_requests_are_rejected_when_the_router_stops():
    async with world() as w:
        await w.seat("s0", "llama")
        w.manager.auto = False
        call = w.ask("llama")
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
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


async def test_a_plain_response_after_a_comment_is_sent_as_an_event():
    async with world(keepalive_seconds=0.02) as w:
        engine = await w.seat("s0", "llama")
        engine.whole = True
        w.manager.auto = False
        call = w.ask("llama", stream=True)
        await until(lambda: w.held("llama") == 1, what="requests for llama that the router holds: 1")
        await asyncio.wait([call], timeout=0.1)  # long enough for a comment, not for the hold
        await w.manager.activate("s0")
        answer = await call
        last = answer.body.strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["object"] == "chat.completion"


async def test_half_an_event_is_never_completed_by_an_error():
    async with world() as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.break_after_first = True
        engine.torn = True
        with pytest.raises(aiohttp.ClientPayloadError):
            await w.ask("llama", stream=True)
