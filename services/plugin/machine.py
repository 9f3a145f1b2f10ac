"""This machine, as the plugin needs it: its GPUs, their links and MIG instances, and which device nodes exist.

Everything is read before kubelet is answered, since an answer never waits for anything.
"""

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kybernate import known_gpus
from kybernate.gpus import GpuError, Gpus
from kybernate.known_gpus import Known, learned
from kybernate.logs import OnceLogger, get_logger
from kybernate.machine import Gpu, Link
from services.plugin.devices import device_paths

RETRY_SECONDS = 1.0
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")
"""Which device node gives access to which MIG instance: lines such as ``gpu0/gi1/ci0/access 12``."""
_MINOR = re.compile(r"^gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Machine:
    """What groups are made of: the GPUs that are known, though some may be away. Those that are away are faulty."""

    known: Known
    there: frozenset[str]
    """UUIDs of the GPUs that answer."""
    present: frozenset[str] = frozenset()
    """Device nodes that exist."""
    mig_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID of a MIG instance: its own device nodes."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All that are known, by index."""
        return self.known.gpus

    @property
    def links(self) -> tuple[Link, ...]:
        """Between them."""
        return self.known.links

    @property
    def instances(self) -> tuple[Gpu, ...]:
        """Their MIG instances."""
        return self.known.instances

    @property
    def parents(self) -> dict[str, str]:
        """By UUID of a MIG instance: its GPU's."""
        return {gpu.uuid: gpu.mig.parent for gpu in self.instances if gpu.mig is not None}


async def read_machine(gpus: Gpus, state_dir: Path) -> Machine:
    """Wait for a driver that is not there yet, saying so once."""
    missing = OnceLogger("plugin.no_gpus")
    while True:
        try:
            known, there = await learn(gpus, state_dir)
            return await look(known, there)
        except GpuError as error:
            missing.log(reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)


async def learn(gpus: Gpus, state_dir: Path, before: Known | None = None) -> tuple[Known, frozenset[str]]:
    """Read the GPUs and tell the manager; returns what is known and the UUIDs of those that answer. Raises GpuError.

    ``before``: what was known, for a disk that cannot be written to.
    """
    found = await gpus.list()
    if not found:
        raise GpuError("this machine has no GPUs; keep the plugin off it with a node selector")
    seen = found, await gpus.links(), await gpus.instances()
    try:
        known = await asyncio.to_thread(known_gpus.learn, state_dir, *seen)
    except OSError as error:
        meaning = "the manager may form other groups while a GPU is away"
        get_logger().error("gpus.memory_unwritten", folder=str(state_dir), reason=str(error), meaning=meaning)
        known = learned(before or Known(), *seen)
    return known, frozenset(gpu.uuid for gpu in found)


async def look(known: Known, there: Collection[str]) -> Machine:
    """The device nodes of the GPUs."""
    minors = await asyncio.to_thread(_read, MIG_MINORS) if known.instances else ""
    nodes = mig_nodes(known.instances, minors)
    present = await asyncio.to_thread(_present, device_paths(known.gpus, nodes))
    return Machine(known, frozenset(there), present, nodes)


def mig_nodes(instances: tuple[Gpu, ...], minors: str) -> dict[str, tuple[str, ...]]:
    """The nodes of each MIG instance, by the text of ``mig-minors``. Pure."""
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


def _present(paths: tuple[str, ...]) -> frozenset[str]:
    return frozenset(path for path in paths if os.path.exists(path))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
