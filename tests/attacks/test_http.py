"""What reaches an engine and what reaches a caller: framing, headers, repeated calls, broken answers."""

import json
import socket

import pytest

from tests.attacks.stack import Answer, RawEngine, Stack, call, request

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = call()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\nContent-Length: 0\r\n\r\n"


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


AMBIGUOUS = {
    "both lengths": HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "both lengths, the other order": HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + chunked(BODY),
    "two lengths": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "two equal lengths": HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": HEAD + b"Content-Length: %d, 0\r\n\r\n" % len(BODY) + BODY,
    "a signed length": HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length in hex": HEAD + b"Content-Length: 0x20\r\n\r\n" + BODY,
    "a length with an underscore": HEAD + b"Content-Length: 3_0\r\n\r\n" + BODY,
    "a length in other digits": HEAD + "Content-Length: ٣٠\r\n\r\n".encode() + BODY,
    "a huge length": HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + BODY,
    "an empty length": HEAD + b"Content-Length: \r\n\r\n" + BODY,
    "a space before the colon": HEAD + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY,
    "a tab before the colon": HEAD + b"Transfer-Encoding\t: chunked\r\n\r\n" + chunked(BODY),
    "a folded header": HEAD + b"X-Fold: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded encoding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + chunked(BODY),
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "chunked, then identity": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + chunked(BODY),
    "a vertical tab in the encoding": HEAD + b"Transfer-Encoding: \x0bchunked\r\n" + LENGTH + b"\r\n" + chunked(BODY),
    "a NUL in a header": HEAD + b"X-Nul: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "a bare carriage return": HEAD + b"X-Cr: a\rX-Smuggled: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "a bare line feed": HEAD + b"X-Lf: a\nX-Smuggled: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a name": HEAD + b": 1\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a colon": HEAD + b"Smuggled\r\n" + LENGTH + b"\r\n" + BODY,
    "a chunk size with a sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk size in 0x": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a space": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5 5\r\nhello\r\n0\r\n\r\n",
    "a chunk size that overflows": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk that is longer than its size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    "chunks with bare line feeds": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "a length and HTTP/0.9": b"POST /v1/completions HTTP/0.9\r\nHost: x\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/2.0": b"POST /v1/completions HTTP/2.0\r\nHost: x\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/1.11": b"POST /v1/completions HTTP/1.11\r\nHost: x\r\n" + LENGTH + b"\r\n" + BODY,
    "no version": b"POST /v1/completions\r\nHost: x\r\n" + LENGTH + b"\r\n" + BODY,
    "a path with a space": b"POST /v1/completions HTTP/1.1 HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "CONNECT": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: x\r\n\r\n",
}
"""Requests that servers read differently, or that are none. Each is followed by a request that must not exist."""


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_no_request_is_smuggled_to_an_engine(stack: Stack, engine: RawEngine, name: str) -> None:
    response = stack.send(AMBIGUOUS[name] + SMUGGLED, idle_seconds=1)
    heads = [head.lower() for head in engine.heads]
    assert not [head for head in heads if b"smuggled" in head], name
    assert all(body == BODY for body in engine.bodies), name
    assert len(heads) <= response.raw.count(b" 200 OK"), "an engine computes what no caller asked for"
    if b" 200 OK" not in response.raw:
        assert not heads
    assert stack.post("/v1/completions", BODY).status == 200, "the router goes on"


@pytest.mark.parametrize("name", ["two lengths", "a bare line feed", "a chunk size in 0x", "TLS"])
def test_bytes_that_are_no_request_get_an_error_in_openais_shape(stack: Stack, engine: RawEngine, name: str) -> None:
    before = stack.rejected("invalid_http")
    response = stack.ask(AMBIGUOUS[name])
    assert (response.status, response.code) == (400, "invalid_http")
    assert stack.rejected("invalid_http") == before + 1
    assert response.header("Content-Type") == "application/json; charset=utf-8"
    assert b"Traceback" not in stack.log.read_bytes()
    for line in stack.log.read_text().splitlines():
        json.loads(line)
    assert not engine.heads


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_other_versions_of_http_are_refused_in_http_1(stack: Stack, version: bytes) -> None:
    response = stack.ask(b"GET /healthz " + version + b"\r\nHost: x\r\n\r\n")
    assert (response.status, response.raw[:9]) == (505, b"HTTP/1.1 ")
    assert response.code == "http_version"


def test_a_head_that_is_too_long_is_refused(stack: Stack, engine: RawEngine) -> None:
    response = stack.send(HEAD + b"X-Long: " + b"x" * 100_000 + b"\r\n" + LENGTH + b"\r\n" + BODY, idle_seconds=1)
    assert (response.status, response.code) == (431, "head_too_large")
    assert not engine.heads


def test_pipelined_requests_are_answered_in_order(stack: Stack, engine: RawEngine) -> None:
    bodies = [call(number=number) for number in range(20)]
    data = b"".join(request("/v1/completions", body) for body in bodies[:-1])
    data += request("/v1/completions", bodies[-1], b"Connection: close")
    assert stack.send(data).raw.count(b" 200 OK") == 20
    assert engine.bodies == bodies


def test_a_body_in_chunks_arrives_with_a_length(stack: Stack, engine: RawEngine) -> None:
    data = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY[:5], BODY[5:])
    assert stack.send(data).status == 200
    (head,), (body,) = engine.heads, engine.bodies
    assert body == BODY
    assert b"content-length: %d\r\n" % len(BODY) in head.lower()
    assert b"transfer-encoding" not in head.lower()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/collective_rpc",
        "/v1/..;/sleep",
        "/v1/..\\sleep",
        "/v1/%252e%252e/metrics",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/chat/completions/",
        "/v1/chat//completions",
        "/v1/chat/completions%2f..%2f..%2fsleep",
        "/v1/CHAT/completions",
        "/v1/completions;x=1",
        "/v1/anything",
        "/v1/./x",
        "/v1/x/..%2f..%2fadmin",
        "/admin/sleep",
    ],
)
def test_only_paths_of_inference_calls_reach_an_engine(stack: Stack, engine: RawEngine, path: str) -> None:
    response = stack.post(path, BODY)
    assert (response.status, response.code) == (404, "not_found")
    assert not engine.heads


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses?a=b%20c", "/v1/messages", "/v1/rerank"])
def test_paths_of_inference_calls_reach_it_as_they_came(stack: Stack, engine: RawEngine, path: str) -> None:
    assert stack.post(path, BODY).status == 200
    assert engine.heads[0].startswith(b"POST %s HTTP/1.1\r\n" % path.encode())


def test_headers_of_the_connection_and_of_kybernate_stay_here(stack: Stack, engine: RawEngine) -> None:
    mine = (b"X-Mine: 1", b"Keep-Alive: 5", b"TE: trailers", b"Upgrade: h2c", b"Proxy-Authorization: x")
    ours = (b"X-Kyb-Seat: s9", b"X-Kyb-Cause: forged", b"X-Kyb-Priority: high")
    data = request("/v1/completions", BODY, b"Connection: close, X-Mine", b"X-Other: 1", *mine, *ours)
    response = stack.send(data)
    assert response.status == 200
    head = engine.heads[0].lower()
    assert b"x-other: 1" in head
    for header in (*mine, *ours):
        assert header.partition(b":")[0].lower() + b":" not in head, header
    assert response.header("X-Kyb-Seat") == "s0"


def test_nothing_tells_which_software_answers(stack: Stack, engine: RawEngine) -> None:
    for response in (stack.get("/healthz"), stack.post("/v1/completions", BODY), stack.get("/nothing")):
        assert response.header("Server") is None
        assert b"aiohttp" not in response.raw


def test_an_engine_cannot_set_kybernates_headers(stack: Stack, engine: RawEngine) -> None:
    def forge(connection: socket.socket, _: bytes, __: bytes) -> bool:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nX-Kyb-Overhead-Seconds: 9\r\nX-Kyb-Seat: s9\r\nContent-Length: 2\r\n\r\n{}"
        )
        return True

    engine.answer = forge
    response = stack.post("/v1/completions", BODY)
    assert (response.header("X-Kyb-Overhead-Seconds"), response.header("X-Kyb-Seat")) == (None, "s0")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\nS3cret: 1\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"s3cret garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-S3cret: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: s3cret\r\n\r\n",
        b"HTTP/1.1 999 s3cret\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"",
    ],
)
def test_an_invalid_answer_is_a_503_without_words_of_the_engine(stack: Stack, engine: RawEngine, answer: bytes) -> None:
    def send(connection: socket.socket, _: bytes, __: bytes) -> bool:
        connection.sendall(answer)
        return False

    engine.answer = send
    response = stack.post("/v1/completions", BODY)
    assert (response.status, response.code) == (503, "upstream_failed")
    assert b"s3cret" not in response.raw.lower()
    assert 3 <= len(engine.heads) <= 4, "repeated before the first byte, but not for ever"


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def breaks_off(sent: bytes) -> Answer:
    """An engine that closes the connection after this part of a stream."""

    def answer(connection: socket.socket, _: bytes, __: bytes) -> bool:
        connection.sendall(SSE + chunked(sent, end=b""))
        return False

    return answer


def test_a_stream_that_breaks_off_ends_with_an_error_event(stack: Stack, engine: RawEngine) -> None:
    engine.answer = breaks_off(b"data: 1\n\n")
    response = stack.post("/v1/completions", call(stream=True))
    assert response.status == 200
    assert b"data: 1\n\n" in response.raw
    assert b'"code": "upstream_failed"' in response.raw
    assert len(engine.heads) == 1, "after the first byte it is not repeated"


def test_half_an_event_or_half_a_body_ends_with_a_reset(stack: Stack, engine: RawEngine) -> None:
    engine.answer = breaks_off(b"data: half of an ev")
    response = stack.post("/v1/completions", call(stream=True))
    assert response.status == 200
    assert not response.raw.endswith(b"0\r\n\r\n"), "the caller can see that the answer is incomplete"


def test_a_reader_that_does_not_read_slows_its_engine_down(stack: Stack, engine: RawEngine) -> None:
    sent = [0]

    def floods(connection: socket.socket, _: bytes, __: bytes) -> bool:
        connection.sendall(SSE)
        piece = b"data: " + b"x" * 65_530 + b"\n\n"
        connection.settimeout(0.5)
        try:
            while sent[0] < 2**28:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
                sent[0] += len(piece)
        except TimeoutError:
            return False
        return True

    engine.answer = floods
    before = stack.memory_bytes()
    with stack.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request("/v1/completions", call(stream=True)))
        stack.wait(lambda: engine.heads and engine.running == 0, "the engine cannot send more")
        assert sent[0] < 2**26
        assert stack.memory_bytes() < before + 32 * 2**20
