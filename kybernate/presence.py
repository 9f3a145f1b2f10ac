"""The presence of a manager on the bus, and how two of them on one node find out.

The lock files (``lifecycle.alone_in_both``) keep a second process away that shares a folder. A manager with other
folders would grant the same GPUs. It hears the presence of the one that serves, and the one that serves hears it. A
checkpointer takes jobs only from managers that connect to the socket in its ``run_dir``.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from kybernate.bus.port import Bus, BusError
from kybernate.clock import wait_for
from kybernate.lifecycle import CannotRunError
from kybernate.messages import Presence

PRESENCE_SECONDS = 2.0
"""Wall: how often each service publishes its presence."""
OBJECTION_SECONDS = 0.5
"""Wall: how long a process that starts waits for the objection of one that serves."""


class NodePresence:
    """The presence of the one manager of a node. Run ``keep`` beside the work; begin the work after
    ``claim``.

    ``lock``: identity of the lock file that this process holds. Who had the same one before has ended, so a presence of
    it that comes late is no objection: a restart under one lock is never refused.

    What follows from the presence of another process on this node: (1) It serves and this one starts: this one ends.
    (2) It starts and this one serves: this one objects at once. (3) Both start: the lower incarnation objects, the
    other one ends. (4) Both serve, since one was silent for a while: each may have missed what the other one
    did, so both end, and whichever is started again first serves from evidence.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        instance: str,
        node: str,
        lock: str,
        url: str | None = None,
        routers: Callable[[], dict[str, float]] = dict,
        rows: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        """``routers``: those that it counts (``Presence.routers``); ``rows``: number and highest ``seq``."""
        self._bus, self._instance, self._node = bus, instance, node
        self._lock, self._url = lock, url
        self._incarnation = uuid.uuid4().hex
        self._serving = False
        self._published = asyncio.Event()
        self._rows = rows
        self._routers, self.at_once = routers, asyncio.Event()
        """``at_once``: publish now, not only when it is due."""

    async def keep(self) -> None:
        """Publish the presence every ``PRESENCE_SECONDS``. Raises CannotRunError if another manager serves."""
        pattern = Presence.pattern(component="gpu-manager", instance=self._node)
        async with self._bus.subscribe(pattern) as messages, asyncio.TaskGroup() as group:
            group.create_task(self._publish_regularly(), name="publish presence")
            async for message in messages:
                if isinstance(message, Presence):
                    await self._hear(message)

    async def claim(self, patience_seconds: float) -> None:
        """Return when this process may serve: no other one objected.

        ``patience_seconds``: how long the bus is waited for. Without it nothing can object; ``keep`` then finds out
        later.
        """
        if await wait_for(self._published, patience_seconds):
            await asyncio.sleep(OBJECTION_SECONDS)
        self._serving = True
        await self._publish()

    async def _publish_regularly(self) -> None:
        while True:
            self.at_once.clear()
            await self._publish()
            await wait_for(self.at_once, PRESENCE_SECONDS if self._published.is_set() else OBJECTION_SECONDS / 5)

    async def _publish(self) -> None:
        rows, seq = self._rows() or (None, 0)
        presence = Presence(
            cause="presence",
            component="gpu-manager",
            instance=self._instance,
            incarnation=self._incarnation,
            node=self._node,
            url=self._url,
            serving=self._serving,
            lock=self._lock,
            routers=self._routers(),
            rows=rows,
            seq=seq,
        )
        with contextlib.suppress(BusError):
            await self._bus.publish(presence)
            self._published.set()

    async def _hear(self, other: Presence) -> None:
        if other.node != self._node or other.incarnation == self._incarnation or self._lock == other.lock != "":
            return
        if not other.serving and (self._serving or self._incarnation < other.incarnation):  # (2), (3)
            await self._publish()
            return
        if self._serving:  # (4): the other one must hear of it, too
            await self._publish()
        place = f" at {other.url}" if other.url else ""
        raise CannotRunError(
            f"another gpu-manager serves node {self._node}: instance {other.instance}{place} "
            f"(incarnation {other.incarnation}); a node has one: stop it, or set another KYB_NODE on its machine"
        )
