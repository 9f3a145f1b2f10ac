"""The NVML side: what can be read of the machine, and what it counted. Pure."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kybernate.dev.fakes.gpu.arguments import integer, text
from kybernate.dev.fakes.gpu.codes import Code
from kybernate.dev.fakes.gpu.process import RefusedError
from kybernate.dev.fakes.gpu.world import Result, World
from kybernate.machine import Gpu

_AMBIENT_CELSIUS = 34.0
_WARMING_SECONDS = 8.0
_SWITCHES = 4
"""NVSwitches of a board, on which each GPU's links end."""


class Readings:
    """devices, processes, links, link, nvlink, host, stats."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._address = {gpu.uuid: gpu.pci_bus_id for gpu in world.spec.gpus}
        self._temperatures = dict.fromkeys([gpu.uuid for gpu in world.spec.gpus], (_AMBIENT_CELSIUS, 0.0))
        self.table: dict[str, Callable[[dict[str, Any]], Result]] = {
            "devices": self._devices,
            "processes": self._processes,
            "links": self._links,
            "link": self._link,
            "nvlink": self._nvlink,
            "host": lambda _: {"memory_bytes": world.spec.host_memory_bytes, "used_bytes": world.parked_bytes()},
            "stats": self._stats,
        }

    def _devices(self, _: dict[str, Any]) -> Result:
        """GPUs in index order; those that are lost too, marked so, and MIG instances beside them."""
        spec = self._world.spec
        gpus = [asdict(gpu) | self._readings(gpu.uuid) | self._trouble(gpu.uuid) for gpu in spec.gpus]
        instances = [asdict(one) | self._instance_readings(one) for one in spec.instances]
        return {"gpus": gpus, "instances": instances}

    def _readings(self, gpu: str) -> dict[str, Any]:
        utilization = self._utilization(gpu)
        return {
            "used_bytes": self._world.used_bytes(gpu),
            "utilization": utilization,
            "temperature": self._temperature(gpu, utilization),
            "xids": self._world.xids[gpu],
        }

    def _instance_readings(self, instance: Gpu) -> dict[str, Any]:
        parent = instance.mig.parent if instance.mig else ""
        used = self._world.used_bytes(instance.uuid)
        own = {"used_bytes": used, "xids": self._world.xids[instance.uuid]}
        return own | self._trouble(parent) | {"nvml": self._world.nvml_codes[instance.uuid]}

    def _trouble(self, gpu: str) -> dict[str, Any]:
        return {"lost": gpu in self._world.lost, "nvml": self._world.nvml_codes[gpu]}

    def _links(self, _: dict[str, Any]) -> Result:
        """Every pair of GPUs once; ``kind`` is the fastest way between the two."""
        found = []
        for link in self._world.spec.links:
            kind = "nvswitch" if link.switched else "nvlink" if link.nvlinks else "pcie"
            found.append({"kind": kind, **asdict(link)})
        return {"links": found}

    def _link(self, arguments: dict[str, Any]) -> Result:
        """The link of two GPUs, ``a`` and ``b`` in any order."""
        pair = {text(arguments, "a"), text(arguments, "b")}
        for link in self._world.spec.links:
            if {link.a, link.b} == pair:
                return asdict(link)
        raise RefusedError(Code.INVALID_VALUE, f"no two GPUs {' and '.join(sorted(pair))} here")

    def _nvlink(self, arguments: dict[str, Any]) -> Result:
        """What is at the other end of NVLink number ``link`` of ``gpu``, which has ``count`` of them: GPU or switch."""
        gpu, number = text(arguments, "gpu"), integer(arguments, "link")
        ends: list[tuple[str, bool]] = []
        for link in self._world.spec.links:
            if gpu not in (link.a, link.b) or not link.nvlinks:
                continue
            if link.switched:
                ends = [(f"ffff:{one % _SWITCHES:02x}:00.0", True) for one in range(link.nvlinks)]
                break
            peer = self._address[link.b if gpu == link.a else link.a]
            ends += [(peer, False)] * link.nvlinks
        address, switched = ends[number] if number < len(ends) else ("", False)
        return {"count": len(ends), "pci_bus_id": address, "switched": switched}

    def _processes(self, arguments: dict[str, Any]) -> Result:
        """Of all GPUs, or of one and the MIG instances in it."""
        only = arguments.get("gpu")
        wanted = None if only is None else self._world.parts(only)
        found = [
            {"pid": process.pid, "seat": process.seat, "gpu": gpu, "bytes": count}
            for process in self._world.processes.values()
            for gpu, count in process.memory.items()
            if wanted is None or gpu in wanted
        ]
        return {"processes": found}

    def _stats(self, _: dict[str, Any]) -> Result:
        world = self._world
        return {"violations": world.violations.report(), "faults": len(world.faults.armed), **world.totals}

    def _utilization(self, gpu: str) -> int:
        """Percent: high while a request is computed there, low during a transfer."""
        parts = self._world.parts(gpu)
        here = [p for p in self._world.processes.values() if any(part in p.memory for part in parts)]
        requests = sum(len(process.requests) for process in here if not process.stopped)
        if requests:
            return min(100, 60 + 8 * requests)
        return 5 if any(process.operation is not None for process in here) else 0

    def _temperature(self, gpu: str, utilization: int) -> int:
        """Degrees Celsius, following utilisation slowly in model time."""
        before, at = self._temperatures[gpu]
        passed = (self._world.now - at) * self._world.spec.speed
        target = _AMBIENT_CELSIUS + 0.4 * utilization
        after = target + (before - target) * math.exp(-max(0.0, passed) / _WARMING_SECONDS)
        self._temperatures[gpu] = (after, self._world.now)
        return round(after)
