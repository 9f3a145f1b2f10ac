"""What can be read of the GPUs, XID events and their waiters, lost GPUs, NVML functions that fail. Pure."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kybernate.dev.fakes.gpu.process import Answer, Code, DriverCall, RefusedError, State, integer, text
from kybernate.dev.fakes.gpu.world import Result, World
from kybernate.machine import Gpu

_AMBIENT_CELSIUS = 34.0
_WARMING_SECONDS = 8.0
_IDLE_WATTS = 70
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
            "power": _IDLE_WATTS + 3 * utilization,
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


FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
"""XIDs after which the processes on the GPU compute no more."""
_OFF_THE_BUS = 79
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: DriverCall
    after: int
    until: float


class Xids:
    """All events so far, numbered from 1, and who waits for the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._waiting: list[_Waiting] = []

    def wait(self, call: DriverCall) -> Result | None:
        """``wait_xid``: events with a number above ``after``, at once or when the first comes.

        ``timeout_ms`` (wall) bounds the wait; nothing then. Without ``after`` only what comes from now on counts.
        """
        after = integer(call.arguments, "after", self._last)
        timeout_seconds = integer(call.arguments, "timeout_ms", 0) / 1000
        found = self._found(after)
        if found or not timeout_seconds:
            return {"events": found, "last": self._last}
        self._waiting.append(_Waiting(call, after, self._world.now + timeout_seconds))
        return None

    def expire(self) -> None:
        """Answer those who waited long enough."""
        for one in [one for one in self._waiting if one.until <= self._world.now]:
            self._waiting.remove(one)
            self._world.effects.append(Answer(one.call.token, Code.SUCCESS, {"events": [], "last": self._last}))

    def next_time(self) -> float:
        """When ``expire`` has something to do; infinite without a waiting call."""
        return min((one.until for one in self._waiting), default=math.inf)

    def inject(self, call: DriverCall) -> Result:
        """The faults ``xid``, ``lost``, ``found`` and ``nvml``."""
        fault = call.arguments["fault"]
        gpu = text(call.arguments, "gpu") if fault != "xid" or call.arguments.get("gpu") is not None else None
        if gpu is not None and gpu not in self._world.xids:
            raise RefusedError(Code.INVALID_VALUE, f"no GPU {gpu!r}; GPUs are {', '.join(self._world.xids)}")
        if fault == "xid":
            self._happened(gpu, integer(call.arguments, "xid"))
            return {}
        if fault == "nvml" and gpu is not None:
            self._world.nvml_codes[gpu][text(call.arguments, "function")] = integer(call.arguments, "code")
            return {}
        if gpu not in {one.uuid for one in self._world.spec.gpus}:
            raise RefusedError(Code.INVALID_VALUE, f"{gpu} is a MIG instance; only a whole GPU can be {fault}")
        if fault == "found":
            self._world.lost.discard(gpu)
        elif gpu not in self._world.lost:
            self._happened(gpu, _OFF_THE_BUS)
            self._world.lost.add(gpu)
        return {}

    def _happened(self, gpu: str | None, xid: int) -> None:
        """An event; one without a GPU is one that the driver could not place."""
        self._last += 1
        self._events.append({"number": self._last, "gpu": gpu, "xid": xid})
        if gpu is not None:
            self._world.xids[gpu].append(xid)
            self._lose_processes(gpu, xid)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            result = {"events": self._found(one.after), "last": self._last}
            self._world.effects.append(Answer(one.call.token, Code.SUCCESS, result))

    def _lose_processes(self, gpu: str, xid: int) -> None:
        touched = self._world.parts(gpu)
        for process in self._world.processes.values():
            if xid in FATAL_XIDS and any(process.memory.get(part, 0) > 0 for part in touched):
                self._world.enter(process, State.FAILED)

    def _found(self, after: int) -> list[dict[str, Any]]:
        return [event for event in self._events if event["number"] > after]
