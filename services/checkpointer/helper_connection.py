"""The connection to a helper: lines that are awaited together wake who waits once, and each has its own deadline."""

import asyncio
from collections.abc import Sequence


class HelperConnection(asyncio.Protocol):
    """Has one reader at a time. A helper that sends more than it is asked for is disconnected."""

    transport: asyncio.Transport
    _awaited: asyncio.Future[None] | None = None
    _deadline: asyncio.Timeout

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that are kept, of a line or of what is not awaited."""
        self._limit = limit
        self._unread = b""
        self._lines: list[bytes] = []
        self._seconds: Sequence[float] = ()

    async def read(self, seconds: Sequence[float], lines: list[bytes]) -> None:
        """Add the next lines to ``lines``, which is empty; ``seconds`` (wall) for each, from the one before it.

        Raises TimeoutError for the first that is late, and EOFError if the connection ends: what the helper did.
        """
        self._lines, self._seconds = lines, seconds
        self._awaited = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(seconds[0]) as self._deadline:
            self._take()
            if self.transport.is_closing():
                self._fail("ended")
            await self._awaited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        self._unread += data
        self._take()
        if len(self._unread) > self._limit:
            self._fail(f"sent more than {self._limit} bytes")
            self.transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """Called by the transport."""
        self._fail("ended")

    def _take(self) -> None:
        """Take what has come of the awaited lines."""
        while (awaited := self._awaited) is not None and not awaited.done() and b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            self._lines.append(line)
            if len(self._lines) < len(self._seconds):
                now = asyncio.get_running_loop().time()
                self._deadline.reschedule(now + self._seconds[len(self._lines)])
            else:
                awaited.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(EOFError(reason))
