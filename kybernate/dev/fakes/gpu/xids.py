"""What befalls GPUs: XID events, and who waits for them; falling off the bus; NVML functions that fail. Pure."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from kybernate.dev.fakes.gpu.arguments import integer, text
from kybernate.dev.fakes.gpu.codes import Code, State
from kybernate.dev.fakes.gpu.process import Answer, Call, RefusedError
from kybernate.dev.fakes.gpu.world import Result, World

FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
"""XIDs after which the processes on the GPU compute no more."""
_OFF_THE_BUS = 79
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: Call
    after: int
    until: float


class Xids:
    """All events so far, numbered from 1, and who waits for the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._waiting: list[_Waiting] = []

    def wait(self, call: Call) -> Result | None:
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
        """When ``expire`` has something to do; infinite if nobody waits."""
        return min((one.until for one in self._waiting), default=math.inf)

    def inject(self, call: Call) -> Result:
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
