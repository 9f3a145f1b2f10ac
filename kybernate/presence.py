"""Says that an instance is there: every 2 s while the bus is connected. Dead after 10 s of silence."""

import asyncio
import contextlib
import time
import uuid
from typing import Literal, NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.messages import Presence

PRESENCE_SECONDS = 2.0


async def be_present(
    bus: Bus,
    component: Literal["gpu-manager", "plugin", "checkpointer"],
    *,
    instance: str,
    node: str,
    url: str | None = None,
) -> NoReturn:
    """Announce this process, as a new incarnation, until cancelled. (A router's presence is part of its reading.)"""
    incarnation = uuid.uuid4().hex
    while True:
        presence = Presence(
            cause="presence",
            component=component,
            instance=instance,
            incarnation=incarnation,
            node=node,
            url=url,
            at=time.time(),
        )
        with contextlib.suppress(BusError):
            await bus.publish(presence)
        await asyncio.sleep(PRESENCE_SECONDS)
