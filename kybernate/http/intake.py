"""Takes request bodies under limits of bytes and time, and unpacks them."""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kybernate.http.framing import Body, ChunkedBody, HttpError
from kybernate.http.head import Head
from kybernate.http_api import ApiError

SMALL_BYTES = 64 * 1024
"""Bodies up to this are read within a fifth of a millisecond."""
MOST_RATIO = 100
"""Unpacked bytes per byte received, once a body has more than RATIO_FREE_BYTES; JSON of prompts has 3 to 20."""
RATIO_FREE_BYTES = 2**20
UNPACK_BYTES = 256 * 1024
"""Unpacked at a time."""
BODY_BYTES_PER_SECOND = 64 * 1024
"""A body may take ``body_seconds``, and 1 s more for each so many bytes that have arrived."""


class BodyError(Exception):
    """A body that is not forwarded. ``status`` and ``code`` are those of the response."""

    def __init__(self, code: str, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.code, self.status = code, status


class Unpacker:
    """Unpacks a body of one ``Content-Encoding`` piece by piece. Raises BodyError."""

    def __init__(self, encoding: str, most_bytes: int, setting: str = "") -> None:
        self._encoding, self._most, self._setting = encoding, most_bytes, setting
        self._received = self._unpacked = 0
        self._codec: zlib._Decompress | None = None
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._codec = zlib.decompressobj(zlib.MAX_WBITS if encoding == "deflate" else 16 + zlib.MAX_WBITS)
        elif encoding not in ("", "identity"):
            text = f"Content-Encoding {encoding[:40]!r}: send gzip, deflate, or the body as it is"
            raise BodyError("unsupported_content_encoding", text, 415)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what these bytes become, in pieces of at most UNPACK_BYTES."""
        if self._codec is None:
            yield self._count(data, len(data))
            return
        if not self._received and self._encoding == "deflate" and data[0] & 0x0F != 8:
            self._codec = zlib.decompressobj(-zlib.MAX_WBITS)  # some clients send deflate without zlib's header
        self._received += len(data)
        rest = data
        while rest and not self._codec.eof:
            try:
                piece = self._codec.decompress(rest, UNPACK_BYTES)
            except zlib.error as error:
                raise self._damaged() from error
            rest = self._codec.unconsumed_tail
            yield self._count(piece, 0)
        if self._codec.unused_data or (rest and self._codec.eof):
            raise self._damaged()

    def end(self) -> None:
        """Check that the body was complete."""
        if self._codec is not None and not self._codec.eof:
            raise self._damaged()

    def _count(self, piece: bytes, received: int) -> bytes:
        self._received += received
        self._unpacked += len(piece)
        if self._unpacked > self._most:
            raise too_large(self._most, self._setting)
        if self._unpacked > max(RATIO_FREE_BYTES, MOST_RATIO * self._received):
            text = f"the body unpacks to more than {MOST_RATIO} times what was sent; send it without Content-Encoding"
            raise BodyError("body_too_large", text, 413)
        return piece

    def _damaged(self) -> BodyError:
        return BodyError("invalid_body", f"the body is not what its Content-Encoding {self._encoding} says")


def too_large(most_bytes: int, setting: str) -> BodyError:
    """Return the error of a body above the limit; ``setting`` names it, if it can be set."""
    name = f" ({setting})" if setting else ""
    return BodyError("body_too_large", f"the body is larger than {most_bytes} bytes{name}", 413)


@dataclass
class BodyMemory:
    """Bytes of all bodies and long heads in memory, until they are answered; in total and per caller."""

    most_bytes: int
    most_bytes_per_caller: int
    setting: str = ""
    """That limits them, if one does."""
    total: int = 0
    by_caller: Counter[str] = field(default_factory=Counter)
    make_room: Callable[[str, int], None] = lambda *_: None
    """For so many bytes of a caller, where they do not fit."""

    def full(self, caller: str, more: int) -> str | None:
        """Return why ``more`` bytes of this caller do not fit; None if they do."""
        if self.total + more > self.most_bytes:
            self.make_room(caller, more)
        if self.total + more > self.most_bytes:
            limit = f" ({self.setting})" if self.setting else ""
            return f"request bodies take {self.total} of {self.most_bytes} bytes{limit}"
        if self.by_caller[caller] + more > self.most_bytes_per_caller:
            limit = f" (half of {self.setting})" if self.setting else ""
            mine, most = self.by_caller[caller], self.most_bytes_per_caller
            return f"request bodies of this caller take {mine} of {most} bytes{limit}"
        return None

    def take(self, caller: str, size: int) -> None:
        """Count ``size`` bytes."""
        self.total += size
        self.by_caller[caller] += size

    def give_back(self, caller: str, size: int) -> None:
        """Forget ``size`` bytes."""
        self.total -= size
        self.by_caller[caller] -= size
        if self.by_caller[caller] <= 0:
            del self.by_caller[caller]


@dataclass
class Intake:
    """All bodies of a kind. ``rejected`` counts rejections by reason."""

    memory: BodyMemory
    body_seconds: float
    rejected: Callable[[str], None]
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of a large body, which may take 50 ms."""

    def refused(self, error: BodyError, *, closes: bool = False) -> ApiError:
        """Count a body that is refused; return the error that its caller gets."""
        self.rejected(error.code)
        return ApiError(error.status, error.code, str(error), closes=closes)


class RequestBody:
    """One body. It counts against the memory of all bodies until ``close``.

    Raises ApiError: 400, 413, 415, 417 or 429; the connection ends then, and the rest of the body is not read.
    """

    def __init__(
        self,
        intake: Intake,
        head: Head,
        fields: Mapping[str, str],
        caller: str,
        most_bytes: int,
        setting: str = "",
    ) -> None:
        self._intake, self._caller, self._most, self._setting = intake, caller, most_bytes, setting
        self._head = head
        self._walk: Body | None = None
        self._encoding = fields.get("content-encoding", "").strip().lower()
        self._pieces: list[bytes] = []
        self._size = self._received = 0
        self._began = 0.0
        if (head.length or 0) > most_bytes:
            raise intake.refused(too_large(most_bytes, setting), closes=True)
        if self._encoding:
            self._unpacker()
        self._check(head.weight + (head.length or 0))
        self.expected = "expect" in fields and head.version == "1.1" and self._expected(fields["expect"])
        """Whether the caller waits for ``100 Continue``."""
        self.small: bytes | None = None
        """The body, once it is complete, if it is small and was not compressed: others go through ``unpacked``."""
        self._weight = head.weight
        intake.memory.take(caller, self._weight)

    def feed(self, data: bytes) -> int:
        """Take bytes; return where the body ends in them, or -1 if it goes on."""
        if self._walk is None:
            self._walk = ChunkedBody(trailer=True) if self._head.chunked else Body(self._head.length or 0)
        try:
            end = self._walk.walk(data)
        except HttpError as error:
            self._intake.rejected("invalid_http")
            text = f"the body is not valid HTTP/1.1: {error}"
            raise ApiError(400, "invalid_http", text, closes=True) from error
        self._received += len(data) if end < 0 else end
        payload = self._walk.payload(data, end)
        if payload:
            if self._size + len(payload) > self._most:
                raise self._intake.refused(too_large(self._most, self._setting), closes=True)
            self._keep(payload)
        if end >= 0 and self._size <= SMALL_BYTES and not self._encoding:
            self.small = b"".join(self._pieces)
        return end

    def seconds(self) -> float:
        """Return how much time the rest of the body has. Raises ApiError 408 when it has none."""
        now = time.monotonic()
        self._began = self._began or now
        left = self._began + self._intake.body_seconds + self._received / BODY_BYTES_PER_SECOND - now
        if left > 0:
            return left
        self._intake.rejected("body_timeout")
        text = f"the body arrives too slowly: {self._received} bytes in {now - self._began:.0f} s"
        raise ApiError(408, "request_timeout", text, closes=True)

    async def unpacked(self) -> bytes:
        """Return the body without its Content-Encoding: one body in each turn of the loop. Other calls go on."""
        body, before = b"".join(self._pieces), self._size
        if self._encoding and body:
            unpacker = self._unpacker()
            self._pieces = []
            try:
                for piece in unpacker.feed(body):
                    self._keep(piece)
                    await asyncio.sleep(0)
                unpacker.end()
            except BodyError as error:
                raise self._intake.refused(error, closes=True) from error
            self._intake.memory.give_back(self._caller, before)
            self._size -= before
            body = b"".join(self._pieces)
        self._pieces = [body]
        async with self._intake.reading:
            await asyncio.sleep(0)
        return body

    def replaced(self, new: bytes) -> bytes:
        """Count another body in place of the one that was sent; return it."""
        self._intake.memory.give_back(self._caller, self._size)
        self._intake.memory.take(self._caller, len(new))
        self._pieces, self._size = [new], len(new)
        return new

    def close(self) -> None:
        """Forget the body."""
        self._intake.memory.give_back(self._caller, self._size + self._weight)
        self._size = self._weight = 0
        self._pieces, self.small = [], None

    def _keep(self, piece: bytes) -> None:
        self._check(len(piece))
        self._intake.memory.take(self._caller, len(piece))
        self._size += len(piece)
        if self._pieces and len(piece) < SMALL_BYTES:  # many small pieces would take more memory than their bytes
            last = self._pieces[-1]
            if len(last) < SMALL_BYTES:
                self._pieces[-1] = last + piece
                return
        self._pieces.append(piece)

    def _unpacker(self) -> Unpacker:
        try:
            return Unpacker(self._encoding, self._most, self._setting)
        except BodyError as error:
            raise self._intake.refused(error, closes=True) from error

    def _check(self, more: int) -> None:
        reason = self._intake.memory.full(self._caller, more)
        if reason is not None:
            self._intake.rejected("body_memory")
            raise ApiError(429, "queue_full", f"{reason}; try again in 1 s", 1, closes=True)

    def _expected(self, expect: str) -> bool:
        if expect and expect.lower() != "100-continue":
            text = f"Expect: {expect[:40]!r}: only 100-continue is known"
            raise ApiError(417, "expectation_failed", text, closes=True)
        return bool(expect)
