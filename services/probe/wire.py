"""The HTTP of probes: one HTTP/1.1 request per connection with a bounded response, and gRPC health over HTTP/2."""

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
"""Most bytes of a response that are read; kubelet reads 10 KiB."""
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})


class WireError(Exception):
    """The bytes received are not HTTP."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """An HTTP request of kubelet."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """An HTTP response."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = field(default=())

    def bytes(self) -> bytes:
        """Return the response as bytes; the connection is closed after it."""
        kept = "".join(f"{name}: {value}\r\n" for name, value in self.headers if name.lower() not in _HOP)
        head = f"HTTP/1.1 {self.status} Probe\r\n{kept}Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        return head.encode("latin-1") + self.body


async def read_request(reader: asyncio.StreamReader) -> ProbeRequest:
    """Read one request. Raises WireError, OSError."""
    first, headers = await _head(reader)
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise WireError(f"{first[:80]!r} is not an HTTP/1 request")
    return ProbeRequest(parts[0], parts[1], headers)


async def fetch(
    host: str,
    port: int,
    path: str,
    *,
    method: str = "GET",
    headers: tuple[tuple[str, str], ...] = (),
    tls: "ssl.SSLContext | None" = None,
) -> ProbeResponse:
    """Send one request and read its response, without a timeout. Raises WireError, OSError."""
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
            raise WireError(f"{first[:80]!r} is not an HTTP/1 response")
        body = b"" if method == "HEAD" else await _body(reader, {name.lower(): value for name, value in received})
        return ProbeResponse(int(parts[1]), body, received)


@asynccontextmanager
async def connected(
    host: str, port: int, tls: "ssl.SSLContext | None" = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection; a TLS connection is aborted at the end, since the peer may be frozen. Raises OSError."""
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort() if tls else writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[str, tuple[tuple[str, str], ...]]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise WireError(f"the headers are incomplete or too long: {type(error).__name__}") from None
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
        raise WireError("the response is incomplete")
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
        raise WireError("the response is incomplete") from None
    return found[:BODY_BYTES]


# --- gRPC over HTTP/2 -------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0x0, 0x1, 0x4, 0x6
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_LONGEST = 16384
"""Largest frame without a SETTINGS_MAX_FRAME_SIZE."""
_SERVING = b"\x00" + (2).to_bytes(4, "big") + b"\x08\x01"
"""Length-prefixed HealthCheckResponse{status: SERVING}."""


async def serve_grpc_health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer Health/Check calls on this connection with SERVING until it ends. Raises WireError, OSError.

    grpc.health.v1, gRPC over HTTP/2. Kubelet makes one call per connection, and every call gets the same response, so
    request headers are not decoded. Frames: RFC 9113; header fields without indexing: RFC 7541, 6.2.2.
    """
    try:
        if await reader.readexactly(len(PREFACE)) != PREFACE:
            raise WireError("the bytes are not HTTP/2; a gRPC probe was expected")
        writer.write(_frame(_SETTINGS, 0, 0))
        while True:
            head = await reader.readexactly(9)
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            if length > _LONGEST:
                raise WireError(f"a frame of {length} bytes")
            body = await reader.readexactly(length)
            if kind == _SETTINGS and not flags & _ACK:
                writer.write(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                writer.write(_frame(_PING, _ACK, 0, body))
            elif kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                writer.write(_serving(stream))
            await writer.drain()
    except asyncio.IncompleteReadError:
        return


def _serving(stream: int) -> bytes:
    status = b"\x88"  # :status 200, from the static table
    headers = status + _field(b"content-type", b"application/grpc")
    trailers = _field(b"grpc-status", b"0")
    return (
        _frame(_HEADERS, _END_HEADERS, stream, headers)
        + _frame(_DATA, 0, stream, _SERVING)
        + _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, trailers)
    )


def _field(name: bytes, value: bytes) -> bytes:
    """Return a literal header field without Huffman coding; name and value are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
