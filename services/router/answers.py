"""Answers in OpenAI's shape, also when the answer has begun already."""

import json
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from services.router.happenings import Reject

_TYPES = dict.fromkeys((400, 404, 405, 413, 415), "invalid_request_error")
_TYPES |= {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success. ``retry_after`` in seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def of(cls, reject: Reject) -> "ApiError":
        """What a refused call is told."""
        return cls(reject.status, reject.code, reject.message, reject.retry_after)

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "code"}}``."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """As an HTTP answer, with Retry-After where the caller should come again."""
        more = dict(headers or {})
        if self.retry_after is not None:
            more["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            more["WWW-Authenticate"] = "Bearer"
        return web.json_response(self.body(), status=self.status, headers=more)

    def sse(self) -> bytes:
        """As an event in a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


def is_stream(content_type: str) -> bool:
    """Whether an answer of this type is a stream of server-sent events."""
    return content_type.split(";", 1)[0].strip().lower() == "text/event-stream"


class CallerGoneError(Exception):
    """The caller closed its connection."""


class _Streamed(web.StreamResponse):
    # The status line travels in one packet with the first piece of the body.
    _send_headers_immediately = False


class Answer:
    """The answer to one call. ``committed`` once its status line is out and nothing can be taken back."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._sse = False
        self._boundary = True
        self.first_byte = False
        """Whether a byte of the engine's own answer went out."""

    @property
    def committed(self) -> bool:
        """Whether the status line is out."""
        return self._stream is not None

    async def whole(self, status: int, headers: CIMultiDict[str], body: bytes) -> web.StreamResponse:
        """The complete answer at once."""
        if self._stream is not None:
            return await self._late(body)
        return web.Response(status=status, headers=headers, body=body)

    async def begin(self, status: int, headers: Any, *, sse: bool) -> None:
        """Send the status line and headers of a streamed answer."""
        if self._stream is None:
            stream = _Streamed(status=status, headers=headers)
            try:
                await stream.prepare(self._request)
            except ConnectionResetError as error:
                raise CallerGoneError from error
            self._stream, self._sse = stream, sse

    async def keep_alive(self) -> None:
        """Tell a waiting stream that it is not forgotten. Commits a 200."""
        await self.begin(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}, sse=True)
        await self._write(b": waiting for the model\n\n")

    async def write(self, chunk: bytes) -> None:
        """Pass a piece through."""
        self.first_byte = True
        self._boundary = chunk.endswith((b"\n\n", b"\r\n\r\n"))
        await self._write(chunk)

    async def end(self) -> web.StreamResponse:
        """The streamed answer is complete."""
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except ConnectionResetError as error:
            raise CallerGoneError from error
        return self._stream

    async def fail(self, error: ApiError, headers: dict[str, str] | None = None) -> web.StreamResponse:
        """Say that it went wrong: as an HTTP answer, as an event of the stream, or else by cutting the connection."""
        if self._stream is None:
            return error.response(headers)
        if self._sse and self._boundary:
            await self._write(error.sse())
            return await self.end()
        if self._request.transport is not None:
            # Half an event or half a body is out: only a broken connection says that it is not complete.
            self._request.transport.abort()
        return self._stream

    async def _late(self, body: bytes) -> web.StreamResponse:
        """An answer that is no stream, after a keep-alive comment made it one."""
        data = b" ".join(body.split(b"\n"))
        await self._write(b"data: " + data + b"\n\n")
        return await self.end()

    async def _write(self, data: bytes) -> None:
        assert self._stream is not None
        try:
            await self._stream.write(data)
        except ConnectionResetError as error:
            raise CallerGoneError from error
