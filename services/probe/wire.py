"""As much HTTP as a probe needs: one request per connection, as kubelet makes them, and a bounded answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

HEAD_BYTES = 64 * 1024
BODY_BYTES = 64 * 1024
"""More of an answer is not read: kubelet reads 10 KiB."""
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})


class WireError(Exception):
    """What came is no HTTP."""


@dataclass(frozen=True, slots=True)
class Request:
    """What kubelet asks."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = field(default=())

    def bytes(self) -> bytes:
        """On the wire; the connection ends after it."""
        kept = "".join(f"{name}: {value}\r\n" for name, value in self.headers if name.lower() not in _HOP)
        head = f"HTTP/1.1 {self.status} Probe\r\n{kept}Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        return head.encode("latin-1") + self.body


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises WireError, OSError."""
    first, headers = await _head(reader)
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise WireError(f"{first[:80]!r} is no request")
    return Request(parts[0], parts[1], headers)


async def fetch(
    host: str,
    port: int,
    path: str,
    *,
    method: str = "GET",
    headers: tuple[tuple[str, str], ...] = (),
    tls: "ssl.SSLContext | None" = None,
) -> Answer:
    """One request, without a limit of time. Raises WireError, OSError."""
    named = {name.lower() for name, _ in headers}
    sent = [(name, value) for name, value in headers if name.lower() not in _HOP]
    if "host" not in named:
        sent.insert(0, ("Host", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent)
    async with connected(host, port, tls) as (reader, writer):
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode("latin-1"))
        await writer.drain()
        first, received = await _head(reader)
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise WireError(f"{first[:80]!r} is no answer")
        body = b"" if method == "HEAD" else await _body(reader, {name.lower(): value for name, value in received})
        return Answer(int(parts[1]), body, received)


@asynccontextmanager
async def connected(
    host: str, port: int, tls: "ssl.SSLContext | None" = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed without ceremony: nobody may be there to say goodbye to. Raises OSError."""
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort() if tls else writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[str, tuple[tuple[str, str], ...]]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise WireError(f"the head is cut short or too long: {type(error).__name__}") from None
    first, *rest = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = tuple((name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in rest))
    return first, headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    length = headers.get("content-length", "")
    if length.isdigit():
        wanted = min(int(length), BODY_BYTES)
        with contextlib.suppress(asyncio.IncompleteReadError):
            return await reader.readexactly(wanted)
        raise WireError("the answer is cut short")
    return await reader.read(BODY_BYTES)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    try:
        while len(found) < BODY_BYTES:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            if not size:
                return found
            found += (await reader.readexactly(size + 2))[:-2]
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise WireError("the answer is cut short") from None
    return found[:BODY_BYTES]
