"""The answer to one call: the engine's bytes as they came, or an error in the way that the caller can still notice."""

import json
import re
from dataclasses import dataclass

from kybernate.http.connection import CallerConnection
from kybernate.http.framing import LAST_CHUNK, Body, EndlessBody, chunk
from kybernate.http.head import STATUS_LINES, Head
from services.router.api import RouterError

_STREAM = b"text/event-stream"
_UNBUFFERED = b"X-Accel-Buffering: no\r\n"
"""For nginx, which otherwise sends the events of seconds together."""
_STREAM_LINES = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\n" + _UNBUFFERED
_EVENT_ENDS = b"\n\n", b"\r\n\r\n"
_LAST_EVENTS = b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n"
_WITH_ERROR = re.compile(rb'\s*(?:data:\s*)?\{\s*"error"\s*:(?!\s*null)')
_OTHER_NAME = "404 (kyb.ai/model differs from the name that the engine serves)"
_TAIL_BYTES = max(len(event) for event in _LAST_EVENTS)


@dataclass(slots=True)
class Answer:
    """Writes to the caller's connection, which it frees at the end."""

    _connection: CallerConnection
    _http10: bool
    """The caller speaks HTTP/1.0: it gets no chunks."""
    began: bool = False
    """The status line is sent, and cannot be changed."""
    first_byte: bool = False
    """A byte of the engine's answer is sent: the call cannot be repeated."""
    status: int = 0
    """The engine's."""
    none: str = ""
    """What the engine sent in place of an answer."""
    _unsent: bytes = b""
    """Status line and headers, which are sent with the first piece."""
    _sse: bool = False
    """It is a stream of events."""
    _chunks: bool = False
    """The caller gets chunks."""
    _exact: bool = False
    """The caller knows the length."""
    _framing: Body | None = None
    """Of the engine's answer."""
    _tail: bytes = b""

    @property
    def done(self) -> bool:
        """Whether the stream's last event is sent. Many clients leave then, before the stream ends."""
        return self._tail.endswith(_LAST_EVENTS)

    def comment(self) -> None:
        """Send a comment to a caller that waits for a stream. Commits the status 200."""
        if not self.began:
            self._sse = True
            self._begin(200, _STREAM_LINES, None)
        self._send(b": waiting for the model\n\n")

    def fits(self, head: Head) -> bool:
        """Return whether the pieces of an answer can follow what was sent: after comments, only those of events."""
        return not self.began or _is_stream(head)

    def whole(self, head: Head, lines: bytes, body: bytes) -> None:
        """Send an answer that has arrived completely; if comments have made it a stream, as one event."""
        self.first_byte, self.status, self.none = True, head.status, no_answer(head, body)
        if self.began:
            if event := body if _is_stream(head) else _event(head.status, body):  # an empty chunk would end the answer
                self._send(event)
        else:
            if _is_stream(head):
                lines += _UNBUFFERED
            self._begin(head.status, lines, None if head.status in (204, 304) else len(body), whole=True)
            self._write(body)
        self._end()

    def begin(self, head: Head, framing: Body, lines: bytes) -> None:
        """Begin a streamed answer: pieces follow."""
        self.first_byte, self.status, self.none = True, head.status, no_answer(head)
        self._framing = framing
        if not self.began:
            self._sse = head.media == _STREAM
            endless = framing.chunked or isinstance(framing, EndlessBody)
            if self._sse:
                lines += _UNBUFFERED
            self._begin(head.status, lines, None if endless else head.length)

    def piece(self, raw: bytes, payload: bytes, *, last: bool) -> None:
        """Relay a piece of the answer: byte for byte where both sides use chunks."""
        if not self._tail and (payload or last) and self.status == 200:
            self.none = self.none or _in_place(payload)
        if payload:
            self._tail = (payload if len(payload) >= _TAIL_BYTES else self._tail + payload)[-_TAIL_BYTES:]
        if self._framing is not None and self._framing.chunked and self._chunks:
            self._write(raw)
            self._chunks = not last  # the last piece has the end of the body
        elif payload:
            self._send(payload)
        if last:
            self._end()

    def fail(self, error: RouterError, cause: str) -> None:
        """Report an error: as a response, as an event of the stream, or else by a reset of the connection."""
        if not self.began:
            close = error.closes or self._connection.closes
            self._connection.write(error.raw(close=close, headers={"X-Kyb-Cause": cause, **self._connection.cors}))
            self._connection.finished(close=close)
        elif self._sse and self._at_event:
            self._send(error.sse())
            self._end(close=error.closes)
        else:
            self._connection.reset()  # half an event or half a body is sent

    @property
    def _at_event(self) -> bool:
        """Whether an event can follow what was sent."""
        between = not self._exact and (self._framing is None or self._framing.boundary)
        return between and (not self._tail or self._tail.endswith(_EVENT_ENDS))

    def _begin(self, status: int, lines: bytes, length: int | None, *, whole: bool = False) -> None:
        """Prepare the status line and headers; they are sent with the first piece."""
        self._exact = length is not None
        self._chunks = not (self._exact or whole or self._http10)
        if length is not None:
            lines += b"Content-Length: %d\r\n" % length
        elif self._chunks:
            lines += b"Transfer-Encoding: chunked\r\n"
        for field in self._connection.cors.items():
            lines += b"%b: %b\r\n" % (field[0].encode(), field[1].encode())
        if self._connection.closes:
            lines += b"Connection: close\r\n"
        self._unsent = (STATUS_LINES.get(status) or b"HTTP/1.1 %d\r\n" % status) + lines + b"\r\n"
        self.began = True

    def _end(self, *, close: bool = False) -> None:
        """The answer is complete."""
        if self._chunks or self._unsent:
            self._write(LAST_CHUNK if self._chunks else b"")
        self._connection.finished(close=close or self._connection.closes)

    def _send(self, payload: bytes) -> None:
        self._write(chunk(payload) if self._chunks else payload)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            data, self._unsent = self._unsent + data, b""
        self._connection.write(data)


def _is_stream(head: Head) -> bool:
    return head.media == _STREAM and head.get(b"content-encoding").strip().lower() in (b"", b"identity")


def no_answer(head: Head, body: bytes | None = None) -> str:
    """Return what an engine sent in place of an answer; empty: it is one, or an error of status 5xx. ``body``: None of
    one that is not read as a whole."""
    if 300 <= head.status < 400 or head.status in (401, 403, 405, 429):
        return str(head.status)
    if head.status == 404:
        return _OTHER_NAME if body is not None and b"model" in body[:4096].lower() else "404"
    if head.status != 200:
        return ""
    found = "" if body is None else _in_place(body)
    return found or ("text/html" if head.media == b"text/html" else "")


def _in_place(begin: bytes) -> str:
    """Return what the first bytes of an answer with status 200 are in its place."""
    return "a 200 with an error" if _WITH_ERROR.match(begin) else "" if begin else "empty"


def _event(status: int, body: bytes) -> bytes:
    """Return an answer that is no stream as an event: its JSON, or an error."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return no_stream(status).sse()
    if status >= 400:
        found = found if isinstance(found.get("error"), dict) else {"error": found}
        found["error"].setdefault("code", status)
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def no_stream(status: int) -> RouterError:
    """Return the error of an answer that cannot follow comments; the engine's own error keeps its status."""
    text = f"the engine answered {status}, and no stream of events"
    if 400 <= status < 500:
        return RouterError(status, "upstream_refused", text)
    return RouterError(503, "upstream_failed", f"{text}; try again", 1)
