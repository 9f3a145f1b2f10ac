"""``GET /v1/events``: what happens to seats and GPUs, as server-sent events, resumable with ``Last-Event-ID``."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from aiohttp import web

from kybernate.bus.port import Bus, BusError
from kybernate.messages import GpuHealthChanged, SeatEvent
from services.router.answers import ApiError

Event = SeatEvent | GpuHealthChanged

REMEMBERED = 1024
"""Events kept in memory for those who come back soon; older ones are read from the stream."""
BACKLOG = 1024
"""Events that may wait for one reader; a slower one is disconnected and comes back with its Last-Event-ID."""
KEEP_ALIVE_SECONDS = 15.0


def as_sse(event: Event) -> bytes:
    """One event on the wire: its id, and its JSON with the CloudEvents type."""
    body = event.body()
    return b"id: %s\ndata: %s\n\n" % (event.id.encode(), b'{"type":"' + event.kind().encode() + b'",' + body[1:])


class EventLog:
    """The last events, and those who read along."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._recent: deque[Event] = deque(maxlen=REMEMBERED)
        self._readers: set[asyncio.Queue[Event | None]] = set()

    def hear(self, event: Event) -> None:
        """A new event."""
        self._recent.append(event)
        for reader in list(self._readers):
            try:
                reader.put_nowait(event)
            except asyncio.QueueFull:
                self._dismiss(reader)

    def stop(self) -> None:
        """The router ends: end every stream."""
        for reader in list(self._readers):
            self._dismiss(reader)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Stream events until the caller leaves. ``Last-Event-ID`` (or ``?after=``) continues after that event."""
        after = request.headers.get("Last-Event-ID") or request.query.get("after")
        reader: asyncio.Queue[Event | None] = asyncio.Queue(BACKLOG)
        self._readers.add(reader)  # before reading the past, so that nothing falls between
        try:
            past = await self._past(after) if after else []
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await response.write(b": events of seats\n\n")
            sent = set()
            for event in past:
                sent.add(event.id)
                await response.write(as_sse(event))
            async for piece in self._live(reader, sent):
                await response.write(piece)
        except ConnectionResetError:
            return web.Response(status=499)
        finally:
            self._readers.discard(reader)
        await response.write_eof()
        return response

    def _dismiss(self, reader: "asyncio.Queue[Event | None]") -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)

    async def _past(self, after: str) -> list[Event]:
        recent = list(self._recent)
        ids = [event.id for event in recent]
        if after in ids:
            return recent[ids.index(after) + 1 :]
        try:
            return [event async for event in self._bus.replay(after_id=after) if isinstance(event, Event)]
        except BusError as error:
            raise ApiError(503, "events_unavailable", f"past events cannot be read: {error}", 2) from error

    async def _live(self, reader: "asyncio.Queue[Event | None]", sent: set[str]) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    event = await reader.get()
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            if event is None:
                return
            if event.id not in sent:
                yield as_sse(event)
