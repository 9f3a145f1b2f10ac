"""Callers' connections: how many may be open, and the descriptors for them."""

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable

from kybernate.logs import get_logger
from kybernate.tls import Accepted, AcceptLimits
from services.router.api import RouterError

OTHER_FILES = 400
"""Descriptors that callers leave: of NATS, of the operations port, of files, and of connections that are refused."""

FEW_CONNECTIONS = 256
"""Fewer are a fault."""

MANY = 1000
"""Open connections after whose end the system gets back what they took."""


def most_connections(asked: int) -> tuple[int, str | None]:
    """Raise the limit of open files to what the process may have; return how many callers may connect, and if these are
    few, why. Each may need a second descriptor, to an engine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = asked if hard == resource.RLIM_INFINITY else max(1, (hard - OTHER_FILES) // 2)
    if possible >= asked:
        return asked, None
    taken = f"{possible} {'connection' if possible == 1 else 'connections'} at a time"
    text = f"it takes {taken}: it may open {hard} files; {asked} need {OTHER_FILES + 2 * asked} (ulimit -n)"
    get_logger().warning("connections.limited", most=possible, open_files=hard, meaning=text)
    return possible, text if possible < FEW_CONNECTIONS else None


class ConnectionLimits(AcceptLimits):
    """Counts open connections, in total and per address."""

    def __init__(self, asked: int, most_per_address: int, rejected: Callable[[str], None]) -> None:
        super().__init__(rejected)
        self._most, self.few = most_connections(asked)
        share = most_per_address if self._most >= asked else min(most_per_address, max(1, self._most // 2))
        self._most_per_address, self.open, self._peak = share, 0, 0

    def enter(self, address: str, one: Accepted, /) -> RouterError | None:
        """Count a new connection; return why it is refused, or None."""
        if self.open >= self._most:
            self.rejected("connections")
            return RouterError(503, "too_many_connections", self.few or f"{self.open} connections are open", 1)
        if self._by_address[address] >= self._most_per_address:
            self.rejected("address_connections")
            text = f"{self._by_address[address]} connections of {address} are open, the most that it may have"
            return RouterError(429, "too_many_connections", f"{text}; close some, or reuse them", 1)
        self.open += 1
        self._peak = max(self._peak, self.open)
        return super().enter(address, one)

    def leave(self, address: str, one: Accepted, /) -> None:
        """Forget a connection that was counted."""
        self.open -= 1
        if self._peak >= MANY and self.open < self._peak / 2:
            self._peak = self.open
            asyncio.get_running_loop().call_later(1.0, _give_back)
        super().leave(address, one)


def _give_back() -> None:
    """Free the cycles of asyncio's transports, then what is free in glibc's heap; it keeps that otherwise."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
