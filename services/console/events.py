"""``GET /v1/events``: what happens to seats and GPUs, as server-sent events."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from kybernate.bus.port import Bus
from kybernate.http_api import number
from services.console.follow import EVENTS, Event

RECENT_EVENTS = 1024
"""Events kept in memory for readers that reconnect soon; older ones are read from the bus's stream."""
BACKLOG = 1024
"""Events that may wait for one reader; a slower reader is disconnected and can resume with its Last-Event-ID."""
KEEP_ALIVE_SECONDS = 15.0


def as_sse(event: Event) -> bytes:
    """Return an event as it is sent: its id, and its JSON with the CloudEvents type."""
    body = event.body()
    return b"id: %s\ndata: %s\n\n" % (event.id.encode(), b'{"type":"' + event.kind().encode() + b'",' + body[1:])


class EventLog:
    """Its readers and the last events; resumable with ``Last-Event-ID``."""

    def __init__(self, bus: Bus, reading: Callable[[str, str], AbstractAsyncContextManager[None]]) -> None:
        """``reading``: takes the turn among readers of the past; see ``History.reading``."""
        self._bus, self._reading = bus, reading
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._readers: set[asyncio.Queue[Event | None]] = set()

    def add(self, event: Event) -> None:
        """Send a new event to all readers."""
        self._recent.append(event)
        for reader in list(self._readers):
            try:
                reader.put_nowait(event)
            except asyncio.QueueFull:
                self._disconnect(reader)

    def stop(self) -> None:
        """End every stream, because the console stops."""
        for reader in list(self._readers):
            self._disconnect(reader)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Stream events until the caller leaves. ``Last-Event-ID`` (or ``?after=``) continues after that event;
        ``?since=`` begins with the stored events since then, unix seconds, and is where an id is looked for first."""
        after = request.headers.get("Last-Event-ID") or request.query.get("after")
        since = number(request.query, "since", 0.0)
        reader: asyncio.Queue[Event | None] = asyncio.Queue(BACKLOG)
        self._readers.add(reader)  # before the past is read, so that no event is lost between
        try:
            past = await self._past(after, since) if after or since > 0 else []
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

    def _disconnect(self, reader: "asyncio.Queue[Event | None]") -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)

    async def _past(self, after: str | None, since: float) -> list[Event]:
        recent = list(self._recent)
        ids = [event.id for event in recent]
        if after in ids:
            return recent[ids.index(after) + 1 :]
        async with self._reading("events", "begin later"):
            if since > 0:  # to find an id, the bus reads the headers of all events
                past = [event async for event in self._bus.replay(since=since) if isinstance(event, EVENTS)]
                ids = [event.id for event in past]
                if not after or after in ids:
                    return past[ids.index(after) + 1 :] if after else past
            return [event async for event in self._bus.replay(after_id=after) if isinstance(event, EVENTS)]

    async def _live(self, reader: "asyncio.Queue[Event | None]", sent: set[str]) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    events = [await reader.get()]
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            while not reader.empty():
                events.append(reader.get_nowait())
            if pieces := [as_sse(event) for event in events if event is not None and event.id not in sent]:
                yield b"".join(pieces)
            if events[-1] is None:
                return
