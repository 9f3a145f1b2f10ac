"""A manager that parks a seat without waiting for its requests, and without telling the routers."""

import asyncio

from kybernate.messages import SeatClosed, SeatEvicted
from services.gpu_manager import __main__
from services.gpu_manager.core import switch
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.state import Effect, GroupSwitch, NodeState, SwitchTrigger
from services.gpu_manager.manager import Manager

publish = Manager._publish


def no_drain(node: NodeState, under_way: GroupSwitch, now: Now) -> None:
    switch._drained(node, under_way, SwitchTrigger.IDLE, "sabotage", now)


async def silent(self: Manager, effect: Effect, group: asyncio.TaskGroup) -> None:
    if not isinstance(effect, SeatClosed | SeatEvicted):
        await publish(self, effect, group)


switch._drain = no_drain
Manager._publish = silent  # type: ignore[method-assign]
__main__.main()
