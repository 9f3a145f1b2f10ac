"""A timer that is moved for each request and each piece of an answer."""

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """A time that may change often, for the price of an assignment. ``ring`` is called when it has passed."""

    __slots__ = ("_at", "_handle", "_loop", "_ring")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._at = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Ring in so many seconds instead; its owner ignores one that it needs no more."""
        self._at = self._loop.time() + seconds
        if self._handle is None or self._handle.when() > self._at:
            self.stop()
            self._handle = self._loop.call_at(self._at, self._check)

    def stop(self) -> None:
        """Drop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def end(self) -> None:
        """Never ring again, and drop the callback: its owner is then freed without a search for reference cycles."""
        self.stop()
        self._ring = _nothing

    def _check(self) -> None:
        self._handle = None
        if self._at <= self._loop.time():
            self._at = math.inf
            self._ring()
        elif self._at < math.inf:
            self._handle = self._loop.call_at(self._at, self._check)


def _nothing() -> None:
    """Ring in vain."""
