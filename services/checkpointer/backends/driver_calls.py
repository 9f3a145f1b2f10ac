"""Driver calls through a helper: deadlines, result codes as errors, the identity of a process checked before each."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from kybernate import deadlines
from kybernate.cuda import CudaResult
from services.checkpointer.backends.port import Member, SeatProcesses
from services.checkpointer.core.failures import ProcessState, StepFailedError, StepTrouble, Verb
from services.checkpointer.core.refusals import DriverInfo, driver_from
from services.checkpointer.helper.serving import UNREACHABLE
from services.checkpointer.helper_pool import HelperCall, HelperDiedError, HelperHungError, HelperPool
from services.checkpointer.processes import ProcessIdentity, alive

_TROUBLES = {
    CudaResult.NOT_READY: StepTrouble.NOT_READY,
    CudaResult.ILLEGAL_STATE: StepTrouble.ILLEGAL,
    CudaResult.OUT_OF_MEMORY: StepTrouble.OUT_OF_MEMORY,
    CudaResult.OPERATING_SYSTEM: StepTrouble.OPERATING_SYSTEM,
}

_ABOUT_A_PROCESS = frozenset(str(verb) for verb in (Verb.STATE, Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK))
"""Calls that may hang because of the process that they name."""

_HINTS = {
    ("state", CudaResult.OPERATING_SYSTEM): "may the checkpointer look into it? it needs hostPID: true and SYS_PTRACE",
    ("lock", CudaResult.NOT_SUPPORTED): "managed memory, CUDA IPC, MIG or MPS cannot be checkpointed",
    ("checkpoint", CudaResult.NOT_SUPPORTED): "managed memory, CUDA IPC, MIG or MPS cannot be checkpointed",
    ("checkpoint", CudaResult.OUT_OF_MEMORY): "host memory, or MIG, which the driver reports so",
    ("restore", CudaResult.NOT_SUPPORTED): "is the GPU's device node in the container?",
}
"""Likely cause of a result code, by verb: docs/dev/checkpointer.md, Hazards."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of driver calls, after which they count as hung. Fields in model seconds, results in wall seconds."""

    lock_seconds: float = 10.0
    """Time for submitted GPU work to finish; passed to the driver."""
    base_seconds: float = deadlines.BASE_SECONDS
    seconds_per_gib: float = deadlines.SECONDS_PER_GIB
    settle_seconds: float = 5.0
    """Time for memory to show as free after a call."""
    slack_seconds: float = 5.0
    """Added to the driver's own time-out; also the deadline of a quick look at a state."""
    read_seconds: float = 30.0
    """Deadline of readings (NVML, restore threads), which stall while the driver's locks are contended."""
    floor_wall_seconds: float = deadlines.FLOOR_SECONDS
    """Minimum of every deadline, so that a busy machine does not look like a hang."""
    settle_floor_wall_seconds: float = 2.0
    """Minimum of ``settle``."""
    speed: float = 1.0

    def wall(self, model_seconds: float) -> float:
        """Convert a deadline to wall seconds, with the floor."""
        return max(model_seconds / self.speed, self.floor_wall_seconds)

    def transfer(self, vram_bytes: int) -> float:
        """Deadline of a checkpoint, a restore, or a state read during one, beside a half."""
        seconds = deadlines.transfer(vram_bytes, self.speed, self.base_seconds, self.seconds_per_gib)
        return max(seconds, self.floor_wall_seconds)

    def half(self, seat: SeatProcesses) -> float:
        """Deadline of all transfers of a half in one direction, with the states that are read among them."""
        longest = self.transfer(seat.vram_bytes) + len(seat.target.gpus) * self.base_seconds / self.speed
        return deadlines.learned(longest, seat.target.usual_seconds)

    def settle(self) -> float:
        """Time for memory to show as free, and for a control group to freeze."""
        return max(self.settle_seconds / self.speed, self.settle_floor_wall_seconds)

    def lock_timeout(self) -> float:
        """The driver's own time-out for submitted work."""
        return max(self.lock_seconds / self.speed, self.floor_wall_seconds / 2)

    def lock(self) -> float:
        """Deadline of a lock; always above the driver's own time-out."""
        return self.lock_timeout() + self.wall(self.slack_seconds)


class Use(NamedTuple):
    """One process on one GPU, as the driver lists it."""

    pid: int
    gpu: str
    size: int | None
    """Bytes; None if the driver does not report them."""
    seat: str
    """Seat of the process; only the fake driver reports it, otherwise empty."""

    @property
    def holds(self) -> bool:
        """True if it may hold memory. NVML also lists processes with 0 bytes, which prove nothing."""
        return self.size is None or self.size > 0


class Usage(NamedTuple):
    """Who uses the GPUs, and how much of their memory is in use, read together."""

    uses: list[Use]
    memory: dict[str, tuple[int, int]]
    """(bytes in use, total bytes) by GPU."""


@dataclass
class DriverCalls:
    """Typed driver calls. ``key`` selects the helper that makes the call. All raise StepFailedError."""

    pool: HelperPool
    timeouts: Timeouts
    known: DriverInfo | None = None
    """The driver as last described: the health probe describes it every few seconds, a GPU in use does not change its
    MIG mode, and no driver is replaced under the helpers. None before the first answer."""

    async def state(self, key: str, member: Member, seconds: float = 0.0) -> ProcessState:
        """State of a process. Blocks during a checkpoint or restore of it, for so many wall seconds at most; 0: for a
        moment."""
        if not alive(member.who):
            return ProcessState.GONE
        return self._state_in(await self._call(key, self._state_of(member, self.seconds_left(seconds))), member)

    def seconds_left(self, seconds: float) -> float:
        """Wall seconds for a look at a state, with the floor."""
        return max(seconds, self.timeouts.wall(self.timeouts.slack_seconds))

    async def states_and_usage(
        self, key: str, members: Sequence[Member], gpus: Iterable[str] | None
    ) -> tuple[list[ProcessState], Usage]:
        """The state of each process and then ``usage``, in one exchange with the helper."""
        living = [member for member in members if alive(member.who)]
        *states, last = await self._calls(
            key,
            [*(self._state_of(one, self.timeouts.transfer(one.total)) for one in living), self._reading("usage", gpus)],
        )
        known = {member.who: self._state_in(reply, member) for member, reply in zip(living, states, strict=True)}
        return [known.get(member.who, ProcessState.GONE) for member in members], self._usage(last)

    def _state_of(self, member: Member, seconds: float) -> HelperCall:
        return HelperCall("state", seconds, {"pid": member.who.pid})

    def _state_in(self, reply: dict[str, Any], member: Member) -> ProcessState:
        if reply["code"] == CudaResult.NOT_INITIALIZED or not alive(member.who):
            return ProcessState.GONE
        self._check(reply, "state", member.who)
        try:
            return ProcessState(str(reply["state"]))
        except ValueError:
            text = f"pid {member.who.pid} is in the unknown state {reply['state']}"
            raise StepFailedError(text) from None

    async def move(
        self, key: str, verb: Verb, member: Member, epoch: int, seconds: float, gpu_map: dict[str, str] | None = None
    ) -> None:
        """Lock, checkpoint, restore or unlock one process, after a check that its pid was not reused.

        ``seconds``: wall, of a checkpoint or restore. ``gpu_map``: for a restore to other GPUs, old → new for every GPU
        of the machine.
        """
        if not alive(member.who):
            raise StepFailedError(f"pid {member.who.pid} is gone", StepTrouble.GONE)
        arguments: dict[str, Any] = {"pid": member.who.pid, "epoch": epoch}
        if gpu_map is not None:
            arguments["gpu_map"] = gpu_map
        match verb:
            case Verb.LOCK:
                deadline = self.timeouts.lock()
                arguments["timeout_ms"] = round(self.timeouts.lock_timeout() * 1000)
            case Verb.UNLOCK:
                deadline = self.timeouts.wall(self.timeouts.lock_seconds)
            case _:
                deadline = self.seconds_left(seconds)
        reply = await self._call(key, HelperCall(str(verb), deadline, arguments))
        if reply["code"] != CudaResult.SUCCESS and not alive(member.who):
            raise StepFailedError(f"pid {member.who.pid} ended during {verb}", StepTrouble.GONE)
        if reply["code"] == CudaResult.NOT_INITIALIZED and not member.holds:
            raise StepFailedError(f"pid {member.who.pid} has no context: nothing to {verb}", StepTrouble.GONE)
        self._check(reply, str(verb), member.who)

    async def describe(self, key: str) -> DriverInfo:
        """Read version and capabilities of the driver, by several NVML calls per GPU."""
        self.known = driver_from(await self._read("describe", key))
        return self.known

    async def survey(
        self, key: str, processes: Sequence[ProcessIdentity], holding: Set[int] = frozenset()
    ) -> tuple[Usage, dict[ProcessIdentity, bool]]:
        """``usage`` of all GPUs, and whether each process uses CUDA, in one exchange with the helper. ``holding``: pids
        that another reading lists with memory."""
        seconds = self.timeouts.wall(self.timeouts.read_seconds)
        asked = (HelperCall("restore_tid", seconds, {"pid": one.pid}) for one in processes)
        first, *tids = await self._calls(key, [self._reading("usage"), *asked])
        usage = self._usage(first)
        listed = {use.pid for use in usage.uses if use.holds} | holding
        answers = zip(processes, tids, strict=True)
        return usage, {one: self._knows(reply, one, one.pid in listed) for one, reply in answers}

    def _knows(self, reply: dict[str, Any], process: ProcessIdentity, surely: bool) -> bool:
        """True if it has a restore thread. ``surely``: the driver's process list has it, so another result raises."""
        if reply["code"] == UNREACHABLE or (surely and reply["code"] != CudaResult.NOT_INITIALIZED and alive(process)):
            self._check(reply, "restore_tid", process)
        return bool(reply["code"] == CudaResult.SUCCESS) and alive(process)

    async def processes(self, key: str, gpus: Iterable[str] | None = None) -> list[Use]:
        """Processes that use these GPUs, or any GPU; parked processes are not listed."""
        return self._uses(await self._read("processes", key, gpus))

    async def memory(self, key: str, gpus: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """(bytes in use, total bytes) by GPU, for these GPUs or all."""
        return _sizes(await self._read("memory", key, gpus))

    async def usage(self, key: str, gpus: Iterable[str] | None = None) -> Usage:
        """``processes`` and ``memory`` in one call of the helper."""
        return self._usage(await self._read("usage", key, gpus))

    def _usage(self, reply: dict[str, Any]) -> Usage:
        self._check(reply, "usage", None)
        return Usage(self._uses(reply), _sizes(reply))

    def _uses(self, reply: Mapping[str, Any]) -> list[Use]:
        """Processes of a reply, without the helpers, which open every GPU."""
        own = self.pool.pids
        return [
            Use(int(e["pid"]), str(e["gpu"]), int(e["bytes"]) if e.get("exact", True) else None, e.get("seat") or "")
            for e in reply["processes"]
            if int(e["pid"]) not in own
        ]

    async def _read(self, verb: str, key: str, gpus: Iterable[str] | None = None) -> dict[str, Any]:
        reply = await self._call(key, self._reading(verb, gpus))
        self._check(reply, verb, None)
        return reply

    def _reading(self, verb: str, gpus: Iterable[str] | None = None) -> HelperCall:
        arguments = {} if gpus is None else {"gpus": sorted(gpus)}
        return HelperCall(verb, self.timeouts.wall(self.timeouts.read_seconds), arguments)

    async def _call(self, key: str, call: HelperCall) -> dict[str, Any]:
        return (await self._calls(key, [call]))[0]

    async def _calls(self, key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
        try:
            return await self.pool.calls(key, calls)
        except HelperHungError as error:
            if error.verb in _ABOUT_A_PROCESS and await self._answers(key):
                raise StepFailedError(str(error), StepTrouble.HUNG) from error
            raise StepFailedError(f"{error}; the driver stalls", StepTrouble.SLOW) from error
        except HelperDiedError as error:
            raise StepFailedError(str(error), StepTrouble.HELPER_DIED) from error

    async def _answers(self, key: str) -> bool:
        """True if the driver answers another call now: then the one that did not end hangs because of its process."""
        try:
            return bool(await self.pool.calls(key, [self._reading("memory")]))
        except (HelperHungError, HelperDiedError):
            return False

    def _check(self, reply: dict[str, Any], verb: str, process: ProcessIdentity | None) -> None:
        code = reply["code"]
        if code == CudaResult.SUCCESS:
            return
        if code == UNREACHABLE:  # about the driver, whatever was asked
            raise StepFailedError(str(reply["text"]), StepTrouble.HELPER_DIED)
        of = "" if process is None else f" of pid {process.pid}"
        hint = reply.get("text") or _HINTS.get((verb, code))
        detail = f": {hint}" if hint else ""
        text = f"{verb}{of} answered {reply.get('name', 'UNKNOWN')} ({code}){detail}"
        raise StepFailedError(text, _TROUBLES.get(code, StepTrouble.REFUSED))


def unaccounted(
    uses: Iterable[Use], memory: Mapping[str, tuple[int, int]], ours: Collection[int] = ()
) -> dict[str, int]:
    """Bytes in use by GPU that belong to ``ours`` (pids) or to no listed process. Never below 0: of a process that ends
    the driver may still list what is free already, and a baseline below 0 would make other memory look like growth."""
    left = {gpu: used for gpu, (used, _) in memory.items()}
    for use in uses:
        if use.pid not in ours and use.gpu in left:
            left[use.gpu] -= use.size or 0
    return {gpu: max(0, size) for gpu, size in left.items()}


def _sizes(reply: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {gpu: (int(used), int(total)) for gpu, (used, total) in reply["memory"].items()}
