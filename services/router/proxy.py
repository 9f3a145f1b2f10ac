"""One call to one engine: bytes through, nothing interpreted but where an answer ends."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from services.router.answers import Answer, ApiError, is_stream
from services.router.auth import HEADER, withheld
from services.router.dispatch import SeatCutError, Ticket
from services.router.happenings import Forward
from services.router.upstream import Body, Pool, Upstreams

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT = HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect", "x-request-id", HEADER.lower()}
"""The body was read and, if it was compressed, unpacked; its length and encoding are told anew."""
WHOLE_BYTES = 256 * 1024
"""An answer of known length up to this is read before the first byte goes out, so that it can still be repeated."""


class RefusedError(Exception):
    """The engine gave nothing: no connection, or it broke before the first byte of an answer.

    ``stale``: perhaps only the kept connection was, because the engine closes those that idle too long.
    """

    def __init__(self, text: str, *, stale: bool) -> None:
        super().__init__(text)
        self.stale = stale


@dataclass(slots=True)
class Sent:
    """When a call was sent and answered, unix seconds."""

    sent_at: float | None = None
    first_byte_at: float | None = None


def passed(headers: CIMultiDictProxy[str], without: frozenset[str]) -> CIMultiDict[str]:
    """Headers that go through: all but those of this connection."""
    listed = headers.getall("Connection", ())
    drop = without.union(name.strip().lower() for value in listed for name in value.split(","))
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in drop)


async def forward(
    request: web.Request,
    body: bytes,
    to: Forward,
    ticket: Ticket,
    upstreams: Upstreams,
    answer: Answer,
    more: Callable[[Sent], Mapping[str, str]],
    sent: Sent,
) -> web.StreamResponse:
    """Send the call to the engine and its answer to the caller. ``more`` gives headers when the answer begins.

    Raises RefusedError or SeatCutError while the call can still be repeated, and ApiError when its answer broke off.
    """
    headers = passed(request.headers, _NOT_SENT | withheld(request))
    headers["X-Request-Id"] = ticket.cause
    pool = upstreams.take(to.key)
    try:
        with ticket:
            reply = await _send(
                pool, request, URL(to.endpoint + request.rel_url.raw_path_qs, encoded=True), headers, body, sent
            )
            try:
                return await _through(reply, answer, more, sent)
            finally:
                reply.close()  # returns a finished connection to the pool before this, closes an unfinished one
    except (SeatCutError, aiohttp.ClientError, OSError) as error:
        if not answer.first_byte:
            if isinstance(error, SeatCutError):
                raise
            stale = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            stale = stale and not isinstance(error, aiohttp.ClientConnectorError)
            raise RefusedError(repr(error), stale=stale) from error
        raise _broken(to, error) from error
    finally:
        upstreams.give_back(pool)


async def _send(
    pool: Pool, request: web.Request, url: URL, headers: CIMultiDict[str], body: bytes, sent: Sent
) -> aiohttp.ClientResponse:
    payload = Body(body)
    try:
        return await pool.session.request(request.method, url, headers=headers, data=payload, allow_redirects=False)
    finally:
        sent.sent_at = payload.sent_at


async def _through(
    reply: aiohttp.ClientResponse, answer: Answer, more: Callable[[Sent], Mapping[str, str]], sent: Sent
) -> web.StreamResponse:
    headers = passed(reply.headers, HOP_BY_HOP)
    length = reply.content_length
    if length is not None and length <= WHOLE_BYTES:
        whole = await reply.read()
        sent.first_byte_at = time.time()
        headers.update(more(sent))
        headers.popall("Content-Length", None)
        return await answer.whole(reply.status, headers, whole)
    content = reply.content
    chunk = await content.readany()  # headers wait for it: until then the call can be repeated elsewhere
    sent.first_byte_at = time.time()
    headers.update(more(sent))
    await answer.begin(reply.status, headers, sse=is_stream(reply.headers.get("Content-Type", "")))
    write, read = answer.write, content.readany
    while chunk:
        await write(chunk)
        chunk = await read()
    return await answer.end()


def _broken(to: Forward, error: Exception) -> ApiError:
    if isinstance(error, SeatCutError) and error.code == "seat_evicted":
        return ApiError(503, "seat_evicted", f"seat {to.seat} was parked before the answer was complete; try again", 1)
    return ApiError(503, "upstream_failed", f"the engine of seat {to.seat} broke off: {error!r}; try again", 1)
