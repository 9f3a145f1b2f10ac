"""The driver's calls: those of a process for itself, and the checkpoint verbs of others. Pure."""

import math
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from kybernate.dev.fakes.gpu.process import (
    Answer,
    Caller,
    CallTarget,
    Code,
    CudaProcess,
    DriverCall,
    Kill,
    Operation,
    RefusedError,
    State,
    gpu_permutation,
    integer,
    text,
    texts,
)
from kybernate.dev.fakes.gpu.world import Kind, Peers, Result, World


class OwnCalls:
    """attach, alloc, free, memory, touch, synchronize, mark, begin, end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.table: dict[str, Callable[[CudaProcess, DriverCall], Result | None]] = {
            "alloc": self._alloc,
            "free": self._free,
            "memory": self._memory,
            "touch": lambda process, call: None if self._waits(process, call) else {},
            "synchronize": self._synchronize,
            "mark": lambda process, call: self._mark(process, call.arguments),
            "begin": self._begin,
            "end": self._end,
        }

    def attach(self, call: DriverCall, caller: Caller) -> Result:
        """The caller becomes a process that uses CUDA; with ``initialized`` one that called cuInit and no more."""
        seat = text(call.arguments, "seat", default=f"process/{caller.pid}")
        process = self._world.processes.get(caller.pid)
        if process is None:
            process = self._world.processes[caller.pid] = CudaProcess(caller.pid, caller.start, seat)
            process.initialized_only = bool(call.arguments.get("initialized"))
        elif process.seat != seat:
            raise RefusedError(Code.INVALID_VALUE, f"process {caller.pid} is attached as {process.seat}, not {seat}")
        process.watch = process.watch or bool(call.arguments.get("watch"))
        if call.arguments.get("device_nodes") is not None:
            process.device_nodes = frozenset(texts(call.arguments, "device_nodes"))
        if "communicator" in call.arguments:
            process.communicator = text(call.arguments, "communicator")
        if call.arguments.get("initialized"):
            process.memory = process.memory or dict.fromkeys(
                (process.device_nodes or set()) & self._world.capacity.keys(), 0
            )
        elif process.initialized_only:  # its first context: from now on it is listed where it has one
            process.initialized_only, process.memory = False, {}
        return {"pid": process.pid, "state": process.state.value}

    def run(self, call: DriverCall, caller: Caller) -> Result | None:
        """One of the table's calls; None: it waits."""
        process = self._world.processes.get(caller.pid)
        if process is None:
            raise RefusedError(Code.NOT_INITIALIZED, f"process {caller.pid} calls {call.name} before attach")
        if self._world.faults.take("hang", process, call.name) is not None:
            return None
        if process.dead and call.name not in ("mark", "end"):
            if call.name == "begin":
                self._world.violated(Kind.REQUEST_NOT_RUNNING, process, "a request begun after a failed checkpoint")
            raise RefusedError(Code.UNKNOWN, "a checkpoint of this process failed, and with it its contexts")
        return self.table[call.name](process, call)

    def resume(self, process: CudaProcess) -> None:
        """The process runs again: so do its calls, in order."""
        waiting, process.blocked = list(process.blocked), type(process.blocked)()
        for call in waiting:
            self._world.attempt(call, lambda call=call: self.table[call.name](process, call))  # type: ignore[misc]

    def _alloc(self, process: CudaProcess, call: DriverCall) -> Result | None:
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

    def _free(self, process: CudaProcess, call: DriverCall) -> Result | None:
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

    def _memory(self, process: CudaProcess, call: DriverCall) -> Result | None:
        gpu = self._gpu(process, call)
        if self._waits(process, call):
            return None
        return {"free_bytes": self._world.free_bytes(gpu), "total_bytes": self._world.capacity[gpu]}

    def _synchronize(self, process: CudaProcess, call: DriverCall) -> Result | None:
        """Wait for the GPU's work. Measured on drivers 580 and 595: of a locked process it returns at once, and as the
        first call of a parked process it crashes in the library (``crash``: the stub does that)."""
        if process.state is State.CHECKPOINTED and not process.blocked:
            return {"crash": True}
        if process.state in (State.RUNNING, State.LOCKED):
            return {"crash": False}
        return None if self._waits(process, call) else {}

    def mark(self, pid: int, marks: dict[str, Any]) -> Result:
        """As ``mark`` of the process itself, from outside. Raises RefusedError."""
        process = self._world.processes.get(pid)
        if process is None:
            raise RefusedError(Code.OPERATING_SYSTEM, f"no process {pid}")
        return self._mark(process, marks)

    def _mark(self, process: CudaProcess, arguments: dict[str, Any]) -> Result:
        """What the process uses that stands in the way of a checkpoint; null ends a communicator."""
        process.ipc = bool(arguments.get("ipc", process.ipc))
        process.managed = bool(arguments.get("managed", process.managed))
        process.stale = bool(arguments.get("stale", process.stale))
        if "communicator" in arguments:
            named = arguments["communicator"] is not None
            process.communicator = text(arguments, "communicator") if named else None
        return {"ipc": process.ipc, "managed": process.managed, "communicator": process.communicator}

    def _begin(self, process: CudaProcess, call: DriverCall) -> Result | None:
        request = text(call.arguments, "request")
        if process.state is not State.RUNNING:
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

    def _end(self, process: CudaProcess, call: DriverCall) -> Result:
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

    def _waits(self, process: CudaProcess, call: DriverCall) -> bool:
        if process.state is State.FAILED or process.spent:
            raise RefusedError(Code.ILLEGAL_STATE, "the process is lost: a restore failed for good, or a fatal XID")
        if process.state is State.RUNNING:
            return False
        process.blocked.append(call)
        return True

    def _gpu(self, process: CudaProcess, call: DriverCall) -> str:
        """The GPU that the process means: after a restore with a map it still says the old name."""
        gpu = text(call.arguments, "gpu")
        if gpu not in self._world.capacity:
            raise RefusedError(Code.INVALID_VALUE, f"no GPU {gpu!r}; GPUs are {', '.join(self._world.capacity)}")
        gpu = process.moved.get(gpu, gpu)
        if process.device_nodes is not None and gpu not in process.device_nodes:
            raise RefusedError(Code.INVALID_DEVICE, f"process {process.pid} has no device node of {gpu}")
        return gpu


class Verbs:
    """Calls about a process, from any caller. They queue: one operation per process, none while it is stopped."""

    def __init__(self, world: World, own_calls: OwnCalls) -> None:
        self._world = world
        self._own_calls = own_calls
        self._peers = Peers(world)
        self.table: dict[str, Callable[[CudaProcess, DriverCall], Result | None]] = {
            "get_state": lambda process, _: {"state": process.state.value},
            "get_restore_tid": lambda process, _: {"tid": process.pid},
            "lock": self._lock,
            "checkpoint": self._checkpoint,
            "restore": self._restore,
            "unlock": self._unlock,
        }

    def run(self, call: DriverCall, target: CallTarget) -> Result | None:
        """A call came in; None: the answer comes with ``advance`` or ``finish_due``, or never."""
        pid = integer(call.arguments, "pid")
        process = self._world.processes.get(pid)
        if process is None and not target.exists:
            raise RefusedError(Code.OPERATING_SYSTEM, f"no process {pid}")
        if process is None or target.zombie:
            raise RefusedError(Code.NOT_INITIALIZED, f"process {pid} does not use the GPU driver")
        if call.name == "get_restore_tid":
            return self._perform(process, call)
        process.stopped = target.stopped
        self.advance(process)  # what waited for SIGCONT comes before this call
        if call.name != "get_state" and "epoch" in call.arguments:  # real drivers know no epochs
            self._check_epoch(process, call)
        transfer = call.name in ("checkpoint", "restore")  # these hang midway, so that queries wait for them as well
        if not transfer and self._world.faults.take("hang", process, call.name) is not None:
            return None
        if call.name == "get_state" and self._hangs(process):
            return {"state": process.state.value}
        process.verbs.append(call)
        self.advance(process)
        return None

    def advance(self, process: CudaProcess) -> None:
        """Run the calls that wait for this process, as far as possible."""
        while process.verbs and process.operation is None and not process.stopped and not self._hangs(process):
            call = process.verbs.popleft()
            self._world.attempt(call, lambda call=call: self._perform(process, call))  # type: ignore[misc]

    def _perform(self, process: CudaProcess, call: DriverCall) -> Result | None:
        """The call, unless it was injected that it fails (``fail``: without effect; ``lose``: for good)."""
        faults = self._world.faults
        if (code := faults.take("fail", process, call.name)) is not None:
            raise RefusedError(Code(int(code)), "injected fault")
        if (code := faults.take("lose", process, call.name)) is not None:
            self._world.enter(process, State.FAILED)
            raise RefusedError(Code(int(code)), "injected fault; the process is lost for good, kill it")
        return self.table[call.name](process, call)

    def advance_held_up(self) -> None:
        """Whatever happened to other ranks: locks that hung on them go on, if nothing holds them up any more."""
        for process in tuple(self._world.processes.values()):
            self.advance(process)

    def _hangs(self, process: CudaProcess) -> bool:
        """Whether the next call is a lock that another rank of its communicator holds up."""
        locks = bool(process.verbs) and process.verbs[0].name == "lock"
        return locks and not process.stopped and self._peers.hold_up(process)

    def finish_due(self, process: CudaProcess) -> None:
        """End an operation whose time has come; a stopped process comes to no end."""
        operation = process.operation
        if operation is None or process.stopped or operation.ends_at > self._world.now:
            return
        if operation.kills:
            operation.ends_at = math.inf
            self._world.effects.append(Kill(process.pid))
            return
        process.operation = None
        if process.state is State.FAILED:  # a fatal XID came meanwhile
            operation.code = Code.OPERATING_SYSTEM
        if operation.code is Code.SUCCESS:
            self._complete(process, operation.call.name)
        self._world.effects.append(Answer(operation.call.token, operation.code, {}))
        self.advance(process)

    def _complete(self, process: CudaProcess, verb: str) -> None:
        world = self._world
        if verb == "checkpoint":
            gpus, process.parked, process.memory = process.memory, process.memory, {}
            world.totals["checkpoints"] += 1
            world.enter(process, State.CHECKPOINTED)
            world.memory_changed(gpus)
        elif verb == "restore":
            process.parked, process.restored = {}, True
            world.totals["restores"] += 1
            world.enter(process, State.LOCKED)
        else:
            world.enter(process, State.LOCKED)

    def _lock(self, process: CudaProcess, call: DriverCall) -> Result | None:
        if process.initialized_only:
            raise RefusedError(Code.NOT_INITIALIZED, f"process {process.pid} has no context")
        timeout_seconds = integer(call.arguments, "timeout_ms", default=0) / 1000 or math.inf
        _need(process, State.RUNNING, call)
        world = self._world
        if world.faults.take("segfault-on-lock", process) is not None:
            process.operation = Operation(call, math.inf)  # ends with the process
            world.effects.append(Kill(process.pid, signal.SIGSEGV))
            return None
        busy = world.faults.take("busy", process)
        if busy is not None:
            process.busy_until = world.now + busy / world.spec.speed
        wait_seconds = process.busy_until - world.now
        if wait_seconds <= 0:
            world.enter(process, State.LOCKED)
            return {}
        code = Code.SUCCESS if wait_seconds <= timeout_seconds else Code.NOT_READY
        process.operation = Operation(call, world.now + min(wait_seconds, timeout_seconds), code)
        return None

    def _checkpoint(self, process: CudaProcess, call: DriverCall) -> None:
        _need(process, State.LOCKED, call)
        self._refuse_what_cannot_park(process)
        world = self._world
        for request in sorted(process.requests):
            world.violated(Kind.CHECKPOINT_WITH_REQUEST, process, f"request {request} is being computed")
        count, copies, room = process.used_bytes, self._copied_bytes(), world.spec.host_memory_bytes
        operation = self._transfer(process, call, count)
        if copies + count > room:
            why = f"{count} bytes to copy beside {copies} of other parked processes; the host has {room}"
            world.violated(Kind.CHECKPOINT_WITHOUT_HOST_MEMORY, process, why)
        if copies + count > room:
            self._die_midway(operation)

    def _restore(self, process: CudaProcess, call: DriverCall) -> None:
        if process.state is State.FAILED or process.spent:
            raise RefusedError(Code.OPERATING_SYSTEM, "an earlier restore failed for good; kill the process")
        _need(process, State.CHECKPOINTED, call)
        if process.stale:
            raise RefusedError(Code.INVALID_VALUE, "its context is that of the process it was forked from")
        world = self._world
        moves = gpu_permutation(call.arguments, [gpu.uuid for gpu in world.spec.gpus])
        wanted = {moves[gpu]: count for gpu, count in process.parked.items()}
        usable = set(world.capacity) if process.device_nodes is None else process.device_nodes & world.capacity.keys()
        if absent := sorted(set(wanted) - usable):
            why = f"process {process.pid} has no device node of {', '.join(absent)}, or they are in MIG mode"
            raise RefusedError(Code.NOT_SUPPORTED, why)
        short = sorted(gpu for gpu, count in wanted.items() if count > world.free_bytes(gpu))
        if world.faults.take("oom", process) is not None or short:
            text = f"no room on {', '.join(short)}" if short else "injected fault"
            process.spent = True
            self._lose(process, wanted, short, RefusedError(Code.OUT_OF_MEMORY, text))
        if self._peers.others(process):
            text = f"ranks of communicator {process.communicator} live"
            self._lose(process, wanted, [], RefusedError(Code.UNKNOWN, text))
        process.memory = wanted
        process.moved = {gpu: moves.get(at := process.moved.get(gpu, gpu), at) for gpu in world.capacity}
        moved = any(moves[gpu] != gpu for gpu in process.parked)
        self._transfer(process, call, sum(wanted.values()), world.spec.move_seconds if moved else 0.0)
        world.memory_changed(wanted)

    def _refuse_what_cannot_park(self, process: CudaProcess) -> None:
        """The driver has no checkpoint of these. The process stays locked and can be unlocked, but its contexts are
        dead: NVIDIA's tool does not try to keep a process in a good state, and 595 does not."""
        mig = any(gpu.startswith("MIG-") for gpu in process.memory)
        process.dead = process.dead or mig or process.ipc or process.managed
        if mig:
            raise RefusedError(Code.OUT_OF_MEMORY, "out of memory")  # misleading, as the driver's own answer is
        if process.ipc:
            raise RefusedError(Code.NOT_SUPPORTED, f"process {process.pid} shares memory by CUDA IPC")
        if process.managed:
            raise RefusedError(Code.NOT_SUPPORTED, f"process {process.pid} uses managed memory")

    def _lose(self, process: CudaProcess, wanted: dict[str, int], short: list[str], why: RefusedError) -> NoReturn:
        """Without room a real driver loses the process, and what it got until then stays held."""
        world = self._world
        for gpu in short:
            detail = f"restore wants {wanted[gpu]} bytes on {gpu}, {world.free_bytes(gpu)} are free"
            world.violated(Kind.RESTORE_WITHOUT_ROOM, process, detail, gpu)
        process.memory = {gpu: min(count, world.free_bytes(gpu)) // 2 for gpu, count in wanted.items()}
        process.parked = {}
        if not process.spent:
            world.enter(process, State.FAILED)
        world.memory_changed(wanted, punish=False)
        raise RefusedError(why.code, f"{why.text}; the process is lost for good, kill it")

    def _unlock(self, process: CudaProcess, call: DriverCall) -> Result:
        _need(process, State.LOCKED, call)
        self._world.enter(process, State.RUNNING)
        self._own_calls.resume(process)
        return {}

    def _transfer(self, process: CudaProcess, call: DriverCall, count: int, more_seconds: float = 0.0) -> Operation:
        world, spec = self._world, self._world.spec
        slowness = world.faults.slowness(process) / spec.speed
        copied_at = world.now + count / spec.bandwidth * slowness
        if world.faults.take("hang", process, call.name) is not None:
            copied_at = math.inf
        ends_at = copied_at + spec.overhead_seconds * slowness + more_seconds / spec.speed
        process.operation = Operation(call, ends_at, copied_at=copied_at)
        if world.faults.take(f"die-mid-{call.name}", process) is not None:
            self._die_midway(process.operation)
        return process.operation

    def _die_midway(self, operation: Operation) -> None:
        if not operation.kills:
            operation.ends_at, operation.kills = (self._world.now + operation.ends_at) / 2, True

    def _copied_bytes(self) -> int:
        """Host memory that is taken, or will be when the checkpoints under way have ended."""
        transfers = [p for p in self._world.processes.values() if p.operation and p.operation.call.name == "checkpoint"]
        return self._world.parked_bytes() + sum(process.used_bytes for process in transfers)

    def _check_epoch(self, process: CudaProcess, call: DriverCall) -> None:
        world, epoch = self._world, integer(call.arguments, "epoch")
        moves = gpu_permutation(call.arguments, [gpu.uuid for gpu in world.spec.gpus])
        # Where it goes: what it held before is another one's matter, who may have got it long ago.
        gpus = {moves.get(gpu, gpu) for gpu in (*process.memory, *process.parked)} & world.capacity.keys()
        for gpu in sorted(gpus):
            if epoch < world.epochs[gpu]:
                why = f"{call.name} with epoch {epoch}; {gpu} has seen {world.epochs[gpu]}"
                world.violated(Kind.STALE_EPOCH, process, why, gpu)
                raise RefusedError(Code.ILLEGAL_STATE, why)
        for gpu in gpus:
            world.epochs[gpu] = epoch


def _need(process: CudaProcess, state: State, call: DriverCall) -> None:
    if process.state is not state:
        raise RefusedError(Code.ILLEGAL_STATE, f"{call.name} needs {state}, process {process.pid} is {process.state}")
