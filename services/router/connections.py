"""Callers' connections: how many may be open, the descriptors for them, and TLS with little memory for each."""

import asyncio
import resource
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from kybernate.logs import get_logger
from services.router.api import RouterError
from services.router.garbage import FullCollections

OTHER_FILES = 400
"""Descriptors that callers leave: of NATS, of the operations port, of files, and of connections that are refused."""
MOST_HANDSHAKES = 1024
"""TLS connections whose handshake is not complete, 40 KiB each: then the oldest of them ends. A handshake takes
milliseconds."""


def most_connections(asked: int) -> int:
    """Raise the limit of open files to what the process may have; return how many callers may connect: each may need a
    second descriptor, to an engine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = asked if hard == resource.RLIM_INFINITY else max(1, (hard - OTHER_FILES) // 2)
    if possible < asked:
        get_logger().warning(
            "connections.limited", most=possible, open_files=hard, meaning=f"{asked} connections need more files"
        )
    return min(asked, possible)


def address_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of the other side; empty if it has left."""
    return str((transport.get_extra_info("peername") or ("",))[0])


class ConnectionLimits:
    """Counts open connections, in total and per address."""

    def __init__(self, most: int, most_per_address: int, rejected: Callable[[str], None]) -> None:
        self._most, self._most_per_address, self.rejected = most, most_per_address, rejected
        self.shaking: dict[TlsCaller, None] = {}
        """Those in their handshake, the oldest first."""
        self._by_address: Counter[str] = Counter()
        self.open = self.refused = 0
        self._collections = FullCollections()

    def enter(self, address: str) -> RouterError | None:
        """Count a new connection; return why it is refused, or None."""
        if self.open >= self._most:
            self.rejected("connections")
            return RouterError(503, "too_many_connections", f"{self.open} connections are open", 1)
        if self._by_address[address] >= self._most_per_address:
            self.rejected("address_connections")
            text = f"{self._by_address[address]} connections of {address} are open, the most that it may have"
            return RouterError(429, "too_many_connections", f"{text}; close some, or reuse them", 1)
        self.open += 1
        self._collections.opened(self.open)
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Forget a connection that was counted."""
        self.open -= 1
        self._collections.closed(self.open)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _Tls(sslproto.SSLProtocol):
    max_size = 16 * 1024
    """Of the buffer that each connection has: one record. asyncio's own has 256 KiB."""

    def __init__(self, *args: Any, lost: Callable[[], None], **more: Any) -> None:
        super().__init__(*args, **more)
        self._lost = lost

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the caller's side, and count it no more."""
        super().connection_lost(exc)
        self._lost()


class TlsCaller(asyncio.Protocol):
    """A connection to a TLS port. It is counted when it is accepted, and takes no memory for TLS before it sends."""

    def __init__(
        self,
        limits: ConnectionLimits,
        context: ssl.SSLContext,
        seconds: float,
        caller: "Callable[[TlsCaller], asyncio.Protocol]",
    ) -> None:
        self._limits, self._context, self._seconds, self._caller = limits, context, seconds, caller
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or close it."""
        self._transport = cast(asyncio.Transport, transport)
        address = address_of(transport)
        if self._limits.enter(address) is not None:
            self._transport.abort()
            return
        self._address = address
        self._late = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Begin the handshake."""
        transport, address = self._transport, self._address
        if transport is None or address is None or transport.is_closing():
            return
        shaking = self._limits.shaking
        if len(shaking) >= MOST_HANDSHAKES:
            self._limits.rejected("handshakes")
            next(iter(shaking)).abort()
        shaking[self] = None
        loop, caller = asyncio.get_running_loop(), self._caller(self)
        more = {"server_side": True, "ssl_handshake_timeout": self._seconds}
        tls = _Tls(loop, caller, self._context, None, lost=self._end, **more)
        transport.set_protocol(tls)
        tls.connection_made(transport)
        while data:
            buffer = tls.get_buffer(len(data))
            size = min(len(data), len(buffer))
            buffer[:size], data = data[:size], data[size:]
            tls.buffer_updated(size)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that sent nothing."""
        del exc
        self._end()

    def shaken(self) -> None:
        """The handshake is complete."""
        if self._late is not None:
            self._late.cancel()
        self._limits.shaking.pop(self, None)

    def abort(self) -> None:
        """Close the connection at once."""
        self.shaken()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self.shaken()
        if self._address is not None:
            self._limits.leave(self._address)
        self._address = self._transport = None
