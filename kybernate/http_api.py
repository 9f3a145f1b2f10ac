"""HTTP APIs of the services: errors in OpenAI's shape, JSON bodies, names, and the id of a request."""

import asyncio
import json
import math
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.envelope import LONGEST_NAME
from kybernate.logs import get_logger
from kybernate.sizes import format_bytes

MOST_BYTES = 8 * 2**20
"""Of an engine's answer: an engine is not trusted with this process's memory."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TYPES = dict.fromkeys((*range(400, 500), 505), "invalid_request_error")
_TYPES |= {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


def unanswered(error: Exception) -> str:
    """Return why an HTTP call has no answer: ``Connection refused``, ``HTTP 500``, ``nothing in time``."""
    if isinstance(error, TimeoutError):
        return "nothing in time"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused: {getattr(error.certificate_error, 'verify_message', '')}"
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__  # a resolver's are below 0


async def content_of(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an engine's answer. Raises aiohttp.ClientError, also where it is longer than MOST_BYTES."""
    try:
        await answer.content.readexactly(MOST_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise aiohttp.ClientError(f"its answer is longer than {format_bytes(MOST_BYTES)}")


class ApiError(Exception):
    """A response with an error status. ``retry_after`` in seconds; ``closes``: the connection ends with it."""

    def __init__(
        self, status: int, code: str, message: str, retry_after: int | None = None, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.closes = closes

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "code"}}``."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return the HTTP response, with Retry-After if the caller should try again."""
        return web.json_response(self.body(), status=self.status, headers={**self._headers(), **(headers or {})})

    def raw(self, *, close: bool = True, headers: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of the HTTP response; ``close``: the connection ends with it."""
        body = json.dumps(self.body()).encode()
        kind = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body))}
        return raw(self.status, kind | self._headers() | {**(headers or {})}, body, close=close)

    def _headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def sse(self) -> bytes:
        """Return the error as an event for a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in OpenAI's shape, also those that aiohttp raises."""
    try:
        if not {".", ".."}.isdisjoint(request.path.split("/")):
            raise web.HTTPNotFound  # a server before an engine may resolve dots, and /v1/../admin leads out of /v1
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = "not_found" if error.status == 404 else "http_error"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return ApiError(error.status, code, f"{request.method} {request.path}: {error.reason}").response(allow)
    except Exception as error:
        if request.writer.output_size > 0:
            raise  # half a response is sent: only the broken connection shows the failure
        get_logger().error("request.failed", method=request.method, path=request.path, exc_info=error)
        return ApiError(500, "internal_error", "this service failed at this request; see its log").response()


def raw(status: int, headers: Mapping[str, str], body: bytes = b"", *, close: bool) -> bytes:
    """Return the bytes of an HTTP response; ``close``: the connection ends with it."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, *(["Connection: close"] if close else []), "", ""]).encode() + body


def document(file: Path) -> web.RouteDef:
    """Return the route of a service's OpenAPI document, which needs no key."""
    body = file.read_bytes()

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return web.get("/openapi.json", show)


def printable(text: str) -> bool:
    """Return whether ``text`` can be used on the bus, in logs and as a label; bytes that are not UTF-8 cannot."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def number(query: Mapping[str, str], name: str, default: float) -> float:
    """Return the number that a query parameter holds; ``default`` without one. Raises ApiError 400."""
    text = query.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(400, "invalid_field", f"{name}: {text!r} is not a number; write one, such as 3600")
    return value


def cause_of(headers: Mapping[str, str]) -> str:
    """Return the caller's X-Request-Id if it is printable, else a new id: the cause of all messages that follow."""
    given = headers.get("x-request-id", "")
    return given if given and printable(given) else random_id()


def random_id() -> str:
    """Return 32 hexadecimal digits: unique, no secret, and without a question to the kernel."""
    return f"{random.getrandbits(128):032x}"


async def body_of(request: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request to this service. Raises ApiError 413."""
    body = await request.read()
    if len(body) > most_bytes:
        raise ApiError(413, "body_too_large", f"the body is larger than {most_bytes} bytes")
    return body


def json_of(body: bytes) -> Any:
    """Parse a body. Raises ApiError 400."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error
