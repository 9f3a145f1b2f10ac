"""The NVML side: what can be read of the machine, and what it counted. Pure."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kybernate.fakes.gpu.world import Result, World
from kybernate.machine import Gpu

_AMBIENT_CELSIUS = 34.0
_WARMING_SECONDS = 8.0


class Readings:
    """devices, processes, links, host, stats."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._temperatures = dict.fromkeys([gpu.uuid for gpu in world.spec.gpus], (_AMBIENT_CELSIUS, 0.0))
        self.table: dict[str, Callable[[dict[str, Any]], Result]] = {
            "devices": self._devices,
            "processes": self._processes,
            "links": self._links,
            "host": lambda _: {"memory_bytes": world.spec.host_memory_bytes, "used_bytes": world.parked_bytes()},
            "stats": self._stats,
        }

    def _devices(self, _: dict[str, Any]) -> Result:
        """GPUs in index order; those that are lost too, marked so, and MIG instances beside them."""
        spec = self._world.spec
        gpus = [asdict(gpu) | self._readings(gpu.uuid) | self._lost(gpu.uuid) for gpu in spec.gpus]
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
        return {"used_bytes": used, "xids": self._world.xids[instance.uuid], **self._lost(parent)}

    def _lost(self, gpu: str) -> dict[str, bool]:
        return {"lost": gpu in self._world.lost}

    def _links(self, _: dict[str, Any]) -> Result:
        """Every pair of GPUs once; ``kind`` is the fastest way between the two."""
        found = []
        for link in self._world.spec.links:
            kind = "nvswitch" if link.switched else "nvlink" if link.nvlinks else "pcie"
            found.append({"kind": kind, **asdict(link)})
        return {"links": found}

    def _processes(self, arguments: dict[str, Any]) -> Result:
        only = arguments.get("gpu")
        found = [
            {"pid": process.pid, "seat": process.seat, "gpu": gpu, "bytes": count}
            for process in self._world.processes.values()
            for gpu, count in process.memory.items()
            if only in (None, gpu)
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
