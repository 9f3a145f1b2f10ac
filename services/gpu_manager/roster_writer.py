"""Writes the roster: always the present state of a seat, never an old one; again after each return of the bus.

Once a minute the rows are read back. What somebody else wrote over them (JetStream sends its answers to any subject
that its client names, so a stolen key of a router could have it write there) is written again, and said.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kybernate.bus.port import Bucket, Bus, BusError
from kybernate.envelope import slug
from kybernate.logs import get_logger
from kybernate.roster import BUCKET, seat_key
from kybernate.seat import SeatState
from services.gpu_manager import showing
from services.gpu_manager.inputs import DrainAnnounced, Now

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

log = get_logger()

RETRY_SECONDS = 0.25
COMPARE_SECONDS = 60.0


class RosterWriter:
    """One writer task; ``changed`` marks a seat, and the task writes what it is by then."""

    def __init__(
        self,
        bus: Bus,
        now: Callable[[], Now],
        board: "Board",
        hear: Callable[[object], Awaitable[None]],
        *,
        compare_seconds: float = COMPARE_SECONDS,
    ) -> None:
        self._bus, self._now, self._board, self._hear = bus, now, board, hear
        self._compare_seconds = compare_seconds
        self._dirty: dict[str, None] = {}
        self._written: dict[str, bytes | None] = {}
        """What each key of this node should hold, as far as it was written; None: nothing."""
        self._blocked: dict[str, str] = {}
        """What was written of why seats are blocked: it begins and ends without an event."""
        self._wake = asyncio.Event()

    def changed(self, seat: str) -> None:
        """This seat's row is out of date."""
        self._dirty[seat] = None
        self._wake.set()

    def all_changed(self) -> None:
        """Every row may be out of date."""
        for seat in self._board.rows:
            self.changed(seat)

    def refresh(self) -> None:
        """Rows are out of date that say something else of why they are blocked than is true now."""
        now = self._now()
        for row in self._board.rows.values():
            if showing.blocked(self._board, row, now) != self._blocked.get(row.seat, ""):
                self.changed(row.seat)

    async def run(self) -> None:
        """Write and compare until cancelled. What could not be written is written after the bus has come back."""
        self._bus.on_change(self._bus_changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_changes(), name="write the roster")
            group.create_task(self._compare(), name="compare the roster")

    async def _write_changes(self) -> None:
        bucket: Bucket | None = None
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                bucket = bucket or await self._bus.bucket(BUCKET)  # asks the server; once is enough
                while self._dirty:
                    await self._write(bucket, next(iter(self._dirty)))
            except BusError as error:
                bucket = None
                log.warning("roster.unwritten", seats=len(self._dirty), error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def _write(self, bucket: Bucket, seat: str) -> None:
        """Write one row. A time-out may mean that it was written: it is written again, with what is then true."""
        del self._dirty[seat]
        row = self._board.rows[seat]
        record = showing.record(self._board, row, self._now())
        closes = row.state is SeatState.DRAINING
        self._blocked[seat] = record.blocked
        try:
            if row.state is SeatState.FREE:
                self._written[record.key] = None
                await bucket.delete(record.key)
            else:
                value = self._written[record.key] = record.model_dump_json().encode()
                await bucket.put(record.key, value)
        except BusError:
            self._dirty[seat] = None
            raise
        if closes:
            await self._hear(DrainAnnounced(seat, record.epoch))

    def _bus_changed(self, connected: bool) -> None:
        if connected and self._board.recovered:  # before, it takes all seats for free; recovering tells of each
            self.all_changed()

    async def _compare(self) -> None:
        """Read back what was written, and put right what another one wrote."""
        while True:
            await asyncio.sleep(self._compare_seconds)
            try:
                bucket = await self._bus.bucket(BUCKET)
                expected = dict(self._written)  # before reading: what is written meanwhile is no difference
                found = {entry.key: entry.value for entry in await bucket.entries(f"{slug(self._board.node)}.")}
                await self._put_right(bucket, expected, found)
            except BusError as error:
                log.debug("roster.not_compared", error=str(error))

    async def _put_right(
        self, bucket: Bucket, expected: dict[str, bytes | None], found: dict[str, bytes | None]
    ) -> None:
        if not expected or self._dirty:
            return  # what is there may be from before a restart, or be written in a moment
        settled = {key for key in expected if self._written.get(key) == expected[key]}
        wrong = {key for key in settled if found.get(key) != expected[key]}
        strange = found.keys() - self._written.keys()
        if not wrong and not strange:
            return
        log.error("roster.differs", keys=sorted(wrong | strange), meaning="another one wrote it; it is put right")
        for key in strange:
            await bucket.delete(key)
        for seat in self._board.rows:
            if seat_key(self._board.node, seat) in wrong:
                self.changed(seat)
