"""Heads of HTTP/1.1 messages: parsed by llhttp in its strict mode, and written from the fields that pass on. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

import httptools

from kybernate.http.framing import HttpError

MOST_REQUEST_HEAD_BYTES = 16 * 1024
MOST_ANSWER_HEAD_BYTES = 64 * 1024
MOST_FIELDS = 128
"""Header fields of a request or of an answer."""
MOST_KNOWN_BYTES = 1024
MOST_KNOWN_FIELDS = 32
"""Of a head that is kept to recognize the next one of its connection: parsed, it takes several times its bytes."""
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade",
})  # fmt: skip
OWN = b"x-kyb-"
"""Headers with this prefix are Kybernate's: they pass in neither direction."""

_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)\r\n", re.IGNORECASE)
MOST_DIGITS = 15
"""Of a length in a head that is recognized."""
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

Pair = tuple[bytes, bytes, bytes]
"""A header field: its name in lower case, its name and its value as they were sent."""


@dataclass(slots=True)
class Head:
    """The head of a request, or of an answer. It is not changed: the next head of its connection may be the same."""

    pairs: list[Pair]
    """All but Content-Length."""
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
    media: bytes = b""
    """Type of the body of an answer, without parameters, in lower case."""
    _fields: Mapping[str, str] | None = None
    _passed: tuple[frozenset[bytes], bytes] | None = None
    """What ``passed`` returned last, and for what."""
    withheld: tuple[object, frozenset[bytes]] | None = None
    """Names of the fields that carry a key, and the keys that were looked for."""
    weight: int = 0
    """Bytes of memory that it takes; 0 for one that is remembered, which its connection pays for."""

    def fields(self) -> Mapping[str, str]:
        """Return the header fields by name in lower case; of fields with the same name, the first."""
        if self._fields is None:
            found: dict[str, str] = {}
            for lower, _, value in self.pairs:
                found.setdefault(lower.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
            self._fields = found
        return self._fields

    def get(self, name: bytes) -> bytes:
        """Return the value of the first field of this name (lower case); empty if there is none."""
        return next((value for lower, _, value in self.pairs if lower == name), b"")

    def passed(self, without: frozenset[bytes]) -> bytes:
        """Return the lines to pass on: all except ``without``, those of this connection, and Kybernate's own."""
        known = self._passed
        if known is None or (known[0] is not without and known[0] != without):
            known = self._passed = without, b"".join(self._lines(without))
        return known[1]

    def _lines(self, without: frozenset[bytes]) -> list[bytes]:
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


@dataclass(slots=True)
class _KnownHead:
    """A head as it was sent, to recognize the next one of its connection: most repeat it but for the length."""

    head: Head
    before: bytes
    """Until the digits of Content-Length; all of it, if it has none."""
    after: bytes
    """From the end of its line on."""

    def again(self, data: bytes) -> tuple[Head, bytes] | None:
        """Return the head that the bytes begin with and the bytes after it; None if it must be parsed."""
        if not data.startswith(self.before):
            return None
        at = len(self.before)
        if self.head.length is None:
            return self.head, data[at:]
        end = data.find(b"\r\n", at, at + MOST_DIGITS + 2)
        digits = data[at:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self.after, end):
            return None
        length = int(digits)
        if length != self.head.length:
            self.head = replace(self.head, length=length)
        return self.head, data[end + len(self.after) :]


class HeadParser:
    """Parses the heads of one connection, which arrive in pieces, one after another.

    Raises HttpError as soon as the bytes are no head; nothing else can be parsed after it.
    """

    __slots__ = ("_collector", "_data", "_known", "_parser", "_request", "started")

    def __init__(self, *, request: bool) -> None:
        self._request = request
        self._known: _KnownHead | None = None
        """The last head, if all but its length must be the same in the next one."""
        self._parser: httptools.HttpRequestParser | httptools.HttpResponseParser | None = None
        self._begin()

    def _begin(self) -> None:
        self._collector, self._parser = _Collector(), None
        self._data = b""
        self.started = False
        """True once it got a byte of a head that is not complete."""

    def feed(self, data: bytes) -> tuple[Head, bytes] | None:
        """Take bytes; return the head and the bytes after it, or None while it is incomplete."""
        if not self.started:
            if self._known is not None and (found := self._known.again(data)) is not None:
                return found
            data = data.lstrip(b"\r\n")
            self.started = bool(data)
        before = len(self._data)
        whole = self._data + data if before else data
        end = whole.find(b"\r\n\r\n", max(0, before - 3)) + 4
        if (end if end > 3 else len(whole)) > (MOST_REQUEST_HEAD_BYTES if self._request else MOST_ANSWER_HEAD_BYTES):
            raise HttpError("the head is too long", too_large=True)
        if self._parser is None:
            make = httptools.HttpRequestParser if self._request else httptools.HttpResponseParser
            self._parser = make(self._collector)
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
        head = self._head(self._parser)
        self._known = _known(head, whole[:end])
        if self._known is None:
            head.weight = 3 * end + 256 * len(head.pairs)  # measured
        self._begin()
        return head, whole[end:]

    @property
    def size(self) -> int:
        """Bytes of the head that is not complete."""
        return len(self._data)

    def forget(self) -> None:
        """Forget the last head: the next one is parsed."""
        self._known = None

    def _head(self, parser: httptools.HttpRequestParser | httptools.HttpResponseParser) -> Head:
        found = self._collector
        length, chunked = _framing(found.pairs)
        version = parser.get_http_version()
        pairs = [pair for pair in found.pairs if pair[0] != b"content-length"]
        head = Head(pairs, length, chunked, _keeps_alive(pairs, version), version)
        if head.version in ("1.1", "1.0") and not found.complete:
            raise HttpError("the head has no end")
        if isinstance(parser, httptools.HttpResponseParser):
            head.status = parser.get_status_code()
            head.media = head.get(b"content-type").partition(b";")[0].strip().lower()
            return head
        hosts = sum(pair[0] == b"host" for pair in pairs)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise HttpError("not one Host")
        if chunked and version == "1.0":
            raise HttpError("chunks in HTTP/1.0")
        head.method, head.target = parser.get_method(), found.target
        if not found.target.startswith(b"/"):
            head.target = _ABSOLUTE.sub(b"", found.target, count=1)
        return head


def _known(head: Head, data: bytes) -> _KnownHead | None:
    """Return what is needed to recognize a head that is sent again; ``data``: its bytes."""
    if len(data) > MOST_KNOWN_BYTES or len(head.pairs) > MOST_KNOWN_FIELDS:
        return None
    if head.length is None:
        return _KnownHead(head, data, b"")
    digits = _LENGTH.search(data)
    return None if digits is None else _KnownHead(head, data[: digits.start(1)], data[digits.end(1) :])


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
