"""Reads request bodies under limits of bytes and time, and finds what routing needs of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from aiohttp import HttpVersion11, web

from services.router.api import CallerGoneError, RouterError
from services.router.auth import caller_of
from services.router.core.body import BodyError, BodyMemory, RoutingFields, Unpacker, routing_fields, too_large

BODY_BYTES_PER_SECOND = 64 * 1024
"""A body may take KYB_BODY_SECONDS, and 1 s more for each so many bytes that have arrived."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Intake:
    """All bodies of a router. ``rejected`` counts rejections by reason."""

    memory: BodyMemory
    body_seconds: float
    rejected: Callable[[str], None]

    def body(self, request: web.Request, most_bytes: int) -> "RequestBody":
        """Return the body of a request, to be used with ``with`` and read."""
        return RequestBody(self, request, most_bytes)


class RequestBody:
    """One body. It counts against the memory of all bodies until the ``with`` block ends."""

    def __init__(self, intake: Intake, request: web.Request, most_bytes: int) -> None:
        self._intake, self._request, self._most = intake, request, most_bytes
        self._caller = caller_of(request) or f"address {request.remote}"
        self._pieces: list[bytes] = []
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.memory.give_back(self._caller, self._size)

    async def read(self) -> bytes:
        """Return the whole body, unpacked. Raises RouterError 400, 408, 413, 415 or 429, and CallerGoneError."""
        try:
            return await self._read()
        except BodyError as error:
            self._intake.rejected(error.code)
            raise _closing(RouterError(error.status, error.code, str(error))) from error
        except web.RequestPayloadError as error:
            text = "the body does not match its headers (Content-Length, Transfer-Encoding)"
            raise RouterError(400, "invalid_body", text) from error
        except ConnectionResetError as error:
            raise CallerGoneError from error

    async def fields(self, body: bytes) -> RoutingFields:
        """Return what routing needs of a JSON body; other calls go on meanwhile. Raises RouterError 400."""
        scan = routing_fields(body)
        try:
            while True:
                next(scan)
                await asyncio.sleep(0)
        except StopIteration as done:
            fields: RoutingFields = done.value
            return fields
        except BodyError as error:
            self._intake.rejected(error.code)
            raise RouterError(error.status, error.code, str(error)) from error

    async def _read(self) -> bytes:
        request, content = self._request, self._request.content
        length = request.content_length or 0
        if length > self._most:
            raise too_large(self._most)
        unpacker = Unpacker(request.headers.get("Content-Encoding", "").strip().lower(), self._most)
        self._check(length)
        await self._expected()
        loop = asyncio.get_running_loop()
        began, received = loop.time(), 0
        while not content.at_eof():
            if content.is_eof():
                data = content.read_nowait()
            else:
                try:
                    async with asyncio.timeout_at(began + self._intake.body_seconds + received / BODY_BYTES_PER_SECOND):
                        data = await content.readany()
                except TimeoutError:
                    self._intake.rejected("body_timeout")
                    text = f"the body arrives too slowly: {received} bytes in {loop.time() - began:.0f} s"
                    raise _closing(RouterError(408, "request_timeout", f"{text} (KYB_BODY_SECONDS)")) from None
            received += len(data)
            for index, piece in enumerate(unpacker.feed(data) if data else ()):
                if index:
                    await asyncio.sleep(0)
                self._keep(piece)
        unpacker.end()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _keep(self, piece: bytes) -> None:
        self._check(len(piece))
        self._intake.memory.take(self._caller, len(piece))
        self._size += len(piece)
        self._pieces.append(piece)

    def _check(self, more: int) -> None:
        reason = self._intake.memory.full(self._caller, more)
        if reason is not None:
            self._intake.rejected("body_memory")
            raise _closing(RouterError(429, "queue_full", f"{reason}; try again in 1 s", 1))

    async def _expected(self) -> None:
        """Answer ``Expect: 100-continue``: the caller sends the body only now."""
        expect = self._request.headers.get("Expect", "")
        if not expect:
            return
        if expect.lower() != "100-continue":
            raise _closing(
                RouterError(417, "expectation_failed", f"Expect: {expect[:40]!r}: only 100-continue is known")
            )
        if self._request.version == HttpVersion11:
            await self._request.writer.write(CONTINUE)
            self._request.writer.output_size = 0  # no part of the response


async def expect_later(_: web.Request) -> None:
    """Expect handler of routes with a body: RequestBody answers it once the request is admitted."""


def _closing(error: RouterError) -> RouterError:
    """Close the connection with this response: the rest of the body is not read."""
    error.closes = True
    return error
