"""Takes request bodies under limits of bytes and time."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kybernate.http.framing import Body, ChunkedBody, HttpError
from kybernate.http.head import Head
from kybernate.http_api import ApiError

SMALL_BYTES = 64 * 1024
"""Bodies up to this are read within a fifth of a millisecond."""
BODY_BYTES_PER_SECOND = 64 * 1024
"""A body may take ``body_seconds``, and 1 s more for each so many bytes that have arrived."""


class BodyError(Exception):
    """A body that is not forwarded. ``status`` and ``code`` are those of the response."""

    def __init__(self, code: str, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.code, self.status = code, status


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
        self._pieces: list[bytes] = []
        self._size = self._received = 0
        self._began = 0.0
        if (head.length or 0) > most_bytes:
            raise intake.refused(too_large(most_bytes, setting), closes=True)
        encoding = fields.get("content-encoding", "").strip()
        if encoding.lower() not in ("", "identity") and (head.chunked or head.length):  # gateways ask without the body
            text = f"Content-Encoding {encoding[:40]!r}: send the body uncompressed, without this header"
            raise intake.refused(BodyError("unsupported_content_encoding", text, 415), closes=True)
        self._check(head.weight + (head.length or 0))
        self.expected = "expect" in fields and head.version == "1.1" and self._expected(fields["expect"])
        """Whether the caller waits for ``100 Continue``."""
        self.small: bytes | None = None
        """The body, once it is complete, if it is small: others go through ``large``."""
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
        if end >= 0 and self._size <= SMALL_BYTES:
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

    async def large(self) -> bytes:
        """Return the body: one in each turn of the loop. Other calls go on."""
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
