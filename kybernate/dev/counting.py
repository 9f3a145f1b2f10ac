"""Plays the presence of a node's manager, for tests and benches of a router without one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kybernate.bus.port import Bus
from kybernate.messages import Presence


@asynccontextmanager
async def counting_routers(bus: Bus, *nodes: str) -> AsyncIterator[None]:
    """Count every router that publishes its presence, as the managers of these nodes would."""
    known: dict[str, float] = {}

    async def count() -> None:
        async with bus.subscribe(Presence.pattern(component="router")) as messages:
            async for message in messages:
                if isinstance(message, Presence) and message.sent is not None:
                    known[message.incarnation] = message.sent
                    for node in nodes:
                        await bus.publish(
                            Presence(
                                cause="presence",
                                component="gpu-manager",
                                instance=node,
                                incarnation=node,
                                node=node,
                                routers=known,
                            )
                        )

    task = asyncio.create_task(count())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
