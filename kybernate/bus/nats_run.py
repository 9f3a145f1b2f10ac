"""What one consumer of a bucket delivers: the snapshot, then changes, checked for gaps, silence and missing keys."""

import asyncio
from collections.abc import Iterable

from nats.aio.msg import Msg

from kybernate.bus.port import Entry

SILENCE_SECONDS = 5.0
"""A run without a message or heartbeat for so long is over."""
SHOWN = 3
"""So many of the keys that did not come are named."""


class RunOverError(Exception):
    """This run cannot be trusted any more; the next one reads everything again."""


class IncompleteError(RunOverError):
    """The server has no more to send, and keys that the stream had before are not among what came."""


class Run:
    """What one consumer delivers, checked for gaps and silence."""

    def __init__(self, root: str, prefix: str) -> None:
        self._root, self._prefix = root, prefix
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._sequence = 0
        self._missing: set[str] = set()
        """Subjects that the stream had before the run, and that have not come yet."""
        self._pending = 0
        self.complete = False
        """Everything that was there at the start has been delivered."""

    async def receive(self, msg: Msg) -> None:
        """Take what the consumer delivers."""
        self._arrived.put_nowait(msg)

    def stop(self) -> None:
        """End the run: whoever reads it gets an error."""
        self._arrived.put_nowait(None)

    def expect(self, subjects: Iterable[str], pending: int) -> None:
        """What the snapshot has: at least these subjects, and so many entries by the server's count."""
        self._missing = set(subjects)
        self._pending = pending
        self.complete = not self._missing and pending == 0

    async def next(self) -> Entry | None:
        """The next entry (deleted ones without a value), or None once when the snapshot turns out to be complete.

        Raises RunOverError, IncompleteError.
        """
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    msg = await self._arrived.get()
            except TimeoutError:
                raise RunOverError(f"nothing heard for {SILENCE_SECONDS:g} s") from None
            if msg is None:
                raise RunOverError("connection lost, or a difference was found")
            headers = msg.headers or {}
            if "Status" in headers and not msg.reply.startswith("$JS.ACK"):
                if self._idle(headers):
                    return None
                continue
            entry = self._read(msg)
            if entry is not None:
                return entry
            if self.complete:
                return None

    def _idle(self, headers: dict[str, str]) -> bool:
        """Take a heartbeat, which the server sends when it has nothing to send; whether it completes the snapshot."""
        if headers["Status"] != "100":
            raise RunOverError(f"consumer: {headers['Status']} {headers.get('Description', '')}")
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) > self._sequence:
            raise RunOverError(f"message {self._sequence + 1} of the consumer never came")
        if self.complete:
            return False
        if self._missing:
            some = ", ".join(sorted(subject.removeprefix(self._root) for subject in self._missing)[:SHOWN])
            raise IncompleteError(f"{len(self._missing)} keys of the stream did not come, among them {some}")
        self.complete = True
        return True

    def _read(self, msg: Msg) -> Entry | None:
        """The entry in this message; None when its key is not asked for."""
        meta = msg.metadata
        if meta.sequence.consumer != self._sequence + 1:
            raise RunOverError(f"message {self._sequence + 1} of the consumer never came")
        self._sequence = meta.sequence.consumer
        self._missing.discard(msg.subject)
        if not self._missing and (meta.num_pending == 0 or self._sequence >= self._pending):
            self.complete = True
        key = msg.subject[len(self._root) :]
        if not key.startswith(self._prefix):
            return None
        headers = msg.headers or {}
        gone = headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        return Entry(key, None if gone else msg.data, meta.sequence.stream)
