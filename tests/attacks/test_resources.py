"""Callers that want more than their share: of memory, CPU time, connections, time, or places in an engine."""

import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kybernate.seat import SeatState
from tests.attacks.stack import RawEngine, Response, Stack, call, receive, request, serving
from tests.keys import key_file

MIB = 2**20
PATH = "/v1/chat/completions"


def bomb(size: int, element: bytes = b"{},") -> bytes:
    return b'{"model":"llama","a":[' + element * (size // len(element)) + element[:-1] + b"]}"


# --- JSON -------------------------------------------------------------------------------------------------------------


class Watch:
    """Calls ``/healthz`` all the time from another thread; ``seconds``: most CPU time between two answers."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._ends, self.seconds, self.answers = stack, threading.Event(), 0.0, 0

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            before = self._stack.cpu_seconds
            assert self._stack.get("/healthz").status == 200
            self.seconds = max(self.seconds, self._stack.cpu_seconds - before)
            self.answers += 1


@pytest.mark.parametrize("element", [b"{},", b"[],", b'"",', b"[[[{}]]],"])
def test_a_bomb_of_elements_delays_no_other_caller(stack: Stack, engine: RawEngine, element: bytes) -> None:
    before = stack.memory_bytes()
    with Watch(stack) as watch:
        assert stack.post(PATH, bomb(31 * MIB, element)).status == 200  # whether it is an error is the engine's affair
    assert watch.seconds < 0.5, "seconds of CPU time in which no other caller was served"
    assert stack.memory_bytes() < before + 128 * MIB
    assert len(engine.bodies) == 1


@pytest.mark.parametrize("kind", ["prompts", "members"])
def test_200_bodies_that_are_complete_at_once_take_no_long_turn(folder: Path, kind: str) -> None:
    """The router is stopped until the last byte of each is there, so that it finds all of them in one turn.

    Measured: 0.01 s for prompts, 0.2 s for objects of 7,000 members, which are the worst of this size."""
    body = call(prompt="x" * 60_000)
    if kind == "members":
        body = b'{"model":"llama"' + b"".join(b',"%d":1' % at for at in range(7000)) + b"}"
    assert 59_000 < len(body) < 64 * 1024
    with serving(folder) as (stack, engine), contextlib.ExitStack() as opened:
        callers = [opened.enter_context(stack.connect()) for _ in range(200)]
        for caller in callers:
            caller.sendall(request(PATH, body)[:-1])
        arrived = 200 * (len(body) - 1)
        stack.wait(lambda: stack.metric("kybernate_router_body_bytes") == arrived, "all but one byte each")
        stack.process.send_signal(signal.SIGSTOP)
        for caller in callers:
            caller.sendall(body[-1:])
        with Watch(stack) as watch:
            time.sleep(0.2)  # its question waits, too
            stack.process.send_signal(signal.SIGCONT)
            for caller in callers:
                assert b" 200 OK" in receive(caller, b'{"ok":true}')
        assert len(engine.bodies) == 200
    assert watch.seconds < 1.0, "seconds of CPU time in which no other caller was served"


def test_a_compressed_body_is_not_read(stack: Stack, engine: RawEngine) -> None:
    cpu, memory = stack.cpu_seconds, stack.memory_bytes()
    for _ in range(8):
        response = stack.post(PATH, bytes(31 * MIB), b"Content-Encoding: gzip")
        assert (response.status, response.code) == (415, "unsupported_content_encoding")
    assert stack.cpu_seconds - cpu < 2.0
    assert stack.memory_bytes() < memory + 64 * MIB
    assert stack.rejected("unsupported_content_encoding") >= 8


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ((b"Content-Encoding: deflate",), call(), 415, "unsupported_content_encoding"),
        ((b"Content-Encoding: foo",), call(), 415, "unsupported_content_encoding"),
        ((b"Content-Encoding: identity, gzip",), call(), 415, "unsupported_content_encoding"),
        ((), b"{", 400, "invalid_json"),
        ((), b"[]", 400, "invalid_json"),
        ((), b"[" * 100_000, 400, "invalid_json"),
        ((), b'{"a":' * 100_000, 400, "body_too_complex"),
        ((), b'{"model": ' + b"9" * 5000 + b"}", 400, "model_missing"),
        ((), b'{"messages": []}', 400, "model_missing"),
        ((), b'{"model": "' + b"x" * 513 + b'"}', 400, "model_missing"),
        ((), b'{"model": "no-such"}', 404, "model_not_found"),
        ((), b'{"model":"llama",' + b'"a":1,' * (4 * MIB) + b'"b":2}', 400, "body_too_complex"),
        ((), b'{"model": "\\ud800"}', 400, "invalid_json"),
        ((), b'{"model": "llama", "prompt": "\\ud83d"}', 400, "invalid_json"),
        ((), b'{"model": "a\\nb"}', 400, "model_missing"),
        ((), call().decode().encode("utf-16"), 400, "invalid_json"),
        ((), b'{"a":"' + b" " * 100_000 + b'","model":' + b'"x' * 5000 + b'"}', 400, "invalid_json"),
        ((), b"", 400, "invalid_json"),
        ((b"Content-Encoding: gzip",), b"", 400, "invalid_json"),
    ],
)
def test_an_odd_body_gets_one_clear_error(
    stack: Stack, engine: RawEngine, headers: tuple[bytes, ...], body: bytes, status: int, code: str
) -> None:
    response = stack.post(PATH, body, *headers)
    assert (response.status, response.code) == (status, code)
    assert not engine.heads


@pytest.mark.parametrize("size", [100, 200_000, 8 * MIB])
def test_a_body_of_any_size_reaches_the_engine_as_it_came(stack: Stack, engine: RawEngine, size: int) -> None:
    text = ('\\n\\"{[ü' * (size // 8))[:size].rstrip("\\")
    body = b'{ "messages": [{"content": "' + text.encode() + b'"}], "model":"other", "model" : "llama" } '
    assert stack.post(PATH, body).status == 200
    assert engine.bodies == [body]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_bodies_count_from_their_first_byte(folder: Path) -> None:
    with serving(folder, held_bytes=20 * MIB) as (stack, _):
        with contextlib.ExitStack() as unfinished:
            opened = [unfinished.enter_context(stack.connect()) for _ in range(8)]
            for connection in opened:
                connection.setblocking(False)
            part = request(PATH, b"x" * 8 * MIB)[:-MIB]
            left = dict.fromkeys(opened, part)
            refused, deadline = 0, time.monotonic() + 30
            while any(left.values()) and time.monotonic() < deadline and refused < 6:
                for connection, data in [both for both in left.items() if both[1]]:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        left[connection] = data[connection.send(data[: 2**18]) :]
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        answer = connection.recv(4096)
                        refused += b" 429 " in answer or not answer
                        if b" 429 " in answer:
                            assert b"KYB_HELD_BYTES" in answer
                        left[connection] = b""
            stack.wait(lambda: stack.rejected("body_memory") >= 5, "the bodies that do not fit are refused")
            assert stack.metric("kybernate_router_body_bytes") <= 20 * MIB
            assert stack.memory_bytes() < 200 * MIB
            assert stack.post(PATH, call()).status in (200, 429)
        stack.wait(lambda: stack.metric("kybernate_router_body_bytes") == 0, "what was not finished is forgotten")
        assert stack.post(PATH, call()).status == 200


def test_a_length_above_the_limit_is_refused_at_the_head(stack: Stack) -> None:
    with stack.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 41943040\r\n\r\n"
        connection.sendall(head)
        response = Response(receive(connection))
    assert (response.status, response.code) == (413, "body_too_large")
    assert b"100 Continue" not in response.raw


def test_a_caller_that_expects_100_continue_gets_it(stack: Stack, engine: RawEngine) -> None:
    head, _, body = request(PATH, call(), b"Expect: 100-continue", b"Connection: close").partition(b"\r\n\r\n")
    with stack.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert receive(connection, until=b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert b" 200 OK" in receive(connection)
    assert b"expect" not in engine.heads[0].lower()


# --- time and connections ---------------------------------------------------------------------------------------------


def test_slow_callers_are_timed_out(folder: Path) -> None:
    with serving(folder, head_seconds=1, body_seconds=1, idle_seconds=2) as (stack, _):
        with contextlib.ExitStack() as opened:
            silent, half, slow, kept = (opened.enter_context(stack.connect()) for _ in range(4))
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half")
            slow.sendall(request(PATH, call())[:-10])
            kept.sendall(request(PATH, call()))
            assert b" 200 OK" in receive(kept), "and then it is closed, because it is idle"
            assert Response(receive(half)).code == "request_timeout"
            assert Response(receive(slow)).code == "request_timeout"
            receive(silent)
        assert (stack.rejected("head_timeout"), stack.rejected("body_timeout")) == (2, 1)


def test_connections_are_limited_per_address(folder: Path) -> None:
    with Stack(folder, address_connections=5) as stack, contextlib.ExitStack() as opened:
        kept = [opened.enter_context(stack.connect()) for _ in range(5)]
        for connection in kept:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            receive(connection, until=b"}")
        response = stack.get("/healthz")
        assert (response.status, response.code, response.header("Retry-After")) == (429, "too_many_connections", "1")
        kept[0].close()
        stack.wait(lambda: stack.get("/healthz").status == 200, "a place is free again")
        assert stack.rejected("address_connections") >= 1


def test_requests_are_limited_per_key(folder: Path) -> None:
    folder.mkdir()
    file, keys = key_file(folder, greedy=["infer"], modest=["infer"])
    with RawEngine() as engine, Stack(folder, caller_requests=3, api_keys_file=file) as stack:
        greedy, modest = (b"Authorization: Bearer " + key.encode() for key in keys.values())
        stack.seat("s0", "llama", engine.endpoint, SeatState.ACTIVE, modest)
        assert stack.post(PATH, call(), modest).status == 200
        gate = threading.Event()
        engine.answer = lambda *how: gate.wait() and RawEngine().answer(*how)
        with contextlib.ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(stack.connect()).sendall(request(PATH, call(), greedy))
            stack.wait(lambda: engine.running == 3, "the engine has three requests")
            refused = stack.post(PATH, call(), greedy)
            assert (refused.status, refused.code) == (429, "too_many_requests")
            gate.set()
            assert stack.post(PATH, call(), modest).status == 200


def test_no_header_with_a_known_key_reaches_an_engine(folder: Path) -> None:
    folder.mkdir()
    file, keys = key_file(folder, infer=["infer"], admin=["admin"])
    mine, admin = (key.encode() for key in keys.values())
    with RawEngine() as engine, Stack(folder, api_keys_file=file) as stack:
        both = (b"Authorization: Bearer " + mine, b"X-Api-Key: " + mine)
        stack.seat("s0", "llama", engine.endpoint, SeatState.ACTIVE, *both)
        assert stack.post(PATH, call(), *both).status == 200
        assert stack.post(PATH, call(), b"X-Kyb-Key: " + mine, b"Authorization: Bearer " + mine).status == 200
        assert stack.post(PATH, call(), b"X-Kyb-Key: " + mine, b"X-Other: " + admin, b"X-Fine: 1").status == 200
        theirs = (b"X-Kyb-Key: " + mine, b"Authorization: Bearer of-the-engine")
        own_id = stack.post(PATH, call(), b"X-Kyb-Key: " + mine, b"X-Request-Id: " + mine)
        assert (own_id.status, mine in own_id.raw) == (200, False)
        assert stack.post(PATH, call(), *theirs).status == 200
        assert mine not in engine.raw
        assert admin not in engine.raw
        assert b"X-Fine: 1" in engine.heads[-3]
        assert b"Bearer of-the-engine" in engine.heads[-1]


def test_a_silent_engine_gets_a_second_chance_and_then_a_504(folder: Path) -> None:
    with serving(folder, first_byte_seconds=0.5, silence_seconds=0.5) as (stack, engine):
        engine.answer = lambda connection, *_: bool(connection.recv(1))
        response = stack.post(PATH, call())
        assert (response.status, response.code, len(engine.heads)) == (504, "engine_timeout", 2)

        def pauses(connection: socket.socket, _: bytes, __: bytes) -> bool:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"9\r\ndata: 1\n\n\r\n")
            return bool(connection.recv(1))

        engine.answer = pauses
        response = stack.post(PATH, call(stream=True))
        assert response.status == 200
        assert b'"code": "upstream_failed"' in response.raw
        stack.wait(lambda: engine.running == 0, "the engine is left alone")


# --- places in the engine and in queues -------------------------------------------------------------------------------


class SlottedEngine(RawEngine):
    """Computes a few requests at once, each for the same time, and queues the others in order of arrival."""

    def __init__(self, slots: int, seconds: float) -> None:
        super().__init__()
        self._slots, self._seconds = threading.BoundedSemaphore(slots), seconds
        self.answer = self._compute

    def _compute(self, connection: socket.socket, head: bytes, body: bytes) -> bool:
        with self._slots:
            connection.settimeout(self._seconds)
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    return False  # its caller left
            except TimeoutError:
                connection.settimeout(None)
        return RawEngine().answer(connection, head, body)


def overload(stack: Stack, callers: int, seconds: float) -> list[Response]:
    """Let callers call one after another, without a pause after a rejection; return all answers."""
    answers: list[Response] = []
    until = time.monotonic() + seconds

    def caller() -> None:
        while time.monotonic() < until:
            answers.append(stack.post(PATH, call()))

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("declared", [True, False])
def test_an_overloaded_engine_is_protected(folder: Path, declared: bool) -> None:
    """The rate of useful answers is asserted in ``tests/router/test_overload.py``, in model time."""
    slots = 4
    with SlottedEngine(slots, 0.1) as engine, Stack(folder, queue_seconds=0.2, queue_limit=20) as stack:
        stack.seat("s0", "llama", engine.endpoint, max_requests=slots if declared else 0)
        answers = overload(stack, callers=40, seconds=6)
        counts = Counter(answer.status for answer in answers)
        assert set(counts) <= {200, 429}, counts
        assert counts[200] >= 10
        if declared:
            rejected = [answer for answer in answers if answer.status == 429]
            assert {answer.code for answer in rejected} == {"queue_full"}
            assert all(int(answer.header("Retry-After") or 0) >= 1 for answer in rejected)
            assert engine.most_running <= slots
            assert stack.rejected("queue") == counts[429] > 0
        assert stack.post(PATH, call()).status == 200
        assert stack.metric("kybernate_router_held_requests") == 0


def test_a_higher_priority_is_forwarded_first_and_displaces_a_lower_one(folder: Path) -> None:
    with RawEngine() as engine, Stack(folder, queue_limit=4) as stack, contextlib.ExitStack() as opened:
        stack.seat("s0", "llama", engine.endpoint, max_requests=1)
        gate = threading.Semaphore(0)
        engine.answer = lambda *how: gate.acquire() and RawEngine().answer(*how)
        sent: dict[str, socket.socket] = {}

        def send(name: str, priority: str) -> None:
            sent[name] = opened.enter_context(stack.connect())
            header = b"X-Kyb-Priority: " + priority.encode()
            sent[name].sendall(request(PATH, call(name=name), header, b"Connection: close"))
            waiting = min(4, len(sent) - 1)
            stack.wait(
                lambda: engine.running == 1 and stack.metric("kybernate_router_held_requests") == waiting,
                f"{waiting} calls wait",
            )

        for name, priority in zip("abcdef", ("normal", "low", "normal", "high", "low", "high"), strict=True):
            send(name, priority)
        assert Response(receive(sent["e"])).code == "queue_full", "the last of the lowest made place"
        for _ in range(5):
            gate.release()
        for name in "abcdf":
            assert Response(receive(sent[name])).status == 200, name
        assert [json.loads(body)["name"] for body in engine.bodies] == ["a", "d", "f", "c", "b"]
        assert engine.most_running == 1


def test_random_bytes_break_nothing(stack: Stack, engine: RawEngine) -> None:
    chance = random.Random(14)
    valid = request(PATH, call(), b"X-A: 1", b"Transfer-Encoding: chunked", b"Content-Encoding: identity")
    for _ in range(150):
        data = bytearray(valid)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        response = stack.send(bytes(data) + b"\r\n\r\n", idle_seconds=0.2)
        assert response.status < 500 or response.status == 505, (bytes(data), response.raw)
    assert stack.post(PATH, call()).status == 200
