"""Writes the roster: always the present state of a seat, never an old one; again after each return of the bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kybernate.bus.port import Bucket, Bus, BusError
from kybernate.logs import get_logger
from kybernate.roster import BUCKET
from kybernate.seat import SeatState
from services.gpu_manager import looking
from services.gpu_manager.inputs import DrainAnnounced, Now

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

log = get_logger()

RETRY_SECONDS = 0.25


class RosterWriter:
    """One writer task; ``changed`` marks a seat, and the task writes what it is by then."""

    def __init__(
        self, bus: Bus, now: Callable[[], Now], board: "Board", hear: Callable[[object], Awaitable[None]]
    ) -> None:
        self._bus, self._now, self._board, self._hear = bus, now, board, hear
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()

    def changed(self, seat: str) -> None:
        """This seat's row is out of date."""
        self._dirty[seat] = None
        self._wake.set()

    def all_changed(self) -> None:
        """Every row may be out of date."""
        for seat in self._board.rows:
            self.changed(seat)

    async def run(self) -> None:
        """Write until cancelled. What could not be written is written after the bus has come back."""
        self._bus.on_change(self._bus_changed)
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
        record = looking.record(self._board, row, self._now())
        closes = row.state is SeatState.DRAINING
        try:
            if row.state is SeatState.FREE:
                await bucket.delete(record.key)
            else:
                await bucket.put(record.key, record.model_dump_json().encode())
        except BusError:
            self._dirty[seat] = None
            raise
        if closes:
            await self._hear(DrainAnnounced(seat, record.epoch))

    def _bus_changed(self, connected: bool) -> None:
        if connected:
            self.all_changed()
