"""The machine's GPUs: read once before kubelet is answered, then watched for health, new GPUs and device nodes."""

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from kybernate.files import changes
from kybernate.gpus import GpuError, Gpus
from kybernate.logs import OnceLogger, get_logger
from kybernate.machine import Gpu, GpuEvent, GpuSensors
from kybernate.node import known_gpus
from kybernate.node.known_gpus import KnownGpus
from services.plugin.core.devices import device_paths
from services.plugin.core.faults import HealthChange, NewGpus
from services.plugin.servicer import NodeSeats
from services.plugin.settings import PluginSettings

EVENT_SECONDS = 5.0
EVENT_BATCH_SECONDS = 0.1
"""Events within this time are handled together: a broken application causes hundreds a second."""
RETRY_SECONDS = 1.0
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")
"""Device node of each MIG instance, in lines such as ``gpu0/gi1/ci0/access 12``."""
_MINOR = re.compile(r"^gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A reading of the machine: the known GPUs, of which groups are made, and those that are present."""

    known: KnownGpus
    present: frozenset[str]
    """UUIDs of the GPUs that answer; the other known GPUs are faulty."""
    device_nodes: frozenset[str] = frozenset()
    """Device nodes that exist."""
    mig_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID of a MIG instance: its device nodes."""


async def first_reading(gpus: Gpus, state_dir: Path) -> GpuReading:
    """Read the GPUs; while the driver does not answer, retry and log it once."""
    failed = OnceLogger("gpus.unavailable")
    while True:
        try:
            return await learn(gpus, state_dir)
        except GpuError as error:
            failed.log(reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)


async def learn(gpus: Gpus, state_dir: Path, before: KnownGpus | None = None) -> GpuReading:
    """Read the GPUs and share them with the manager.

    ``before``: the known GPUs so far, used when the disk cannot be written. Raises GpuError.
    """
    found = await gpus.list()
    if not found:
        raise GpuError("this machine has no GPUs; keep the plugin off it with a node selector")
    seen = found, await gpus.links(), await gpus.instances()
    try:
        known = await asyncio.to_thread(known_gpus.learn, state_dir, *seen)
    except OSError as error:
        meaning = "the manager may form other groups while a GPU is away"
        get_logger().error("known_gpus.write_failed", folder=str(state_dir), reason=str(error), meaning=meaning)
        known = known_gpus.merge(before or KnownGpus(), *seen)
    return await read_device_nodes(known, [gpu.uuid for gpu in found])


async def read_device_nodes(known: KnownGpus, present: Collection[str]) -> GpuReading:
    """Complete a reading with the device nodes that exist."""
    minors = ""
    if known.instances:
        with contextlib.suppress(OSError):
            minors = await asyncio.to_thread(MIG_MINORS.read_text)
    nodes = mig_nodes(known.instances, minors)
    existing = await asyncio.to_thread(existing_paths, device_paths(known.gpus, nodes))
    return GpuReading(known, frozenset(present), existing, nodes)


def mig_nodes(instances: tuple[Gpu, ...], minors: str) -> dict[str, tuple[str, ...]]:
    """Return the device nodes of each MIG instance, from the text of ``mig-minors``. Pure."""
    nodes = {(int(m[1]), int(m[2]), m[3]): f"/dev/nvidia-caps/nvidia-cap{m[4]}" for m in _MINOR.finditer(minors)}
    found = {}
    for gpu in instances:
        if gpu.mig is not None:
            keys = (
                (gpu.minor, gpu.mig.gpu_instance, None),
                (gpu.minor, gpu.mig.gpu_instance, str(gpu.mig.compute_instance)),
            )
            found[gpu.uuid] = tuple(nodes[key] for key in keys if key in nodes)
    return found


def existing_paths(paths: tuple[str, ...]) -> frozenset[str]:
    """Return the paths that exist. Blocking."""
    return frozenset(path for path in paths if os.path.exists(path))


class GpuWatch:
    """``poll``, ``watch_events`` and ``watch_known`` are jobs; they update the probation and adopt new readings."""

    def __init__(
        self,
        settings: PluginSettings,
        gpus: Gpus,
        node: NodeSeats,
        reading: GpuReading,
        adopt: Callable[[GpuReading], Awaitable[None]],
        health_changed: Callable[[list[HealthChange]], None],
    ) -> None:
        """``adopt`` makes an offer from a new reading; ``health_changed`` gets faults and recoveries."""
        self._settings, self._gpus, self._node = settings, gpus, node
        self._adopt, self._health_changed = adopt, health_changed
        self.reading = reading
        self._present = reading.present
        self._new = NewGpus()
        self.sensors: tuple[GpuSensors, ...] = ()
        """Read last; empty if the driver does not answer."""

    def expect(self, reading: GpuReading) -> None:
        """Watch the health of every known GPU, and of those of orphaned seats."""
        known = {gpu.uuid for gpu in reading.known.gpus}
        parts = {gpu.uuid for gpu in reading.known.instances}
        offer = self._node.offer
        only_orphaned = [group for group in offer.groups if offer.orphaned.issuperset(group.seat_ids)]
        orphaned = {uuid for group in only_orphaned for uuid in group.physical}
        needed = self._node.probation.config.recovery_reads
        # At the start every present GPU counts as healthy: there are no earlier readings.
        healthy = self._new.healthy(needed) if self._node.probation.expected else reading.present
        self.reading = reading
        expected = frozenset(known | (orphaned - parts))
        self._health_changed(self._node.probation.expect(expected, reading.present, healthy))

    async def poll(self) -> NoReturn:
        """Read the GPUs periodically. A missing GPU is faulty; a driver that does not answer proves nothing."""
        while True:
            await asyncio.sleep(self._settings.reread_seconds)
            events = self._node.probation.events
            try:
                present = frozenset(gpu.uuid for gpu in await self._gpus.list())
                await self.apply(present, events)
            except GpuError as error:
                self.sensors = ()
                get_logger().warning("gpus.read_failed", reason=str(error))
                continue
            try:
                self.sensors = await self._gpus.sensors()
            except Exception as error:  # a driver without a temperature must not end the plugin
                self.sensors = ()
                get_logger().warning("gpus.read_failed", reason=repr(error))

    async def apply(self, present: frozenset[str], events: int) -> None:
        """Apply a reading that began when the probation had counted ``events``. Raises GpuError."""
        reading, probation = self.reading, self._node.probation
        self._present = present
        self._health_changed(probation.read(present, events))
        known = frozenset(gpu.uuid for gpu in reading.known.gpus)
        if self._new.read(present - known, probation.config.recovery_reads):
            found = await learn(self._gpus, self._settings.state_dir, reading.known)
            self._present = found.present
            get_logger().info("gpus.found", gpus=sorted(found.present - known))
            await self._adopt(found)
            return
        # GPUs that were missing when the offer was made, and device nodes: CUDA creates nvidia-uvm at its first use.
        fresh = await read_device_nodes(reading.known, reading.present | ((present & known) - probation.faulty))
        if fresh != reading and reading is self.reading:
            await self._adopt(fresh)

    async def watch_known(self) -> None:
        """Adopt GPUs that the manager saw first, so that both form the same groups."""
        folder = self._settings.state_dir
        async for _ in changes(folder / known_gpus.FILE, asyncio.Event(), seconds=known_gpus.LOOK_SECONDS):
            known = await asyncio.to_thread(known_gpus.load, folder)
            if known.gpus and known != self.reading.known:
                await self._adopt(await read_device_nodes(known, self._present & {gpu.uuid for gpu in known.gpus}))

    async def watch_events(self) -> NoReturn:
        """Apply XID events as they are reported."""
        failed = OnceLogger("gpu_events.read_failed")
        while True:
            try:
                events = await self._gpus.events(EVENT_SECONDS)
                parents = await self._parents(events)
            except GpuError as error:
                failed.log(reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            failed.clear()
            for event, times in Counter(events).items():
                ignored = event.xid in self._node.probation.config.ignored_xids
                get_logger().warning("gpu.xid", gpu=event.gpu, xid=event.xid, times=times, ignored=ignored)
                if not ignored:
                    self._new.event(event.gpu)
                self._health_changed(self._node.probation.event(event, parents))
            if events:
                await asyncio.sleep(EVENT_BATCH_SECONDS)

    async def _parents(self, events: tuple[GpuEvent, ...]) -> dict[str, str]:
        """Return the GPU of each MIG instance; instances are read again if an event names an unknown one."""
        parents = {gpu.uuid: gpu.physical for gpu in self.reading.known.instances}
        if any((event.gpu or "").startswith("MIG-") and event.gpu not in parents for event in events):
            with contextlib.suppress(GpuError):  # the events must not be lost for it
                parents |= {gpu.uuid: gpu.physical for gpu in await self._gpus.instances()}
        return parents
