"""A checkpointer that calls a seat parked without having moved anything."""

from services.checkpointer import __main__
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.port import Ending, Note, SeatProcesses


async def only_say_so(self: DriverBackend, unit: SeatProcesses, note: Note) -> Ending:
    return Ending("parked")


DriverBackend.park = only_say_so  # type: ignore[method-assign]
__main__.main()
