"""A manager that parks a seat without asking or telling anybody that may have requests in flight there."""

import asyncio

from kybernate.messages import SeatClosed, SeatEvicted
from services.gpu_manager import __main__, switching
from services.gpu_manager.board import Board, Effect
from services.gpu_manager.inputs import Now
from services.gpu_manager.manager import Manager
from services.gpu_manager.rows import Operation

say = Manager._say


def no_drain(board: Board, operation: Operation, now: Now) -> None:
    switching._drained(board, operation, now, "sabotage")


async def silent(self: Manager, effect: Effect, group: asyncio.TaskGroup) -> None:
    if not isinstance(effect, SeatClosed | SeatEvicted):
        await say(self, effect, group)


switching._drain = no_drain
Manager._say = silent  # type: ignore[method-assign]
__main__.main()
