"""Looks at the node's GPUs: which are there, what the driver reports, which are new; and what follows for the seats."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NoReturn

from kybernate import known_gpus
from kybernate.config_watch import changes
from kybernate.gpus import GpuError, Gpus
from kybernate.logs import OnceLogger, get_logger
from kybernate.machine import GpuEvent
from services.plugin.faults import Arrivals
from services.plugin.machine import Machine, learn, look
from services.plugin.servicer import Node
from services.plugin.settings import PluginSettings

EVENT_SECONDS = 5.0
TOGETHER_SECONDS = 0.1
"""Events that come so close together are heard as one: a broken application makes hundreds a second."""
RETRY_SECONDS = 1.0


class GpuWatch:
    """``poll``, ``hear`` and ``follow`` are jobs; they change the probation, and ``machine`` through ``adopt``."""

    def __init__(
        self,
        settings: PluginSettings,
        gpus: Gpus,
        machine: Machine,
        adopt: Callable[[Machine], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        """``adopt`` makes a new offer of another machine; ``changed`` is told of GPUs that became faulty or sound."""
        self._settings, self._gpus, self._adopt, self._changed = settings, gpus, adopt, changed
        self.machine = machine
        self._there = machine.there
        self._arrivals = Arrivals()

    def expect(self, node: Node, machine: Machine) -> None:
        """Whose health counts: that of every GPU that is known, and of those that seats in use are on."""
        known = {gpu.uuid for gpu in machine.gpus}
        parts = {gpu.uuid for gpu in machine.instances}
        kept = {uuid for group in node.offer.groups if node.offer.is_kept(group) for uuid in group.physical}
        needed = node.probation.recovery_reads
        # At the start everything that is there is sound; nothing is known of it.
        sound = self._arrivals.sound(needed) if node.probation.expected else machine.there
        self.machine = machine
        node.probation.expect(frozenset(known | (kept - parts)), machine.there, sound)
        self._changed()

    async def poll(self, node: Node) -> NoReturn:
        """A GPU that is gone makes its seats unhealthy; a driver that does not answer proves nothing."""
        while True:
            await asyncio.sleep(self._settings.reread_seconds)
            heard = node.probation.heard
            try:
                there = frozenset(gpu.uuid for gpu in await self._gpus.list())
                await self._read(node, there, heard)
            except GpuError as error:
                get_logger().warning("plugin.gpus_unread", reason=str(error))

    async def _read(self, node: Node, there: frozenset[str], heard: int) -> None:
        machine, probation = self.machine, node.probation
        self._there = there
        if probation.read(there, heard):
            self._changed()
        known = frozenset(gpu.uuid for gpu in machine.gpus)
        if self._arrivals.read(there - known, probation.recovery_reads):
            found, there = await learn(self._gpus, self._settings.state_dir, machine.known)
            self._there = there
            get_logger().info("gpus.new", gpus=sorted(there - known))
            await self._adopt(await look(found, there))
            return
        # Those that were away when the offer was made, and device nodes: nvidia-uvm comes with the first use of CUDA.
        fresh = await look(machine.known, machine.there | ((there & known) - probation.faulty))
        if fresh != machine and machine is self.machine:
            await self._adopt(fresh)

    async def follow(self) -> NoReturn:
        """GPUs that the manager saw first: both form the same groups."""
        folder = self._settings.state_dir
        async for _ in changes(folder / known_gpus.FILE, asyncio.Event()):
            known = await asyncio.to_thread(known_gpus.load, folder)
            if known.gpus and known != self.machine.known:
                await self._adopt(await look(known, self._there & {gpu.uuid for gpu in known.gpus}))
        raise AssertionError("changes ended")

    async def hear(self, node: Node) -> NoReturn:
        """XID events, as they come."""
        unread = OnceLogger("plugin.events_unheard")
        while True:
            try:
                events = await self._gpus.events(EVENT_SECONDS)
                parents = await self._parents(events)
            except GpuError as error:
                unread.log(reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            unread.clear()
            for event, times in Counter(events).items():
                ignored = event.xid in node.probation.ignored_xids
                get_logger().warning("gpu.xid", gpu=event.gpu, xid=event.xid, times=times, ignored=ignored)
                if not ignored:
                    self._arrivals.event(event.gpu)
                if node.probation.event(event, parents):
                    self._changed()
            if events:
                await asyncio.sleep(TOGETHER_SECONDS)

    async def _parents(self, events: tuple[GpuEvent, ...]) -> dict[str, str]:
        """By UUID of a MIG instance: its GPU. An instance that was made since the start is asked for."""
        parents = self.machine.parents
        if any((event.gpu or "").startswith("MIG-") and event.gpu not in parents for event in events):
            try:
                found = await self._gpus.instances()
            except GpuError:
                return parents  # the events must not be lost for it
            parents |= {gpu.uuid: gpu.mig.parent for gpu in found if gpu.mig is not None}
        return parents
