"""Heads of HTTP/1.1 messages: parsed by llhttp in its strict mode, and written from the fields that pass on. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import httptools

from services.router.core.framing import HttpError

MOST_HEAD_BYTES = 64 * 1024
"""Of the head of a request or of an answer."""
MOST_FIELDS = 128
"""Header fields of a request or of an answer."""
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade",
})  # fmt: skip
OWN = b"x-kyb-"
"""Headers with this prefix are Kybernate's: they pass in neither direction."""

_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

Pair = tuple[bytes, bytes, bytes]
"""A header field: its name in lower case, its name and its value as they were sent."""


@dataclass(slots=True)
class Head:
    """The head of a request, or of an answer."""

    pairs: list[Pair]
    length: int | None
    """Content-Length; None: it has none."""
    chunked: bool
    keep_alive: bool
    version: str
    """``1.1``, ``1.0``, or another one that its sender speaks."""
    method: bytes = b""
    target: bytes = b""
    """Of the request, without scheme and host."""
    status: int = 0

    def fields(self) -> dict[str, str]:
        """Return the header fields by name in lower case; of fields with the same name, the first."""
        found: dict[str, str] = {}
        for lower, _, value in self.pairs:
            found.setdefault(lower.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
        return found

    def get(self, name: bytes) -> bytes:
        """Return the value of the first field of this name (lower case); empty if there is none."""
        return next((value for lower, _, value in self.pairs if lower == name), b"")

    def passed(self, without: frozenset[bytes]) -> list[bytes]:
        """Return the lines to pass on: all except ``without``, those of this connection, and Kybernate's own."""
        listed = [value.lower() for lower, _, value in self.pairs if lower == b"connection"]
        if any(value not in (b"close", b"keep-alive") for value in listed):
            without = without.union(name.strip() for value in listed for name in value.split(b","))
        return [
            b"%s: %s\r\n" % (name, value)
            for lower, name, value in self.pairs
            if lower not in without and not lower.startswith(OWN)
        ]


class _Collector:
    """What llhttp calls."""

    __slots__ = ("complete", "pairs", "target")

    def __init__(self) -> None:
        self.target = b""
        self.pairs: list[Pair] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.lower(), name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


class HeadParser:
    """Parses one head that arrives in pieces. Raises HttpError as soon as the bytes are no head."""

    __slots__ = ("_collector", "_data", "_parser", "started")

    def __init__(self, *, request: bool) -> None:
        self._collector = _Collector()
        self._parser: httptools.HttpRequestParser | httptools.HttpResponseParser
        if request:
            self._parser = httptools.HttpRequestParser(self._collector)
        else:
            self._parser = httptools.HttpResponseParser(self._collector)
        self._data = b""
        self.started = False
        """True once it got a byte."""

    def feed(self, data: bytes) -> tuple[Head, bytes] | None:
        """Take bytes; return the head and the bytes after it, or None while it is incomplete."""
        if not self.started:
            data = data.lstrip(b"\r\n")
            self.started = bool(data)
        before = len(self._data)
        whole = self._data + data if before else data
        end = whole.find(b"\r\n\r\n", max(0, before - 3)) + 4
        if (end if end > 3 else len(whole)) > MOST_HEAD_BYTES:
            raise HttpError("the head is too long", too_large=True)
        try:
            self._parser.feed_data(whole[before:end] if end > 3 else data)
        except httptools.HttpParserUpgrade:
            pass  # this connection stays HTTP/1.1
        except httptools.HttpParserError as error:
            raise HttpError(str(error)) from error
        if len(self._collector.pairs) > MOST_FIELDS:
            raise HttpError("the head has too many fields", too_large=True)
        if end < 4:
            self._data = whole
            return None
        return self._head(), whole[end:]

    def _head(self) -> Head:
        found, parser = self._collector, self._parser
        length, chunked = _framing(found.pairs)
        version = parser.get_http_version()
        head = Head(found.pairs, length, chunked, _keeps_alive(found.pairs, version), version)
        if head.version in ("1.1", "1.0") and not found.complete:
            raise HttpError("the head has no end")
        if isinstance(parser, httptools.HttpResponseParser):
            head.status = parser.get_status_code()
            return head
        head.method, head.target = parser.get_method(), found.target
        if not found.target.startswith(b"/"):
            head.target = _ABSOLUTE.sub(b"", found.target, count=1)
        return head


def _keeps_alive(pairs: Iterable[Pair], version: str) -> bool:
    """Return whether the connection may be used again."""
    listed = b",".join(value.lower() for lower, _, value in pairs if lower == b"connection")
    options = [option.strip() for option in listed.split(b",")]
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


def _framing(pairs: Iterable[Pair]) -> tuple[int | None, bool]:
    """Return (length, chunked) of a body. Raises HttpError where two readers could differ; llhttp refuses most."""
    lengths = [value for lower, _, value in pairs if lower == b"content-length"]
    codings = [value for lower, _, value in pairs if lower == b"transfer-encoding"]
    if not lengths and not codings:
        return None, False
    if len(lengths) + len(codings) > 1:
        raise HttpError("more than one length")
    if codings:
        if codings[0].lower() != b"chunked":
            raise HttpError("an unknown Transfer-Encoding")
        return None, True
    if not lengths[0].isdigit():
        raise HttpError("an invalid Content-Length")
    return int(lengths[0]), False
