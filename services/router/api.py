"""The router's HTTP messages: requests with JSON bodies, and responses and errors in OpenAI's shape."""

import json
import math
import re
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from kybernate.config_errors import ConfigError
from services.router.core.step import Reject

LONGEST_NAME = 512
"""Characters of a model's name, and of a caller's request id."""
_TYPES = dict.fromkeys((400, 404, 405, 408, 413, 415, 431, 505), "invalid_request_error")
_TYPES |= {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


class RouterError(Exception):
    """A response with an error status. ``retry_after`` in seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.closes = False
        """The connection ends with this response."""

    @classmethod
    def of(cls, reject: Reject) -> "RouterError":
        """Return the error of a rejected call."""
        return cls(reject.status, reject.code, reject.message, reject.retry_after)

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "code"}}``."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return the HTTP response, with Retry-After if the caller should try again."""
        more = dict(headers or {})
        if self.retry_after is not None:
            more["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            more["WWW-Authenticate"] = "Bearer"
        response = web.json_response(self.body(), status=self.status, headers=more)
        if self.closes:
            response.force_close()
        return response

    def raw(self) -> bytes:
        """Return the bytes of the HTTP response, for a connection on which no request was read; it closes then."""
        body = json.dumps(self.body()).encode()
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"Retry-After: {self.retry_after}"] if self.retry_after is not None else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    def sse(self) -> bytes:
        """Return the error as an event for a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


# --- engine paths ----------------------------------------------------------------------------------------------------

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "openai": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/moderations",
        "/v1/audio/speech",
        "/v1/images/generations",
    ),
    "anthropic": ("/v1/messages", "/v1/messages/count_tokens"),
    "rerank": ("/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling"),
}
"""Paths of inference calls by API. Engines have further ones below /v1/ that load adapters or run code."""


def engine_paths(families: str, more: str) -> frozenset[str]:
    """Return the paths that are forwarded. Raises ConfigError."""
    found: set[str] = set()
    for family in filter(None, (name.strip() for name in families.split(","))):
        if family not in FAMILIES:
            raise ConfigError(f"KYB_API_FAMILIES={families!r}: {family!r} is none of {', '.join(FAMILIES)}")
        found.update(FAMILIES[family])
    for path in filter(None, (path.strip() for path in more.split(","))):
        if re.fullmatch(r"/v1(/[\w.~-]*[\w~-])+", path, re.ASCII) is None:
            raise ConfigError(
                f"KYB_ENGINE_PATHS={more!r}: {path!r} is not a plain path below /v1/, such as /v1/tokenize"
            )
        found.add(path)
    return frozenset(found)


# --- requests ---------------------------------------------------------------------------------------------------------


def printable(text: str) -> bool:
    """Return whether ``text`` can be used on the bus, in logs and as a label; bytes that are not UTF-8 cannot."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def number(query: Mapping[str, str], name: str, default: float) -> float:
    """Return the number that a query parameter holds; ``default`` without one. Raises RouterError 400."""
    text = query.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RouterError(400, "invalid_field", f"{name}: {text!r} is not a number; write one, such as 3600")
    return value


def cause_of(request: web.Request) -> str:
    """Return the caller's X-Request-Id if it is printable, else a new id: the cause of all messages that follow."""
    given = request.headers.get("X-Request-Id", "")
    return given if printable(given) else uuid.uuid4().hex


def json_of(body: bytes) -> Any:
    """Parse a body. Raises RouterError 400."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise RouterError(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:
        raise RouterError(400, "invalid_json", f"the body is not JSON: {error}") from error


def model_of(model: object, how: str = 'the body must name its model: {"model": "…"}') -> str:
    """Return the model of a request; ``how`` explains in the error where to name it. Raises RouterError 400."""
    if not isinstance(model, str) or not printable(model):
        raise RouterError(400, "model_missing", f"{how}, in at most {LONGEST_NAME} printable characters")
    return model


PRIORITIES = {"low": -1, "normal": 0, "high": 1}


def priority_of(request: web.Request, most: int) -> int:
    """Return the priority that X-Kyb-Priority asks for, at most ``most``. Raises RouterError 400."""
    name = request.headers.get("X-Kyb-Priority", "normal").strip().lower()
    if name not in PRIORITIES:
        raise RouterError(400, "invalid_priority", f"X-Kyb-Priority: {name[:40]!r}: send low, normal or high")
    return min(PRIORITIES[name], most)


_PATIENCE = (("X-Kyb-Timeout", 1.0), ("X-Stainless-Read-Timeout", 1.0), ("X-Envoy-Expected-Rq-Timeout-Ms", 0.001))
"""Headers with the time after which a caller gives up, and their unit in seconds: ours, OpenAI's clients', Envoy's."""


def patience_of(request: web.Request) -> float | None:
    """Return after how many wall seconds without an answer the caller gives up; None: it does not say."""
    found = []
    for name, unit in _PATIENCE:
        try:
            found.append(float(request.headers[name]) * unit)
        except (KeyError, ValueError):
            continue
    return min((seconds for seconds in found if 0 < seconds < math.inf), default=None)


# --- responses --------------------------------------------------------------------------------------------------------


def is_stream(content_type: str) -> bool:
    """Return whether a response of this type is a stream of server-sent events."""
    return content_type.split(";", 1)[0].strip().lower() == "text/event-stream"


class CallerGoneError(Exception):
    """The caller closed its connection."""


_LAST_EVENT = b"data: [DONE]"


class _Streamed(web.StreamResponse):
    # Send the status line in one packet with the first piece of the body.
    _send_headers_immediately = False


class CallerResponse:
    """The response to one call. Once it has begun, its status line is sent and cannot be changed."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._sse = False
        self._boundary = True
        self.first_byte = False
        """True once a byte of the engine's response was sent."""
        self._done = False

    @property
    def answered(self) -> bool | None:
        """What it means that the caller leaves now (CallEnded.answered). Many clients leave at the last event of a
        stream, before its end."""
        return (self._done or None) if self.first_byte else False

    async def whole(self, status: int, headers: CIMultiDict[str], body: bytes) -> web.StreamResponse:
        """Return a complete response; if a keep-alive comment has made it a stream, send the body as one event."""
        if self._stream is None:
            return web.Response(status=status, headers=headers, body=body)
        await self._write(b"data: " + b" ".join(body.split(b"\n")) + b"\n\n")
        return await self.end()

    async def begin(self, status: int, headers: Any, *, sse: bool) -> None:
        """Send the status line and headers of a streamed response, unless it has begun already."""
        if self._stream is None:
            stream = _Streamed(status=status, headers=headers)
            try:
                await stream.prepare(self._request)
            except ConnectionResetError as error:
                raise CallerGoneError from error
            self._stream, self._sse = stream, sse

    async def keep_alive(self) -> None:
        """Send a comment to a caller that waits for a stream. Commits the status 200."""
        await self.begin(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}, sse=True)
        await self._write(b": waiting for the model\n\n")

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the engine's response."""
        self.first_byte = True
        self._boundary = chunk.endswith((b"\n\n", b"\r\n\r\n"))
        self._done = self._boundary and chunk.rstrip().endswith(_LAST_EVENT)
        await self._write(chunk)

    async def end(self) -> web.StreamResponse:
        """Complete a streamed response."""
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except ConnectionResetError as error:
            raise CallerGoneError from error
        return self._stream

    async def fail(self, error: RouterError, headers: dict[str, str] | None = None) -> web.StreamResponse:
        """Report an error: as an HTTP response, as an event of the stream, or else by aborting the connection."""
        if self._stream is None:
            return error.response(headers)
        if self._sse and self._boundary:
            await self._write(error.sse())
            return await self.end()
        if self._request.transport is not None:
            # Half an event or half a body is sent: only an aborted connection shows that it is incomplete.
            self._request.transport.abort()
        return self._stream

    async def _write(self, data: bytes) -> None:
        assert self._stream is not None
        try:
            await self._stream.write(data)
        except ConnectionResetError as error:
            raise CallerGoneError from error
