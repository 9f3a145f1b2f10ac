"""What ends one call or connection, and nothing else: errors of the router, engines that vanish, callers that leave."""

import asyncio
import io
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
from prometheus_client import generate_latest

from kybernate.http.framing import LAST_CHUNK, chunk
from kybernate.http.head import Head, HeadParser
from kybernate.seat import SeatState
from services.router.answer import Answer
from services.router.calls import MOST_BREAKS
from tests.router.world import World, world
from tests.until import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def engine(
    w: World, serve: Serve, model: str = "llama", state: SeatState = SeatState.ACTIVE
) -> AsyncIterator[None]:
    """A seat ``s0`` of the model whose engine serves each connection so."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await w.manager.put("s0", state, model=model, endpoint=endpoint, group="G0", home_group="G0", gpus=(0,))
    await until(lambda: "n1.s0" in w.router.traffic.table.upstreams, what="the router knows the seat")
    try:
        yield
    finally:
        server.close()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Read one request; empty if the connection ends first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def answering(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await request_of(reader):
            writer.write(answer)

    return serve


def call(*headers: bytes, version: bytes = b"1.1", **fields: object) -> bytes:
    body = json.dumps({"model": "llama", **fields}).encode()
    lines = [b"POST /v1/completions HTTP/" + version, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


async def settled(w: World) -> None:
    """Nothing is left of any call: no place at a seat or in a queue, no bytes, no connection of a caller."""
    router = w.router

    def left() -> dict[str, int]:
        upstreams = router.traffic.table.upstreams.values()
        return {
            "held or in flight": w.held("llama") + sum(len(upstream.in_flight) for upstream in upstreams),
            "tickets": len(router.dispatcher._tickets),
            "bytes": router.calls.intake.memory.total,
            "connections": router.connections.open,
            "busy at engines": sum(len(pool.busy) for pool in router.pools._pools.values()),
        }

    await until(lambda: not any(left().values()), what="nothing is left of the calls", saw=left)


async def answer(w: World) -> bytes:
    """Call on a separate connection; return the status line, or nothing if the router closed it."""
    reader, writer = await w.connect()
    writer.write(call(b"Connection: close"))
    try:
        return (await reader.read()).partition(b"\r\n")[0]
    finally:
        writer.close()


async def test_an_error_of_the_router_at_any_point_of_a_call_ends_only_that_call(
    w: World, monkeypatch: pytest.MonkeyPatch
):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    ok, failed = b"HTTP/1.1 200 OK", b"HTTP/1.1 500 Internal Server Error"
    for owner, name, expected in (
        (w.router.calls, "begin", b""),
        (w.router.calls.pools, "take", failed),
        (w.router.calls.guard, "withheld", b""),  # before there is a call
        (w.router.calls, "clock", failed),
        (w.router.calls.records, "ended", ok),  # the answer is complete before
    ):

        def broken(*_: object, name: str = name, **__: object) -> None:
            raise RuntimeError(f"{name} is broken")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            assert await answer(w) == expected, name
        assert await answer(w) == ok, name
        await settled(w)


async def test_an_endpoint_that_is_no_url_fails_its_own_calls_only(w: World):
    await w.seat("s1", "qwen", SeatState.ACTIVE)
    await w.manager.put("s0", model="llama", endpoint="http://[engine:99999", group="G0", home_group="G0", gpus=(0,))
    await until(lambda: "n1.s0" in w.router.traffic.table.upstreams, what="the router knows the seat")
    assert (await w.ask("llama", x_kyb_timeout="1")).status == 503
    assert (await w.ask("qwen")).status == 200


async def test_a_connection_that_the_engine_closes_at_once_is_one_failed_try(w: World):
    tries = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        if tries > 2 and await request_of(reader):
            writer.write(OK)

    async with engine(w, serve):
        assert (await w.ask("llama")).status == 200
        assert tries == 3


async def test_a_long_request_that_engines_drop_while_they_read_it_is_not_repeated_for_ever(w: World):
    tries = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await reader.readexactly(1000)
        writer.transport.abort()

    async with engine(w, serve):
        body = io.BytesIO(json.dumps({"model": "llama", "prompt": "x" * 2**24}).encode())
        answer = await w.call("POST", "/v1/completions", data=body)
        assert (answer.status, answer.code, tries) == (503, "upstream_failed", MOST_BREAKS + 1)
    await settled(w)


async def test_a_caller_that_does_not_read_is_cut_and_its_engine_is_not_blamed():
    async with world(slow_reader_seconds=0.5, silence_seconds=0.05) as w:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(EVENTS)
            while True:
                writer.write(chunk(b"data: " + b"x" * 65_530 + b"\n\n"))
                await writer.drain()

        def cut() -> float:
            return w.router._metrics.rejections.labels("slow_reader")._value.get()

        async with engine(w, serve):
            _, writer = await w.connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(call())
            await until(cut, what="the caller is cut")
            await settled(w)
            writer.transport.abort()
        shown = generate_latest(w.router.health.registry).decode()
        assert 'requests_total{code="499",model="llama"} 1.0' in shown


class Recorder:
    """A caller's connection that keeps what is sent."""

    address, slow, closes, sent = "", False, False, b""
    cors: Mapping[str, str] = {}

    def write(self, data: bytes) -> None:
        self.sent += data

    def finished(self, *, close: bool) -> None:
        pass

    abort = reset = lambda self: None


SSE = b"Content-Type: Text/Event-Stream; charset=utf-8"


def after_a_comment(status_line: bytes) -> tuple[Recorder, Answer, Head]:
    """A caller that has got a comment, what answers it, and the head of the engine's answer."""
    request = HeadParser(request=True).feed(call())
    found = HeadParser(request=False).feed(b"HTTP/1.1 %b\r\n\r\n" % status_line)
    caller = Recorder()
    answer = Answer(caller, request[0].version == "1.0")
    answer.comment()
    caller.sent = b""
    return caller, answer, found[0]


@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        (b"400", b'{"object":\n"error"}', '{"error": {"object": "error", "code": 400}}'),
        (b"400", b'{"error":{"message":"too long"}}', '{"error": {"message": "too long", "code": 400}}'),
        (b"422", b'{"error":{"code":"long"}, "id": 1}', '{"error": {"code": "long"}, "id": 1}'),
        (b"200", b'{"id":\r\n1}', '{"id": 1}'),
        (b"502", b"\n\nno", '502, and no stream of events; try again", "type": "server_error", "code": "upstream_fail'),
        (b"413", b"no", '413, and no stream of events", "type": "invalid_request_error", "code": "upstream_refused"'),
        (b"422", b"[]", '422, and no stream of events", "type": "invalid_request_error", "code": "upstream_refused"'),
        (b"200", b"\x1f\x8b", "the engine answered 200"),
        (b"200 OK\r\nContent-Encoding: gzip\r\n" + SSE, b"\x1f\x8b", "the engine answered 200"),
        (b"200 OK\r\n" + SSE, b'data: {"id": 1}\n\n', '{"id": 1}'),
    ],
)
def test_a_complete_answer_after_comments_is_an_event(head: bytes, body: bytes, expected: str):
    caller, answer, found = after_a_comment(head)
    answer.whole(found, b"", body)
    event, rest = caller.sent.partition(b"\r\n")[2].split(b"\n\n", 1)
    assert expected in event.removeprefix(b"data: ").decode()
    json.loads(event.removeprefix(b"data: "))
    assert rest == b"\r\n" + LAST_CHUNK


def test_an_empty_stream_after_comments_ends_the_answer_once():
    caller, answer, found = after_a_comment(b"200 OK\r\n" + SSE)
    answer.whole(found, b"", b"")
    assert caller.sent == LAST_CHUNK


@pytest.mark.parametrize(("status", "code"), [(200, "upstream_failed"), (404, "upstream_refused")])
async def test_pieces_of_no_stream_never_follow_comments(status: int, code: str):
    async with world(keepalive_seconds=0.02) as w:
        head = EVENTS.replace(b"text/event-stream", b"application/json").replace(b"200", b"%d" % status)

        async with engine(w, answering(head + chunk(b"{}") + LAST_CHUNK), state=SeatState.PARKED):
            w.manager.auto = False
            reader, writer = await w.connect()
            writer.write(call(b"Connection: close", stream=True))
            await reader.readuntil(b": waiting for the model\n\n")
            await w.manager.activate("s0")
            (event,) = re.findall(rb"data: (.*)", await reader.read())
            writer.close()
            error = json.loads(event)["error"]
            assert (error["code"], error["message"].partition(",")[0]) == (code, f"the engine answered {status}")
            counted = 503 if status == 200 else status
            shown = generate_latest(w.router.health.registry).decode()
            assert f'requests_total{{code="{counted}",model="llama"}} 1.0' in shown
            await settled(w)


async def test_an_idle_connection_that_the_engine_closes_as_the_next_call_is_sent_costs_no_call(w: World):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK)  # it does not say that it closes, and it closes when the next request arrives
        await reader.read(1)

    async with engine(w, serve):
        for _ in range(20):
            assert (await w.ask("llama")).status == 200


async def test_interim_answers_extensions_of_chunks_and_single_bytes_change_nothing(w: World):
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + EVENTS + b"9;a=b\r\ndata: 1\n\n\r\n0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await request_of(reader):
            for byte in answer:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)

    async with engine(w, serve):
        reader, writer = await w.connect()
        for _ in range(2):
            for byte in call():
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            assert b" 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readuntil(b"0\r\n\r\n") == b"9;a=b\r\ndata: 1\n\n\r\n0\r\n\r\n"
        writer.write(call(version=b"1.0"))
        whole = await reader.read()
        assert whole.endswith(b"\r\n\r\ndata: 1\n\n")
        assert b"chunked" not in whole
        writer.close()


async def test_callers_that_leave_at_any_point_leave_nothing_behind(w: World):
    gate = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await request_of(reader):
            await gate.wait()
            writer.write(OK)

    async with engine(w, serve):
        whole = call()
        for cut in (1, 30, len(whole) - 1, len(whole)):
            for half in (False, True):
                _, writer = await w.connect()
                writer.write(whole[:cut])
                await writer.drain()
                if cut == len(whole):
                    await until(lambda: len(w.upstream("s0").in_flight) == 1, what="the call is in flight")
                if half:
                    writer.write_eof()
                    if cut == len(whole):
                        writer.close()  # else it waits for its answer
                else:
                    writer.transport.abort()
                await settled(w)
                writer.close()
        gate.set()
        assert (await w.ask("llama")).status == 200


async def test_calls_that_wait_are_released_together_and_a_part_of_the_callers_has_left(w: World):
    await w.seat("s0", "llama")
    w.manager.auto = False
    waiting = [w.ask("llama") for _ in range(90)]
    await until(lambda: w.held("llama") == 90, what="all calls wait", saw=lambda: w.held("llama"))
    for task in waiting[::3]:
        task.cancel()
    await until(lambda: w.held("llama") == 60, what="calls that ended do not wait", saw=lambda: w.held("llama"))
    await w.manager.activate("s0")
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers].count(True) == 30
    assert {answer.status for answer in answers if not isinstance(answer, BaseException)} == {200}
    await w.http.close()
    await settled(w)


def framed(body: bytes, framing: str, chance: random.Random) -> bytes:
    """Return an engine's answer; ``endless``: it ends with its connection."""
    if framing == "length":
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    if framing == "endless":
        return b"HTTP/1.1 200 OK\r\n\r\n" + body
    answer, at = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    while at < len(body):
        size = chance.choice([1, 16, 17, 4096, 100_000])
        answer += chunk(body[at : at + size])
        at += size
    return answer + LAST_CHUNK


async def test_an_answer_arrives_as_it_was_sent_however_it_is_framed_and_split(w: World):
    chance = random.Random(14)
    answers: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await request_of(reader):
            answer, before = answers.pop(), 0
            cuts = {chance.randrange(len(answer)) for _ in range(chance.choice([0, 3, 12]))}
            for at in sorted({*cuts, len(answer)}):
                writer.write(answer[before:at])
                await writer.drain()
                await asyncio.sleep(0.001)
                before = at
            if b"Content-Length" not in answer and b"chunked" not in answer:
                return

    async with engine(w, serve):
        for number in range(60):
            body = chance.randbytes(chance.choice([0, 1, 300, 300_000]))
            framing = ("length", "chunked", "endless")[number % 3]
            answers.append(framed(body, framing, chance))
            got = await w.ask("llama")
            assert (got.status, got.body == body) == (200, True), (number, framing, len(body))
    await w.http.close()
    await settled(w)


async def test_a_caller_of_http_1_0_notices_an_incomplete_answer(w: World):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(EVENTS + chunk(b"data: half of an ev"))
        await writer.drain()

    async with engine(w, serve):
        reader, writer = await w.connect()
        writer.write(call(version=b"1.0"))
        with pytest.raises(ConnectionResetError):
            await reader.read(-1)
        writer.close()


async def test_requests_that_arrive_while_the_router_stops_get_an_answer():
    async with world() as w:
        callers = [await w.connect(), await w.connect()]
        for (_, writer), part in zip(callers, (call()[:20], call()[:-1]), strict=True):
            writer.write(part)
        await until(
            lambda: w.router.calls.intake.memory.total > 0 and w.router.connections.open == 2,
            what="parts of both requests have arrived",
        )
    for reader, writer in callers:
        answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"router_stopping" in answer
        assert b"connection: close" in answer.lower()
        writer.close()


@pytest.mark.parametrize("state", [SeatState.ACTIVE, SeatState.PARKED])
async def test_a_caller_that_ends_its_side_after_a_whole_request_gets_the_answer(w: World, state: SeatState):
    engine = await w.seat("s0", "llama", state)
    w.manager.auto = False
    engine.gate.clear()
    reader, writer = await w.connect()
    writer.write(call())
    writer.write_eof()
    for _ in range(2):  # at once, and whenever it is asked whether it is still there
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    if state is SeatState.PARKED:
        await w.manager.activate("s0")
    engine.gate.set()
    answered = await reader.read()  # and then the router closes
    assert b"HTTP/1.1 200 OK" in answered
    writer.close()
    await settled(w)


async def test_requests_before_the_end_of_a_callers_side_are_all_answered(w: World):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    own = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    for requests in ([own], [call(), call()], [own, call(), own]):
        reader, writer = await w.connect()
        writer.write(b"".join(requests))
        writer.write_eof()
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == len(requests)
        writer.close()
    await settled(w)


@pytest.mark.parametrize("reads", [False, True])
async def test_a_caller_that_closes_is_gone_within_a_second_also_after_it_ended_its_side(w: World, reads: bool):
    w.manager.auto = False
    await w.seat("s0", "llama", SeatState.PARKED)
    reader, writer = await w.connect()
    writer.write(call())
    await until(lambda: w.held("llama") == 1, what="the call is held")
    if reads:
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.close()
    began = time.monotonic()
    await settled(w)
    assert time.monotonic() - began < 1.5


DEAD = b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 31\r\n\r\n{"error":"EngineCore is dead."}'


@pytest.mark.parametrize("ends", [True, False])
async def test_a_5xx_of_an_engine_whose_container_ends_is_not_the_answer(w: World, ends: bool):
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await request_of(reader):
            asked += 1
            writer.write(DEAD if asked == 1 else OK)

    async with engine(w, serve):
        began = time.monotonic()
        waiting = w.ask("llama")
        pools = w.router.pools._pools
        await until(lambda: asked and not any(pool.busy for pool in pools.values()), what="the router has the answer")
        if ends:
            await w.manager.move("s0", SeatState.LOST)
            await until(lambda: w.held("llama") == 1, what="the call waits again")
            await w.manager.activate("s0")
        answered = await waiting
        assert (answered.status, asked) == ((200, 2) if ends else (500, 1))
        if not ends:
            assert answered.json == {"error": "EngineCore is dead."}
            assert time.monotonic() - began >= 1
        await w.http.close()
        _, writer = await w.connect()
        asked = 0
        writer.write(call())
        await until(lambda: asked == 1, what="the engine has the request")
        writer.close()  # while the answer is held back
        await settled(w)


async def test_a_5xx_of_an_engine_that_accepts_no_connection_after_it_is_not_the_answer(w: World):
    """As vLLM's server, whose process goes on for a second, and whose container is seen to end later still."""
    asked = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        if await request_of(reader):
            asked += 1
            writer.write(DEAD)

    async with engine(w, die):
        waiting = w.ask("llama")
        await until(lambda: asked == 1, what="the engine has the request")
    await until(lambda: waiting.done() or w.held("llama") == 1, what="the call waits again, or it ended")
    assert not waiting.done(), (await waiting).json
    await w.manager.move("s0", SeatState.LOST)
    async with engine(w, answering(OK)):
        assert ((await waiting).status, asked) == (200, 1)


async def test_what_a_held_call_keeps_is_counted_until_it_ends(w: World) -> None:
    await w.seat("s0", "llama", SeatState.PARKED)
    w.manager.auto = False
    front, (_, writer) = w.router.front, await w.connect()
    body, first = b'{"model": "llama"}', b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    head += b"X-Long: %s\r\n\r\n" % (b"y" * 8_000)
    writer.write(first + head + body + b"z" * 9_000)  # all in one piece
    memory = w.router.calls.intake.memory
    await until(lambda: front.partial.total == 9_000, what="the bytes behind the call", timeout=5)
    assert memory.total > len(body) + 3 * len(head)
    writer.close()
    await until(lambda: front.partial.total == memory.total == 0, what="nothing is counted any more", timeout=5)
