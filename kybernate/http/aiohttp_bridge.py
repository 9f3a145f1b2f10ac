"""aiohttp as a layer of handlers: it answers complete requests, on connections that are not its own."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kybernate.http.head import Head
from kybernate.http_api import ApiError
from kybernate.logs import get_logger

_REBUILT = frozenset(
    {b"content-length", b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"connection"}
)
"""Headers that aiohttp gets anew, because it gets the whole body, which is not compressed."""


class AiohttpHandler(web.RequestHandler):
    """Answers one request on a connection that is not its own; ``done`` is called after the answer."""

    __slots__ = ("_done", "keeps")

    def __init__(self, *args: Any, done: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done = done
        self.keeps = False
        """Whether the connection can be used after the answer."""

    def begin(self, transport: asyncio.Transport, head: Head, body: bytes) -> None:
        """Take a complete request."""
        lines = [b"%s: %s\r\n" % (name, value) for lower, name, value in head.pairs if lower not in _REBUILT]
        keep = b"keep-alive" if head.keep_alive else b"close"
        lines.append(b"Connection: %b\r\nContent-Length: %d\r\n\r\n" % (keep, len(body)))
        start = b"%b %b HTTP/%b\r\n" % (head.method, head.target, head.version.encode())
        self.connection_made(transport)
        self.data_received(start + b"".join(lines) + body)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of the answer; then the connection is free for the next request."""
        found = await super().finish_response(request, resp, start_time)
        self.keeps = bool(found[0].keep_alive) and not found[1]
        asyncio.get_running_loop().call_soon(self._done)
        return found

    def leave(self) -> None:
        """End without closing the connection."""
        self.transport = None
        self.connection_lost(None)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to a request that aiohttp does not take, or whose handler failed; the connection ends."""
        del message  # aiohttp's, which repeats what the caller sent
        if request.writer.output_size > 0:
            raise ConnectionError("half an answer is sent")
        if status == 500:
            get_logger().error("request.failed", exc_info=exc)
            response = ApiError(500, "internal_error", "this service failed at this request; see its log").response()
        else:
            text = "this is not a valid HTTP/1.1 request: check its target and header fields"
            response = ApiError(400, "invalid_http", text).response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what aiohttp could not handle as one line of this service's log."""
        get_logger().error("connection.failed", what=str(args[0]) if args else "", exc_info=kw.get("exc_info", True))
