"""What routing needs of a request body, and how much memory and work a body may take. Pure.

A large body is never parsed as a whole: ``scan`` finds its ``model`` and ``stream`` and builds nothing else. The engine
gets the body as it came and judges the rest of it.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

BODY_BYTES = "KYB_BODY_BYTES"
"""The setting that limits bodies of calls."""
SMALL_BYTES = 64 * 1024
"""Bodies up to this are parsed whole, which takes at most some milliseconds; larger ones are scanned, with pauses."""
MOST_ELEMENTS = 100_000
"""Objects, arrays, strings and members in a scanned body, which take about 0.1 s of CPU time."""
DEEPEST = 200
"""Objects and arrays in each other, in a scanned body."""
ELEMENTS_PER_STEP = 500
BYTES_PER_STEP = 64 * 1024
"""The scan pauses after so many elements or bytes, so that other calls go on: about 1 ms."""
LONGEST_VALUE = 4096
"""Bytes of the JSON of a name, of a number, of ``model`` and of ``stream``."""
MOST_RATIO = 100
"""Unpacked bytes per byte received, once a body has more than RATIO_FREE_BYTES; JSON of prompts has 3 to 20."""
RATIO_FREE_BYTES = 2**20
UNPACK_BYTES = 256 * 1024
"""Unpacked at a time."""
FIELDS = ("model", "stream")
"""Members of a body that routing needs."""
MOST_PARTS = 100
"""Parts of a form."""
LONGEST_PART_HEAD = 4096

_BLANK = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]++")
_STRUCTURE = re.compile(rb'["{}\[\]]')
_PARAMETER = r"(?:;[ \t]*(?!boundary)[\w-]+=[\w.-]+)*"
_FORM = re.compile(
    rf"""(?ai)[ \t]*multipart/form-data{_PARAMETER};[ \t]*boundary=("?)([\w'()+\-./:=?]{{1,70}})\1{_PARAMETER}[ \t]*"""
)
_PART = re.compile(
    rb'(?i)\r\ncontent-disposition: ?form-data; ?name="([^"\\\x00-\x1f\x7f]*)"'
    rb'(?:; ?filename="(?:[^"\\\x00-\x1f\x7f]|\\(?!"))*")?\r\n(?![ \t])'
)
_PART_NAMES = re.compile(rb'(?i)content-disposition|[; \t]name\*?[ \t]*=|\\"')
"""Two in the head of a part that every parser reads alike."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_DATA_URL = re.compile(rb"data:[^,]{0,200};base64,")
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\\"
"""With the backslash that some encoders of JSON write before a slash."""
_STRING_PART = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class BodyError(Exception):
    """A body that is not forwarded. ``status`` and ``code`` are those of the response."""

    def __init__(self, code: str, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.code, self.status = code, status


# --- what routing needs -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RoutingFields:
    """Top-level members of a JSON object; as in engines, the last one of a name counts. None: absent."""

    model: object = None
    stream: object = None
    text_bytes: int | None = None
    """Of a form: without its files."""
    model_at: tuple[int, int] | None = field(default=None, compare=False)
    """Where the model's name begins and ends in a body that was scanned."""
    media_bytes: int = field(default=0, compare=False)
    """Of a body that was scanned: pictures and sound in base64, which are no text."""


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a form with parts, such as a file to transcribe."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def routing_fields(body: bytes, content_type: str = "") -> Generator[None, None, RoutingFields]:
    """Find the fields in a body, JSON or a form, with pauses; returns them. Raises BodyError."""
    if is_form(content_type):
        return (yield from form_fields(body, content_type))
    if len(body) > SMALL_BYTES:
        return (yield from scan(body))
    return parsed_fields(body)


def parsed_fields(body: bytes) -> RoutingFields:
    """Find the fields in a small body. Raises BodyError."""
    try:
        parsed = json.loads(body.decode())
    except RecursionError as error:
        raise BodyError("invalid_json", "the body is nested too deeply") from error
    except ValueError as error:
        raise BodyError("invalid_json", f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(parsed, dict):
        raise BodyError("invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
    for name in parsed:
        _check_name(name)
    return RoutingFields(parsed.get("model"), parsed.get("stream"))


def _check_name(name: object) -> None:
    """Refuse a name that engines in Go take for another one: their JSON decoder ignores case. Raises BodyError."""
    if isinstance(name, str) and name not in FIELDS and name.casefold() in FIELDS:
        raise BodyError("invalid_body", f"write the member {name!r} of the body as {name.casefold()!r}")


def scan(body: bytes) -> Generator[None, None, RoutingFields]:
    """Find the fields without parsing the rest, with pauses; returns them. Raises BodyError.

    What is between the brackets of other members is skipped, not checked: the engine does that.
    """
    cursor, found = _Cursor(body), RoutingFields()
    cursor.expect(b"{", "the body must be a JSON object")
    more = not cursor.take(b"}")
    while more:
        start = cursor.blank()
        cursor.expect(b'"', "a member of the body has no name")
        yield from cursor.string()
        name = cursor.name(start)
        cursor.expect(b":", "a member of the body has no value")
        start = cursor.blank()
        yield from cursor.skip()
        _check_name(name)
        if name in FIELDS:
            setattr(found, str(name), cursor.value(start))
            found.model_at = (start, cursor.at) if name == "model" else found.model_at
        more = cursor.take(b",")
        if not more:
            cursor.expect(b"}", "the body is not JSON")
    if cursor.blank() != len(body):
        raise cursor.error("the body does not end with its object")
    found.media_bytes = cursor.media_bytes
    return found


def renamed(body: bytes, fields: RoutingFields, model: str) -> bytes:
    """Return the body with another model. Raises BodyError."""
    if fields.model_at is None:  # it was parsed, not scanned
        scanning = scan(body)
        try:
            while True:
                next(scanning)
        except StopIteration as done:
            fields = done.value
    assert fields.model_at is not None
    begin, end = fields.model_at
    name = json.dumps(model).encode() if fields.text_bytes is None else model.encode()
    return body[:begin] + name + body[end:]


def form_fields(body: bytes, content_type: str) -> Generator[None, None, RoutingFields]:
    """Find the parts ``model`` and ``stream`` of a form, with pauses; returns them. Raises BodyError.

    Stricter than engines: what two parsers may read differently is refused, so that the seat runs what was asked for.
    """
    form = _FORM.fullmatch(content_type)
    if form is None:
        raise BodyError("invalid_body", "the form's Content-Type needs one boundary of at most 70 characters")
    delimiter = b"\r\n--" + form[2].encode()
    found: dict[bytes, bytes] = {}
    text_bytes, model_at = 0, None
    at = len(delimiter) - 2
    if not body.startswith(delimiter[2:]):
        raise BodyError("invalid_body", "the form does not begin with its boundary")
    for _ in range(MOST_PARTS):
        if body.startswith(b"--", at):
            stream = found.get(b"stream", b"").strip().lower() in (b"true", b"1", b"on", b"yes")
            model = found[b"model"].decode(errors="replace") if b"model" in found else None
            return RoutingFields(model, stream, text_bytes, model_at)
        begin = body.find(b"\r\n\r\n", at, at + LONGEST_PART_HEAD)
        if begin < 0 or not body.startswith(b"\r\n", at):
            raise BodyError("invalid_body", f"a part of the form has no head of at most {LONGEST_PART_HEAD} bytes")
        head, begin = body[at : begin + 2], begin + 4
        name = _plain_name(head)
        if name is None or body.startswith(delimiter[2:], begin):
            raise BodyError("invalid_body", "a part of the form has no plain name in quotes, or no content")
        end = yield from _find(body, delimiter, begin)
        text_bytes += 0 if b"filename=" in head.lower() else end - begin
        if name in (b"model", b"stream"):
            if name in found:
                raise BodyError("invalid_body", f"the form has two parts {name.decode()}")
            found[name] = body[begin : min(end, begin + LONGEST_VALUE)]
            model_at = (begin, end) if name == b"model" else model_at
        at = end + len(delimiter)
    raise BodyError("body_too_complex", f"the form has more than {MOST_PARTS} parts")


def _plain_name(head: bytes) -> bytes | None:
    """Return the name in the head of a part, which begins and ends with CRLF; None: parsers may read it differently."""
    part = _PART.search(head)
    plain = len(_PART_NAMES.findall(head)) == 2 and not _CONTROL.search(head.replace(b"\r\n", b""))
    return part[1] if part is not None and plain else None


def _find(body: bytes, what: bytes, at: int) -> Generator[None, None, int]:
    while at < len(body):
        found = body.find(what, at, at + 16 * BYTES_PER_STEP)
        if found >= 0:
            return found
        at += 16 * BYTES_PER_STEP - len(what)
        yield
    raise BodyError("invalid_body", "the form does not end with its boundary")


class _Cursor:
    def __init__(self, body: bytes) -> None:
        self._body, self.at, self._elements, self.media_bytes = body, 0, 0, 0

    def error(self, what: str) -> BodyError:
        return BodyError("invalid_json", f"{what} (byte {self.at})")

    def blank(self) -> int:
        """Skip white space, at most BYTES_PER_STEP; return the place after it."""
        found = _BLANK.match(self._body, self.at, self.at + BYTES_PER_STEP)
        assert found is not None  # it matches nothing, too
        self.at = found.end()
        return self.at

    def take(self, byte: bytes) -> bool:
        """Skip white space and this byte, if it follows."""
        if self._body.startswith(byte, self.blank()):
            self.at += 1
            return True
        return False

    def expect(self, byte: bytes, otherwise: str) -> None:
        if not self.take(byte):
            raise self.error(otherwise)

    def name(self, start: int) -> object:
        """Decode the name of a member from ``start`` to here."""
        raw = self._body[start : min(self.at, start + LONGEST_VALUE)]
        return self.value(start) if b"\\" in raw else raw[1:-1].decode(errors="replace")

    def value(self, start: int) -> object:
        """Decode the JSON from ``start`` to here; an empty text if it is too long to be of use."""
        if self.at - start > LONGEST_VALUE:
            return ""
        try:
            return json.loads(self._body[start : self.at].decode())
        except (ValueError, RecursionError) as error:
            raise self.error("the body is not JSON in UTF-8") from error

    def string(self) -> Iterator[None]:
        """Skip the rest of a string, and count it if it is base64."""
        start = self.at
        yield from self._element()
        yield from self._end_of_string()
        if self.at - start > LONGEST_VALUE:
            yield from self._count_media(start)

    def _count_media(self, start: int) -> Iterator[None]:
        prefix, end = _DATA_URL.match(self._body, start), self.at - 1
        for at in range(prefix.end() if prefix else start, end, BYTES_PER_STEP):
            if self._body[at : min(end, at + BYTES_PER_STEP)].translate(None, _BASE64):
                return
            yield
        self.media_bytes += end - start

    def _end_of_string(self) -> Iterator[None]:
        quote = self._body.find(b'"', self.at)
        if self._body.find(b"\\", self.at, quote) < 0 <= quote:
            self.at = quote + 1
            return
        while True:
            found = _STRING_PART.match(self._body, self.at, self.at + BYTES_PER_STEP)
            assert found is not None
            moved, self.at = found.end() > self.at, found.end()
            if self._body.startswith(b'"', self.at):
                self.at += 1
                return
            if not moved:
                raise self.error("the body ends within a string")
            yield

    def skip(self) -> Iterator[None]:
        """Skip one value of any kind."""
        if self.take(b'"'):
            yield from self.string()
        elif self._body.startswith((b"{", b"["), self.at):
            yield from self._nested()
        else:
            found = _SCALAR.match(self._body, self.at, self.at + LONGEST_VALUE)
            if found is None:
                raise self.error("a member of the body has no value")
            self.at = found.end()

    def _nested(self) -> Iterator[None]:
        depth = 0
        while True:
            found = _STRUCTURE.search(self._body, self.at, self.at + BYTES_PER_STEP)
            if found is None:
                self.at += BYTES_PER_STEP
                if self.at >= len(self._body):
                    raise self.error("the body ends within an object or array")
                yield
                continue
            self.at, token = found.end(), found[0]
            if token == b'"':
                yield from self.string()
            elif token in b"{[":
                yield from self._element()
                depth += 1
                if depth > DEEPEST:
                    raise BodyError("body_too_complex", f"the body is nested more than {DEEPEST} deep")
            else:
                depth -= 1
                if depth == 0:
                    return

    def _element(self) -> Iterator[None]:
        self._elements += 1
        if self._elements > MOST_ELEMENTS:
            raise BodyError("body_too_complex", f"the body has more than {MOST_ELEMENTS} objects, arrays and strings")
        if self._elements % ELEMENTS_PER_STEP == 0:
            yield


# --- compressed bodies ------------------------------------------------------------------------------------------------


class Unpacker:
    """Unpacks a body of one ``Content-Encoding`` piece by piece. Raises BodyError."""

    def __init__(self, encoding: str, most_bytes: int, setting: str = BODY_BYTES) -> None:
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


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class BodyMemory:
    """Bytes of all bodies in memory, from the first byte received until the call has ended; in total and per caller."""

    most_bytes: int
    most_bytes_per_caller: int
    total: int = 0
    by_caller: Counter[str] = field(default_factory=Counter)

    def full(self, caller: str, more: int) -> str | None:
        """Return why ``more`` bytes of this caller do not fit; None if they do."""
        if self.total + more > self.most_bytes:
            return f"request bodies take {self.total} of {self.most_bytes} bytes (KYB_HELD_BYTES)"
        if self.by_caller[caller] + more > self.most_bytes_per_caller:
            mine = self.by_caller[caller]
            most = self.most_bytes_per_caller
            return f"request bodies of this caller take {mine} of {most} bytes (half of KYB_HELD_BYTES)"
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
