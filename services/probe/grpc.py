"""The one gRPC answer that is ever given here: Health/Check is SERVING (grpc.health.v1, gRPC over HTTP/2).

Kubelet makes one call per connection. Whatever it asks, the answer is the same, so its headers are not decoded.
Frames: RFC 9113; header fields without indexing: RFC 7541, 6.2.2.
"""

import asyncio

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0x0, 0x1, 0x4, 0x6
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_LONGEST = 16384
"""Frames are no longer without a setting that says so."""
_SERVING = b"\x00" + (2).to_bytes(4, "big") + b"\x08\x01"
"""Length-prefixed HealthCheckResponse{status: SERVING}."""


class FrameError(Exception):
    """What came is no HTTP/2."""


async def say_serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer calls on this connection until it ends. Raises FrameError, OSError."""
    try:
        if await reader.readexactly(len(PREFACE)) != PREFACE:
            raise FrameError("this is no HTTP/2; a gRPC probe was expected")
        writer.write(_frame(_SETTINGS, 0, 0))
        while True:
            head = await reader.readexactly(9)
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            if length > _LONGEST:
                raise FrameError(f"a frame of {length} bytes")
            body = await reader.readexactly(length)
            if kind == _SETTINGS and not flags & _ACK:
                writer.write(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                writer.write(_frame(_PING, _ACK, 0, body))
            elif kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                writer.write(_answer(stream))
            await writer.drain()
    except asyncio.IncompleteReadError:
        return


def _answer(stream: int) -> bytes:
    status = b"\x88"  # :status 200, from the static table
    headers = status + _field(b"content-type", b"application/grpc")
    trailers = _field(b"grpc-status", b"0")
    return (
        _frame(_HEADERS, _END_HEADERS, stream, headers)
        + _frame(_DATA, 0, stream, _SERVING)
        + _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, trailers)
    )


def _field(name: bytes, value: bytes) -> bytes:
    """A literal header field, never Huffman, both shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
