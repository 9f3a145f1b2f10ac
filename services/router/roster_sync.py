"""Keeps the router's knowledge in step with the cluster: presence, roster, events. Safety depends on the order here.

A manager parks a seat once every router that it counts has acknowledged, and lists these routers in its presence. A
router that is listed reads which seats are active *after* that, and forwards only then. It does the same when it was
not listed for a while, and after every loss of the bus.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable

from kybernate.bus.follow import ROWS, Slices, follow, row_of
from kybernate.bus.port import Bus, BusError, Entry
from kybernate.envelope import slug
from kybernate.logs import OnceLogger
from kybernate.messages import Presence, SeatEvent
from kybernate.presence import PRESENCE_SECONDS
from kybernate.roster import BUCKET, SeatRecord
from services.router.core.step import BusLost, RosterRead, SeatMissing
from services.router.dispatch import Dispatcher

RETRY_SECONDS = 0.5


class RosterSync:
    """One per router. Run ``presence``, ``read``, ``watch`` and ``listen`` as jobs."""

    def __init__(self, bus: Bus, dispatcher: Dispatcher, presence: Callable[[], Presence]) -> None:
        self._bus, self._dispatcher, self._presence = bus, dispatcher, presence
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._listening = asyncio.Event()
        self._revisions: dict[str, int] = {}
        self.on_loss: Callable[[], None] = lambda: None
        bus.on_change(self._connection_changed)
        dispatcher.on_resync, dispatcher.read_node = self._wanted.set, self._read_node

    async def presence(self) -> None:
        """Publish this router's presence every 2 s."""
        while True:
            at = time.monotonic()
            with contextlib.suppress(BusError):
                await self._publish_presence()
            await asyncio.sleep(max(0.0, at + PRESENCE_SECONDS - time.monotonic()))

    async def read(self) -> None:
        """Read the whole roster after each connection to the bus. The watch compares itself with the bucket."""
        await self._listening.wait()
        failed = OnceLogger("roster.read_failed")
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not self._bus.connected:
                continue  # the next connection sets ``_wanted``
            try:
                await self._read()
                failed.clear()
            except BusError as error:
                failed.log(error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._wanted.set()

    async def watch(self) -> None:
        """Take every change of the roster."""
        failed = OnceLogger("roster.watch_failed", level="info")
        await follow(self._bus, BUCKET, self._take, failed, retry_seconds=RETRY_SECONDS)

    async def listen(self) -> None:
        """Take events, which arrive before the roster's rows, and what managers say of the routers that they count."""
        managers = Presence.pattern(component="gpu-manager")
        async with self._bus.subscribe(SeatEvent.pattern(), managers) as messages:
            self._listening.set()
            async for message in messages:
                if isinstance(message, Presence | SeatEvent):
                    self._dispatcher.feed(message)

    async def _publish_presence(self) -> None:
        await self._bus.publish(self._presence().model_copy(update={"sent": time.monotonic()}))

    async def _read_node(self, node: str) -> None:
        """Read the rows of one node. Raises BusError: the leader of the roster's stream did not answer."""
        rows = await (await self._bus.bucket(BUCKET)).entries(slug(node))
        records = tuple(filter(None, map(self._newer, rows)))
        self._dispatcher.feed(RosterRead(None, records, frozenset()))

    async def _read(self) -> None:
        at = time.monotonic()
        await self._publish_presence()
        entries = (await (await self._bus.bucket(BUCKET)).entries())[::-1]
        slices, records, present = Slices(), list[SeatRecord](), set[str]()
        while entries:  # each is freed when it was taken: 65,536 at the end took 15 ms
            entry = entries.pop()
            present.add(entry.key)
            if (record := self._newer(entry)) is not None:
                records.append(record)
            if len(records) >= ROWS:
                self._dispatcher.feed(RosterRead(None, tuple(records), frozenset()))
                records.clear()
                gc.freeze()  # 3 µs; frozen only at the end, 65,536 rows were walked in one step of 270 ms before that
            await slices.pause()
        self._dispatcher.feed(RosterRead(at, tuple(records), present))

    def _take(self, entry: Entry) -> None:
        if entry.value is None:
            self._revisions[entry.key] = entry.revision
            self._dispatcher.feed(SeatMissing(entry.key))
        elif (record := self._newer(entry)) is not None:
            self._dispatcher.feed(record)

    def _newer(self, entry: Entry) -> SeatRecord | None:
        """Return the row, unless it is invalid, or this or a later revision of its key was taken already."""
        if entry.value is None or entry.revision <= self._revisions.get(entry.key, 0):
            return None
        self._revisions[entry.key] = entry.revision
        return row_of(SeatRecord, entry)

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._wanted.set()
        else:
            self._revisions.clear()  # a server that lost its disk restarts its revisions
            self._dispatcher.feed(BusLost())
            self.on_loss()
