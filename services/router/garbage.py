"""When Python may look for reference cycles among all objects: not while thousands of connections are open.

Such a full collection takes about 15 µs for each open connection, and no caller is answered meanwhile. It finds little:
calls and connections are freed when they end, all but asyncio's transports. So one follows when most have ended, or
when many have; then the system gets back what is free.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

MANY = 1000
"""Open connections from which on there are no full collections; again below half of it."""
MOST_CLOSED = 20_000
"""Connections that end without a full collection: their transports take 1 KB each (``tracemalloc``, also with TLS)."""
SOON_SECONDS = 1.0
_NEVER = 1_000_000_000
_give_back: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)


class FullCollections:
    """Whether there are full collections, by the number of open connections."""

    def __init__(self) -> None:
        self._young, self._middle, self._full = gc.get_threshold()
        self._off = False
        self._closed = 0
        """Connections that ended since the last collection."""

    def opened(self, connections: int) -> None:
        """Note that there are now so many."""
        if not self._off and connections >= MANY:
            self._off = True
            gc.set_threshold(self._young, self._middle, _NEVER)

    def closed(self, connections: int) -> None:
        """Note that there are now so many."""
        if not self._off:
            return
        self._closed += 1
        if connections < MANY / 2:
            self._off = False
            gc.set_threshold(self._young, self._middle, self._full)
        if not self._off or self._closed >= MOST_CLOSED:
            self._closed = 0
            asyncio.get_running_loop().call_later(SOON_SECONDS, _collect)


def _collect() -> None:
    """Free cycles, then give the system what is free between the blocks of the heap: glibc keeps it otherwise."""
    gc.collect()
    _give_back(0)  # 12 ms after 6,000 connections
