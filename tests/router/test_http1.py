"""Heads and bodies mean the same however they are split, and what two servers could read differently is refused."""

import random

import httptools
import pytest

from kybernate.http.framing import LAST_CHUNK, Body, ChunkedBody, HttpError, chunk
from kybernate.http.head import Head, HeadParser

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
    head, rest = found
    assert (head.method, head.target, head.version, head.length) == (b"POST", b"/v1/completions?a=b", "1.1", 5)
    assert (rest, head.keep_alive, head.chunked) == (b"hello", True, False)
    assert head.fields() == {"host": "x", "x-a": "1"}, "the length is no field"
    assert head.passed(frozenset({b"host"})) == b"X-A: 1\r\nx-a: 2\r\n"
    assert head.passed(frozenset()) == b"Host: x\r\nX-A: 1\r\nx-a: 2\r\n"


def same(data: bytes, parser: HeadParser, fresh: HeadParser) -> bool:
    """Return whether both parsers read the same, or refuse the bytes with the same words."""
    found = []
    for one in (parser, fresh):
        try:
            found.append(one.feed(data))
        except HttpError as error:
            found.append(str(error))
    if isinstance(found[0], tuple) and isinstance(found[1], tuple):
        (head, rest), (expected, left) = found
        read = [(of.pairs, of.length, of.chunked, of.keep_alive, of.version) for of in (head, expected)]
        read += [
            (of.method, of.target, of.status, of.fields(), of.passed(frozenset({b"x-a"}))) for of in (head, expected)
        ]
        return rest == left and read[0] == read[1] and read[2] == read[3]
    return found[0] == found[1]


@pytest.mark.parametrize(
    "length", [b"5", b"0", b"17", b"007", b"", b"-1", b"+5", b"5 ", b" 5", b"5\r\nX: 1", b"9" * 15, b"9" * 25]
)
def test_a_head_after_another_of_the_same_connection_is_read_as_a_first_one(length: bytes) -> None:
    for before in (
        HEAD,
        HEAD.replace(b"Content-Length: 5\r\n", b""),
        HEAD.replace(b"Content-Length: 5", b"content-length:5 "),
    ):
        for after in (
            HEAD,
            HEAD.replace(b"Host: x", b"Host: y"),
            HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
        ):
            parser = HeadParser(request=True)
            assert parser.feed(before + b"hello") is not None
            data = after.replace(b"Content-Length: 5", b"Content-Length: " + length) + b"hello"
            assert same(data, parser, HeadParser(request=True)), data


def test_a_damaged_head_after_another_of_the_same_connection_is_read_as_a_first_one() -> None:
    chance = random.Random(65)
    answer = b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 12\r\nDate: now\r\n\r\n"
    recognized = 0
    for count in range(4000):
        request = count % 2 == 0
        valid = HEAD if request else answer
        parser = HeadParser(request=request)
        assert parser.feed(valid) is not None
        data = bytearray(valid)
        for _ in range(chance.randint(0, 2)):
            at = chance.choice([chance.randrange(len(data)), valid.index(b"-Length: ") + chance.randint(7, 13)])
            data[at : at + chance.randint(0, 1)] = bytes([chance.choice(b"\r\n0123456789abcd;:+-_ \t\x00")])
        recognized += parser._known is not None and parser._known.again(bytes(data)) is not None
        assert same(bytes(data), parser, HeadParser(request=request)), data
    assert recognized > 1000, "many differ in nothing but the length"


@pytest.mark.parametrize(("line", "most"), [(b"X: 1\r\n", 31), (b"X: " + b"x" * 95 + b"\r\n", 9)])
def test_only_a_small_head_is_kept(line: bytes, most: int) -> None:
    for count in (most, most + 1):
        parser = HeadParser(request=True)
        assert parser.feed(b"GET / HTTP/1.1\r\nHost: x\r\n" + line * count + b"\r\n") is not None
        assert (parser._known is not None) is (count == most)


def test_a_head_without_end_is_too_large() -> None:
    parser = HeadParser(request=True)
    parser.feed(b"GET / HTTP/1.1\r\n" + (b"X-A: " + b"x" * 1000 + b"\r\n") * 14)
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
    assert HeadParser(request=True).feed(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 127 + b"\r\n") is not None
    with pytest.raises(HttpError) as refused:
        parser.feed(b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 129 + b"\r\n")
    assert refused.value.too_large
