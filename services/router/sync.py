"""Keeps the router's knowledge in step with the cluster: presence, roster, events. Safety depends on the order here.

A manager parks a seat once every router that it has heard of has acknowledged. So a router says that it is there, and
waits until the bus has that, *before* it reads which seats are active; only then does it send to them. The same after
every loss of the bus.
"""

import asyncio
import time
from collections.abc import Callable

from pydantic import ValidationError

from kybernate.bus.port import Bucket, Bus, BusError, Entry
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import GpuHealthChanged, Presence, SeatEvent, TrafficSignal
from kybernate.presence import PRESENCE_SECONDS
from kybernate.roster import BUCKET, SeatRecord
from services.router.dispatch import Dispatcher
from services.router.happenings import BusLost, Confirmed, SeatMissing, Synced

RETRY_SECONDS = 0.5
COMPARE_SECONDS = 60.0


class RosterSync:
    """One per router. Run ``presence``, ``read``, ``watch`` and ``listen`` as jobs."""

    def __init__(self, bus: Bus, dispatcher: Dispatcher, presence: Callable[[], Presence]) -> None:
        self._bus, self._dispatcher, self._presence = bus, dispatcher, presence
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._listening = asyncio.Event()
        self._revisions: dict[str, int] = {}
        self.on_event: Callable[[SeatEvent | GpuHealthChanged], None] = lambda _: None
        self.on_signal: Callable[[TrafficSignal], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        bus.on_change(self._changed)
        dispatcher.on_resync = self._wanted.set

    async def presence(self) -> None:
        """Say every 2 s that this router is there."""
        while True:
            at = time.monotonic()
            if self._bus.connected and await self._said():
                self._dispatcher.feed(Confirmed(at))
            await asyncio.sleep(max(0.0, at + PRESENCE_SECONDS - time.monotonic()))

    async def read(self) -> None:
        """Read the whole roster when the bus came (back), and once a minute to compare."""
        await self._listening.wait()
        while True:
            try:
                async with asyncio.timeout(COMPARE_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            if not self._bus.connected:
                continue  # its return sets ``_wanted``
            try:
                await self._read()
            except BusError as error:
                get_logger().warning("roster.unread", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._wanted.set()

    async def watch(self) -> None:
        """Take every change of the roster."""
        unwatched = OnceLogger("roster.unwatched", level="info")
        while True:
            try:
                bucket = await self._bus.bucket(BUCKET)
                async with bucket.watch() as entries:
                    unwatched.clear()
                    async for entry in entries:
                        if entry is not None:
                            self._take(entry)
            except BusError as error:
                unwatched.log(error=str(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def listen(self) -> None:
        """Take events, which are faster than the roster, and the levels of all sources."""
        patterns = SeatEvent.pattern(), GpuHealthChanged.pattern(), TrafficSignal.pattern()
        async with self._bus.subscribe(*patterns) as messages:
            self._listening.set()
            async for message in messages:
                if isinstance(message, SeatEvent):
                    self._dispatcher.feed(message)
                    self.on_event(message)
                elif isinstance(message, GpuHealthChanged):
                    self.on_event(message)
                elif isinstance(message, TrafficSignal):
                    self.on_signal(message)
        raise BusError("the bus was closed")

    async def _said(self) -> bool:
        try:
            await self._bus.publish(self._presence())
            await self._bus.flush()
        except BusError:
            return False
        return True

    async def _read(self) -> None:
        at = time.monotonic()
        await self._bus.publish(self._presence())
        await self._bus.flush()
        bucket: Bucket = await self._bus.bucket(BUCKET)
        entries = await bucket.entries()
        records = tuple(record for entry in entries if (record := self._fresh(entry)) is not None)
        self._dispatcher.feed(Synced(at, records, frozenset(entry.key for entry in entries)))

    def _take(self, entry: Entry) -> None:
        if entry.value is None:
            self._revisions[entry.key] = entry.revision
            self._dispatcher.feed(SeatMissing(entry.key))
        elif (record := self._fresh(entry)) is not None:
            self._dispatcher.feed(record)

    def _fresh(self, entry: Entry) -> SeatRecord | None:
        """The row, unless a later one of this key was taken already."""
        if entry.value is None or entry.revision < self._revisions.get(entry.key, 0):
            return None
        self._revisions[entry.key] = entry.revision
        try:
            record = SeatRecord.model_validate_json(entry.value)
        except ValidationError as error:
            get_logger().warning("roster.unreadable", key=entry.key, error=str(error))
            return None
        if record.key != entry.key:  # a copy of another seat's row, which no manager writes
            get_logger().warning("roster.misplaced", key=entry.key, row=record.key)
            return None
        return record

    def _changed(self, connected: bool) -> None:
        if connected:
            self._wanted.set()
        else:
            self._revisions.clear()  # a server that lost its disk counts anew
            self._dispatcher.feed(BusLost())
            self.on_loss()
