"""Heads and bodies mean the same however they are split, and what two servers could read differently is refused."""

import random

import httptools
import pytest

from services.router.core.framing import LAST_CHUNK, Body, ChunkedBody, HttpError, chunk
from services.router.core.head import Head, HeadParser

HEAD = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nX-A: 1 \r\nx-a: 2\r\nContent-Length: 5\r\n\r\n"


def parsed(data: bytes, *, request: bool = True, piece: int = 2**20) -> tuple[Head, bytes] | None:
    """Feed the data in pieces; return the head and the bytes after it."""
    parser = HeadParser(request=request)
    for at in range(0, len(data), piece):
        found = parser.feed(data[at : at + piece])
        if found is not None:
            return found[0], found[1] + data[at + piece :]
    return None


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 2**20])
def test_a_head_is_the_same_however_it_is_split(piece: int) -> None:
    found = parsed(b"\r\n" + HEAD + b"hello", piece=piece)
    assert found is not None
    head, rest = found
    assert (head.method, head.target, head.version, head.length) == (b"POST", b"/v1/completions?a=b", "1.1", 5)
    assert (rest, head.keep_alive, head.chunked) == (b"hello", True, False)
    assert head.fields() == {"host": "x", "x-a": "1", "content-length": "5"}
    assert head.passed(frozenset({b"host", b"content-length"})) == [b"X-A: 1\r\n", b"x-a: 2\r\n"]


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
        b"X-A : 1",
        b" folded",
        b"X-A: a\x00b",
        b"X-A: a\rb",
        b"X-A: a\nb",
        b": 1",
        b"Colonless",
    ],
)
def test_a_head_that_could_be_read_differently_is_refused(line: bytes) -> None:
    data = HEAD[:-2] + line + b"\r\n\r\n"
    for piece in (1, 2**20):
        with pytest.raises(HttpError):
            parsed(data, piece=piece)


def test_headers_of_a_connection_are_those_that_it_lists() -> None:
    found = parsed(b"GET / HTTP/1.1\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nX-Kyb-Seat: s\r\nX-Other: 1\r\n\r\n")
    assert found is not None
    assert not found[0].keep_alive
    assert found[0].passed(frozenset({b"connection"})) == [b"X-Other: 1\r\n"]


def test_a_head_without_end_is_too_large() -> None:
    parser = HeadParser(request=True)
    parser.feed(b"GET / HTTP/1.1\r\n" + (b"X-A: " + b"x" * 1000 + b"\r\n") * 60)
    with pytest.raises(HttpError) as refused:
        parser.feed((b"X-A: " + b"x" * 1000 + b"\r\n") * 10)
    assert refused.value.too_large


def walked(data: bytes, cuts: list[int], body: Body) -> tuple[bytes, int]:
    """Walk the data in pieces; return the payload, and where the body ended (-1: it goes on)."""
    payload, begin = b"", 0
    for cut in [*cuts, len(data)]:
        piece = data[begin:cut]
        end = body.walk(piece)
        payload += body.payload(piece, end)
        if end >= 0:
            return payload, begin + end
        begin = cut
    return payload, -1


class Oracle:
    """llhttp on the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.payload, self.complete, self.valid = b"", False, True
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
        except httptools.HttpParserError:
            self.valid = False

    def on_body(self, data: bytes) -> None:
        self.payload += data

    def on_message_complete(self) -> None:
        self.complete = True


def test_chunks_are_found_however_they_are_split() -> None:
    chance = random.Random(32)
    for _ in range(300):
        pieces = [chance.randbytes(chance.choice([1, 2, 5, 17, 300])) for _ in range(chance.randint(0, 5))]
        data = b"".join(chunk(piece) for piece in pieces) + LAST_CHUNK
        rest = data + b"POST / HTTP/1.1\r\n\r\n"
        cuts = sorted(chance.randrange(len(rest)) for _ in range(chance.randint(0, 12)))
        assert walked(rest, cuts, ChunkedBody()) == (b"".join(pieces), len(data))


def test_damaged_chunks_are_read_as_llhttp_reads_them_or_refused() -> None:
    chance = random.Random(33)
    valid = chunk(b"hello") + chunk(b"x" * 20) + LAST_CHUNK
    accepted = 0
    for _ in range(3000):
        data = bytearray(valid)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.choice(b"\r\n0123456789abcfx;+-_ \t\x00helo")
        oracle = Oracle(bytes(data))
        try:
            payload, end = walked(bytes(data), [chance.randrange(len(data))], ChunkedBody())
        except HttpError:
            continue
        if end >= 0:
            accepted += 1
            assert oracle.complete, data
            assert oracle.payload.startswith(payload), data
    assert accepted > 100, "some changes are harmless"


@pytest.mark.parametrize("size", [b"+5", b"0x5", b"5 5", b"", b"5_0", b"-5", b"f" * 16, b"5;\x01"])
def test_an_odd_size_is_refused(size: bytes) -> None:
    with pytest.raises(HttpError):
        ChunkedBody().walk(size + b"\r\nhello\r\n0\r\n\r\n")


def test_a_trailer_is_skipped_in_requests_and_refused_in_answers() -> None:
    data = chunk(b"hello") + b"0\r\nX-Kyb-Seat: s\r\n\r\n"
    assert walked(data, [], ChunkedBody(trailer=True)) == (b"hello", len(data))
    with pytest.raises(HttpError):
        ChunkedBody().walk(data)
    with pytest.raises(HttpError):
        ChunkedBody(trailer=True).walk(chunk(b"x") + b"0\r\n" + b"X-A: 1\r\n" * 2000)


def test_a_chunk_can_begin_only_between_chunks() -> None:
    body = ChunkedBody()
    seen = []
    for byte in chunk(b"ab"):
        body.walk(bytes([byte]))
        seen.append(body.boundary)
    assert seen == [False] * 6 + [True]


def test_a_body_of_known_length_ends_there() -> None:
    assert walked(b"helloPOST", [2], Body(5)) == (b"hello", 5)
    assert walked(b"hel", [], Body(5)) == (b"hel", -1)
    assert walked(b"POST", [], Body(0)) == (b"", 0)


def test_a_head_with_too_many_fields_is_too_large() -> None:
    parser = HeadParser(request=True)
    assert HeadParser(request=True).feed(b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 128 + b"\r\n") is not None
    with pytest.raises(HttpError) as refused:
        parser.feed(b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 129 + b"\r\n")
    assert refused.value.too_large
