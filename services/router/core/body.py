"""What routing needs of a request body. Pure.

Of a JSON body only ``model`` and ``stream`` are decoded. The engine gets the body as it came and judges the rest of it.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kybernate.http.intake import SMALL_BYTES, BodyError

MOST_MEMBERS = 1000
"""Of the object in a JSON body, without those of objects in it."""
LONGEST_VALUE = 4096
"""Bytes of the JSON of a name, of a number, of ``model`` and of ``stream``."""
FIELDS = ("model", "stream")
"""Members of a body that routing needs."""
MOST_PARTS = 100
"""Parts of a form."""
LONGEST_PART_HEAD = 4096

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


# --- what routing needs -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RoutingFields:
    """Top-level members of a JSON object; as in engines, the last one of a name counts. None: absent."""

    model: object = None
    stream: object = None
    text_bytes: int | None = None
    """Of a form: without its files."""
    model_at: tuple[int, int] | None = field(default=None, compare=False)
    """Where the model's name begins and ends in a form."""


def routing_fields(body: bytes, content_type: str = "") -> RoutingFields:
    """Find the fields in a body, JSON or a form. Raises BodyError."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        return form_fields(body, content_type)
    members = _members(body)
    return RoutingFields(_value(members.get("model")), _value(members.get("stream")))


class _Name(str):
    """The name of a member of a large body: it is checked when it is read, before there are millions."""


_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
"""The first half of a surrogate pair without the other one."""
_SMALL = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON body, whose values are checked and not decoded. Raises BodyError."""
    count = 0

    def name(_: type, text: Any) -> _Name:
        nonlocal count
        count += 1
        if count > MOST_MEMBERS:
            raise BodyError("body_too_complex", f"the body has more than {MOST_MEMBERS} members")
        return _Name(text)

    try:
        if len(body) <= SMALL_BYTES:
            found = _SMALL.decode(body)
        else:
            found = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=name)
    except RecursionError as error:
        raise BodyError("body_too_complex", "the body is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError) as error:
        half = _HALF.search(body)
        why = f"{half[0].decode()} alone is half a character: send both halves" if half is not None else error
        raise BodyError("invalid_json", f"the body must be a JSON object in UTF-8: {why}") from error
    for text in found:
        if text not in FIELDS and text.casefold() in FIELDS:  # engines in Go take it for the field: they ignore case
            raise BodyError("invalid_body", f"write the member {text!r} of the body as {text.casefold()!r}")
    return found


def _value(raw: msgspec.Raw | None) -> object:
    """Decode a value; an empty text if it is too long to be of use. Raises BodyError."""
    if raw is None:
        return None
    if len(memoryview(raw)) > LONGEST_VALUE:
        return ""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BodyError("invalid_json", f"the body is not JSON in UTF-8: {error}") from error


def media_bytes(body: bytes) -> int:
    """Return how many bytes of a JSON body are pictures and sound: long strings of base64, which are no text."""
    found = at = 0
    while at < len(body):
        quote = body.rfind(b'"', at, at + LONGEST_VALUE)
        if quote >= 0:
            at = quote + 1
            continue
        end = body.find(b'"', at)
        end = len(body) if end < 0 else end
        prefix = _DATA_URL.match(body, at)
        text = body[prefix.end() if prefix else at : end]
        if text.count(b"\\") == text.count(b"\\/") and not text.translate(None, _BASE64):
            found += end - at
        at = end + 1
    return found


def renamed(body: bytes, fields: RoutingFields, model: str) -> bytes:
    """Return the body with another model; all other values as they came. Raises BodyError."""
    if fields.text_bytes is None:
        return msgspec.json.encode(_members(body) | {"model": model})
    assert fields.model_at is not None  # it is of a form that names a model
    begin, end = fields.model_at
    return body[:begin] + model.encode() + body[end:]


def form_fields(body: bytes, content_type: str) -> RoutingFields:
    """Find the parts ``model`` and ``stream`` of a form. Raises BodyError.

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
        end = body.find(delimiter, begin)
        if end < 0:
            raise BodyError("invalid_body", "the form does not end with its boundary")
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
