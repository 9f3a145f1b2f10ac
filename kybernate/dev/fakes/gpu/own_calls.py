"""What a process asks of the driver for itself: memory, and computing a request. Pure.

Calls of a locked or parked process wait until it runs again, as CUDA calls do.
"""

from collections.abc import Callable

from kybernate.dev.fakes.gpu.arguments import integer, text, texts
from kybernate.dev.fakes.gpu.codes import Code, State
from kybernate.dev.fakes.gpu.process import Call, Caller, Process, RefusedError
from kybernate.dev.fakes.gpu.violations import Kind
from kybernate.dev.fakes.gpu.world import Result, World


class OwnCalls:
    """attach, alloc, free, memory, touch, synchronize, mark, begin, end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.table: dict[str, Callable[[Process, Call], Result | None]] = {
            "alloc": self._alloc,
            "free": self._free,
            "memory": self._memory,
            "touch": lambda process, call: None if self._waits(process, call) else {},
            "synchronize": self._synchronize,
            "mark": self._mark,
            "begin": self._begin,
            "end": self._end,
        }

    def attach(self, call: Call, caller: Caller) -> Result:
        """The caller becomes a process that uses CUDA."""
        seat = text(call.arguments, "seat", default=f"process/{caller.pid}")
        process = self._world.processes.get(caller.pid)
        if process is None:
            process = self._world.processes[caller.pid] = Process(caller.pid, caller.start, seat)
        elif process.seat != seat:
            raise RefusedError(Code.INVALID_VALUE, f"process {caller.pid} is attached as {process.seat}, not {seat}")
        process.watch = process.watch or bool(call.arguments.get("watch"))
        if call.arguments.get("device_nodes") is not None:
            process.device_nodes = frozenset(texts(call.arguments, "device_nodes"))
        if "communicator" in call.arguments:
            process.communicator = text(call.arguments, "communicator")
        return {"pid": process.pid, "state": process.state.value}

    def run(self, call: Call, caller: Caller) -> Result | None:
        """One of the table's calls; None: it waits."""
        process = self._world.processes.get(caller.pid)
        if process is None:
            raise RefusedError(Code.NOT_INITIALIZED, f"process {caller.pid} calls {call.name} before attach")
        if self._world.faults.take("hang", process, call.name) is not None:
            return None
        return self.table[call.name](process, call)

    def resume(self, process: Process) -> None:
        """The process runs again: so do its calls, in order."""
        waiting, process.blocked = list(process.blocked), type(process.blocked)()
        for call in waiting:
            self._world.attempt(call, lambda call=call: self.table[call.name](process, call))  # type: ignore[misc]

    def _alloc(self, process: Process, call: Call) -> Result | None:
        gpu, count = self._gpu(process, call), integer(call.arguments, "bytes")
        if self._waits(process, call):
            return None
        free = self._world.free_bytes(gpu)
        if count > free:
            raise RefusedError(Code.OUT_OF_MEMORY, f"{count} bytes wanted on {gpu}, {free} are free")
        process.memory[gpu] = process.memory.get(gpu, 0) + count
        process.peak_bytes = max(process.peak_bytes, process.used_bytes)
        self._world.memory_changed(process.memory)
        return {"gpu": gpu, "bytes": process.memory[gpu]}

    def _free(self, process: Process, call: Call) -> Result | None:
        gpu = self._gpu(process, call)
        if self._waits(process, call):
            return None
        held = process.memory.get(gpu, 0)
        count = integer(call.arguments, "bytes", default=held)
        if count > held:
            raise RefusedError(Code.INVALID_VALUE, f"{count} bytes on {gpu}, the process holds {held}")
        process.memory[gpu] = held - count
        self._world.memory_changed(process.memory)
        return {"gpu": gpu, "bytes": process.memory[gpu]}

    def _memory(self, process: Process, call: Call) -> Result | None:
        gpu = self._gpu(process, call)
        if self._waits(process, call):
            return None
        return {"free_bytes": self._world.free_bytes(gpu), "total_bytes": self._world.capacity[gpu]}

    def _synchronize(self, process: Process, call: Call) -> Result | None:
        """Wait for the GPU's work. Measured on drivers 580 and 595: of a locked process it returns at once, and as the
        first call of a parked process it crashes in the library (``crash``: the stub does that)."""
        if process.state is State.CHECKPOINTED and not process.blocked:
            return {"crash": True}
        if process.state in (State.RUNNING, State.LOCKED):
            return {"crash": False}
        return None if self._waits(process, call) else {}

    def _mark(self, process: Process, call: Call) -> Result:
        """What the process uses that stands in the way of a checkpoint; null ends a communicator."""
        arguments = call.arguments
        process.ipc = bool(arguments.get("ipc", process.ipc))
        process.managed = bool(arguments.get("managed", process.managed))
        if "communicator" in arguments:
            named = arguments["communicator"] is not None
            process.communicator = text(arguments, "communicator") if named else None
        return {"ipc": process.ipc, "managed": process.managed, "communicator": process.communicator}

    def _begin(self, process: Process, call: Call) -> Result | None:
        request = text(call.arguments, "request")
        process.freezable = bool(call.arguments.get("freezable", False))
        if process.state is not State.RUNNING and not process.freezable:
            why = f"request {request} begun while {process.state}"
            self._world.violated(Kind.REQUEST_NOT_RUNNING, process, why)
        if self._waits(process, call):
            return None
        if process.asleep:
            why = f"request {request} begun with {process.used_bytes} of {process.peak_bytes} bytes on the GPUs"
            self._world.violated(Kind.REQUEST_WITHOUT_MEMORY, process, why)
            raise RefusedError(Code.ILLEGAL_STATE, why)
        if request in process.requests:
            raise RefusedError(Code.INVALID_VALUE, f"request {request} is already being computed")
        process.requests.add(request)
        self._world.totals["requests"] += 1
        return {}

    def _end(self, process: Process, call: Call) -> Result:
        request = text(call.arguments, "request")
        if request in process.requests:
            process.requests.remove(request)
            return {}
        for begin in process.blocked:
            if begin.name == "begin" and begin.arguments["request"] == request:
                process.blocked.remove(begin)
                self._world.refuse(begin, Code.ILLEGAL_STATE, f"request {request} ended before it was computed")
                return {}
        raise RefusedError(Code.INVALID_VALUE, f"request {request} is not being computed")

    def _waits(self, process: Process, call: Call) -> bool:
        if process.state is State.FAILED:
            raise RefusedError(Code.ILLEGAL_STATE, "the process is lost: a restore had no room, or a fatal XID")
        if process.state is State.RUNNING:
            return False
        process.blocked.append(call)
        return True

    def _gpu(self, process: Process, call: Call) -> str:
        """The GPU that the process means: after a restore with a map it still says the old name."""
        gpu = text(call.arguments, "gpu")
        if gpu not in self._world.capacity:
            raise RefusedError(Code.INVALID_VALUE, f"no GPU {gpu!r}; GPUs are {', '.join(self._world.capacity)}")
        return process.moved.get(gpu, gpu)
