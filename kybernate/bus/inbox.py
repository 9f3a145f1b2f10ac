"""How every bus handles arriving messages: decode, queue, answer."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ValidationError

from kybernate.bus.port import NoAnswerError
from kybernate.envelope import Message, MessageError, Pattern, decode
from kybernate.logs import get_logger

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)

LIMIT = 65_536
"""Messages queued in one subscription; further ones are dropped and counted."""

_END = object()


class Inbox(Generic[T]):
    """The queue of one reader. Iteration ends when the inbox is closed and empty."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._queue: asyncio.Queue[T | object] = asyncio.Queue()
        self._limit = limit
        self._closed = False
        self._room = asyncio.Event()
        """Set when an item was taken or the inbox was closed."""

    def put(self, item: T) -> bool:
        """Add an item; False if the reader is too slow and the item was dropped."""
        if self._closed or self._queue.qsize() >= self._limit:
            return self._closed
        self._queue.put_nowait(item)
        return True

    async def put_when_free(self, item: T) -> None:
        """Add an item, after waiting for the reader while the inbox is full: for a source that can wait."""
        while not self._closed and self._queue.qsize() >= self._limit:
            self._room.clear()
            await self._room.wait()
        self.put(item)

    def close(self) -> None:
        """Accept no more items; wake the reader, and who waits for it."""
        self._closed = True
        self._room.set()
        self._queue.put_nowait(_END)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await self._queue.get()
        self._room.set()
        if item is _END:
            self._queue.put_nowait(_END)
            raise StopAsyncIteration
        return item  # type: ignore[return-value]


class Troubles:
    """Tolerated failures by kind, counted and logged."""

    def __init__(self, *kinds: str) -> None:
        self.counts = dict.fromkeys(kinds, 0)

    def count(self, kind: str, event: str, **data: object) -> None:
        """Count a failure, and log it at 1, 2, 4, 8 …: a flood must not flood the log."""
        self.counts[kind] = number = self.counts[kind] + 1
        if number & (number - 1) == 0:
            get_logger().warning(event, **data, **{kind: number})

    def drop(self, subject: str) -> None:
        """Count a message that was dropped because its reader is too slow."""
        self.count("dropped", "message.dropped", subject=subject, limit=LIMIT)


def merged(patterns: Iterable[Pattern[Message]]) -> list[str]:
    """Return the fewest subjects that cover these patterns: one per family (``evt``, ``sig``, …) and length.

    Two subscriptions of one connection are drained independently, which loses the order between them. One
    subscription per family keeps it; messages that match no pattern are dropped on arrival.
    """
    families: dict[tuple[int, tuple[str, ...]], list[list[str]]] = defaultdict(list)
    for pattern in patterns:
        tokens = pattern.subject.split(".")
        families[len(tokens), tuple(tokens[:3])].append(tokens)
    return [
        ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*rows, strict=True))
        for rows in families.values()
    ]


def read(subject: str, data: bytes, patterns: Iterable[Pattern[Message]]) -> Message | None:
    """Decode a message that matches one of the patterns; None otherwise, or, logged, if it cannot be decoded."""
    wanted = [pattern for pattern in patterns if pattern.matches(subject)]
    if not wanted:
        return None
    try:
        message = decode(subject, data)
    except MessageError as error:
        get_logger().warning("message.unreadable", subject=subject, error=str(error))
        return None
    return message if any(isinstance(message, pattern.kind) for pattern in wanted) else None


async def answer(
    subject: str, data: bytes, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
) -> bytes | None:
    """Return the handler's reply as JSON; None, logged, if the request cannot be decoded or the handler raises."""
    message = read(subject, data, [pattern])
    if message is None:
        return None
    try:
        reply = await handler(message)
    except Exception as error:
        get_logger().error("request.failed", subject=subject, cause=message.cause, error=repr(error), exc_info=error)
        return None
    return reply.model_dump_json(exclude_none=True).encode()


def read_answer(subject: str, data: bytes, reply: type[R]) -> R:
    """Decode the answer to a request. Raises NoAnswerError."""
    try:
        return reply.model_validate_json(data)
    except ValidationError as error:
        raise NoAnswerError(f"{subject}: the answer is no {reply.__name__}: {error}") from error


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Run ``work`` until the context ends; if it ends earlier, the context raises RuntimeError.

    A service that no longer answers must not stay up: the error ends its process, which is started again.
    """
    worker = asyncio.create_task(work, name=name)
    try:
        async with asyncio.timeout(None) as end:

            def end_now(_: object) -> None:
                end.reschedule(0.0)

            worker.add_done_callback(end_now)
            try:
                yield
            finally:
                worker.remove_done_callback(end_now)
                worker.cancel()
                await asyncio.wait([worker])
    except TimeoutError:
        if not end.expired():
            raise
        raise RuntimeError(f"{name} ended") from (None if worker.cancelled() else worker.exception())
