"""Following a bucket across losses of the bus, without long steps of the event loop."""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from kybernate.bus.port import Bus, BusError, Entry
from kybernate.logs import OnceLogger, get_logger
from kybernate.roster import GpuRecord, SeatRecord

Row = TypeVar("Row", SeatRecord, GpuRecord)

SLICE_SECONDS = 0.003
"""How long rows of a bucket are taken without a pause for the other tasks of a service."""
ROWS = 200
"""Rows of a reading that are applied in one step."""


def row_of(kind: type[Row], entry: Entry) -> Row | None:
    """The row in an entry; None, logged, if it is invalid, or a copy of another key's row, which nobody writes."""
    try:
        row = kind.model_validate_json(entry.value or b"")
        key = row.key
    except ValueError as error:  # also an empty name, which has no key
        get_logger().warning("row.invalid", key=entry.key, error=str(error))
        return None
    if key == entry.key:
        return row
    get_logger().warning("row.misplaced", key=entry.key, row=key)
    return None


class Slices:
    """Divides long work of the event loop into slices."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def pause(self) -> None:
        """Let others run if this slice is over."""
        if time.monotonic() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()


async def follow(
    bus: Bus,
    bucket: str,
    take: Callable[[Entry], None],
    failed: OnceLogger,
    *,
    retry_seconds: float,
    complete: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Watch a bucket until cancelled, across losses of the bus. ``complete``: called after each whole reading."""
    pause, whole = Slices().pause, False

    def connection_changed(_: bool) -> None:
        nonlocal whole
        whole = False  # the watch delivers the whole bucket again

    bus.on_change(connection_changed)
    while True:
        try:
            async with (await bus.bucket(bucket)).watch() as entries:
                failed.clear()
                rows, whole = 0, False
                async for entry in entries:
                    if entry is None:
                        rows, whole = 0, True
                        complete()
                        continue
                    take(entry)
                    rows += not whole
                    if rows == ROWS:
                        rows = 0
                        gc.freeze()  # a full collection would walk them in one step; later it keeps closed transports
                    await pause()
        except BusError as error:
            failed.log(error=str(error))
        await asyncio.sleep(retry_seconds)
