"""A timer that is moved for each request and each piece of an answer."""

import asyncio
import math
from collections.abc import Callable
from functools import partial

from kybernate.clock import LAST_LOOK_SECONDS


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
            self._stop()
            self._handle = self._loop.call_at(self._at, self._check)

    def end(self) -> None:
        """Never ring again, and drop the callback: its owner is then freed without a search for reference cycles."""
        self._stop()
        self._ring = lambda: None

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _check(self, *, last: bool = False) -> None:
        self._handle = None
        if self._at > self._loop.time():
            if self._at < math.inf:
                self._handle = self._loop.call_at(self._at, self._check)
        elif last:
            self._at = math.inf
            self._ring()
        else:
            self._handle = self._loop.call_later(LAST_LOOK_SECONDS, partial(self._check, last=True))
