"""This machine, as the plugin needs it: its GPUs, their links and MIG instances, and which device nodes exist.

Everything is read before kubelet is answered, since an answer never waits for anything.
"""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.gpus import GpuError, Gpus
from kybernate.logs import get_logger
from kybernate.machine import Gpu, Link
from services.plugin.devices import device_paths

RETRY_SECONDS = 1.0
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")
"""Which device node gives access to which MIG instance: lines such as ``gpu0/gi1/ci0/access 12``."""
_MINOR = re.compile(r"^gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found at start. A GPU that goes away later is faulty; one that comes needs a restart."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    instances: tuple[Gpu, ...] = ()
    present: frozenset[str] = frozenset()
    """Device nodes that exist."""
    mig_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID of a MIG instance: its own device nodes."""

    @property
    def parents(self) -> dict[str, str]:
        """By UUID of a MIG instance: its GPU's."""
        return {gpu.uuid: gpu.mig.parent for gpu in self.instances if gpu.mig is not None}


async def read_machine(gpus: Gpus) -> Machine:
    """Wait for a driver that is not there yet, saying so once."""
    said = ""
    while True:
        try:
            found = await gpus.list()
            if not found:
                raise GpuError("this machine has no GPUs; keep the plugin off it with a node selector")
            return await _look(found, await gpus.links(), await gpus.instances())
        except GpuError as error:
            if str(error) != said:
                get_logger().warning("plugin.no_gpus", reason=str(error))
            said = str(error)
            await asyncio.sleep(RETRY_SECONDS)


async def _look(gpus: tuple[Gpu, ...], links: tuple[Link, ...], instances: tuple[Gpu, ...]) -> Machine:
    minors = await asyncio.to_thread(_read, MIG_MINORS) if instances else ""
    nodes = mig_nodes(instances, minors)
    present = await asyncio.to_thread(_present, device_paths(gpus, nodes))
    return Machine(gpus, links, instances, present, nodes)


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
