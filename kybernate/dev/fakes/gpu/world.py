"""State that all parts of the fake machine share: GPUs, processes, time, effects, faults, violations. Pure."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kybernate.dev.fakes.gpu.process import Answer, Code, CudaProcess, DriverCall, Effect, RefusedError, State, Tell
from kybernate.dev.fakes.gpu.spec import MachineSpec


class Kind(StrEnum):
    """Kinds of violations."""

    SLOTS = "slots"
    """More seats with memory on a GPU than it has slots."""
    REQUEST_NOT_RUNNING = "request-not-running"
    """A request was begun by a process that is locked, parked or lost."""
    REQUEST_WITHOUT_MEMORY = "request-without-memory"
    """A request was begun by a process that has no memory on any GPU, or only what sleep leaves behind."""
    CHECKPOINT_WITH_REQUEST = "checkpoint-with-request"
    """A checkpoint began while this request was being computed; one violation for each request."""
    RESTORE_WITHOUT_ROOM = "restore-without-room"
    """A restore met too little free memory; the process is lost."""
    CHECKPOINT_WITHOUT_HOST_MEMORY = "checkpoint-without-host-memory"
    """The copy did not fit into the host's memory; the kernel killed the process."""
    KILLED_AFTER_RESTORE = "killed-after-restore"
    """A process that was once restored ended with memory on a GPU, where that was declared to wedge the GPU."""
    STALE_EPOCH = "stale-epoch"
    """A verb came with an epoch below the highest that one of the process' GPUs has seen."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation."""

    kind: Kind
    text: str
    at: float
    """Seconds of CLOCK_MONOTONIC."""
    pid: int
    seat: str
    gpu: str | None = None


class Violations:
    """The count, and the last 50 with details."""

    def __init__(self) -> None:
        self.count = 0
        self.by_kind: Counter[str] = Counter()
        self.recent: deque[Violation] = deque(maxlen=50)

    def add(self, violation: Violation) -> None:
        """Count one."""
        self.count += 1
        self.by_kind[violation.kind.value] += 1
        self.recent.append(violation)

    def report(self) -> dict[str, Any]:
        """As ``stats`` tells it."""
        return {"count": self.count, "by_kind": dict(self.by_kind), "recent": [asdict(one) for one in self.recent]}


ONCE = frozenset(
    {
        "hang",
        "oom",
        "busy",
        "fail",
        "lose",
        "segfault-on-lock",
        "die-mid-checkpoint",
        "die-mid-restore",
        "wedge-on-kill",
    }
)
"""Faults that wait for their moment; ``slow`` stands until cleared, XIDs and lost GPUs happen at once."""

_AMOUNTS = {"slow": "factor", "busy": "seconds", "fail": "code", "lose": "code"}
"""The argument that says how much, or what."""


@dataclass(slots=True)
class Fault:
    """An armed fault; pid and seat None: any process."""

    name: str
    pid: int | None
    seat: str | None
    verb: str | None
    times: int
    amount: float

    def meets(self, process: CudaProcess) -> bool:
        """Whether it is meant for this process."""
        return self.pid in (None, process.pid) and self.seat in (None, process.seat)


class Faults:
    """All armed faults."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []

    def inject(self, arguments: dict[str, Any]) -> None:
        """Arm one. Raises RefusedError naming what is wrong."""
        name = arguments.get("fault")
        if name not in ONCE | {"slow"}:
            known = ", ".join(sorted(ONCE | {"slow", "xid", "lost", "found", "nvml", "stall", "mark", "clear"}))
            raise RefusedError(Code.INVALID_VALUE, f"fault {name!r}; known are {known}")
        if name == "hang" and not isinstance(arguments.get("verb"), str):
            raise RefusedError(Code.INVALID_VALUE, "a hang needs verb, e.g. checkpoint")
        amount = arguments.get(_AMOUNTS.get(name, ""), 0)
        if not isinstance(amount, int | float) or (name == "slow" and amount <= 0):
            raise RefusedError(Code.INVALID_VALUE, "slow needs a factor above 0, busy needs model seconds")
        if name in ("fail", "lose") and (amount not in set(Code) - {0} or arguments.get("verb") is None):
            codes = ", ".join(f"{code.value} {code.name}" for code in Code if code)
            raise RefusedError(Code.INVALID_VALUE, f"{name} needs verb and code, one of {codes}")
        pid, seat = arguments.get("pid"), arguments.get("seat")
        times = int(arguments.get("times", 1))
        self.armed.append(Fault(name, pid, seat, arguments.get("verb"), times, float(amount)))

    def take(self, name: str, process: CudaProcess, verb: str | None = None) -> float | None:
        """The amount of the first fault that meets this process, which is thereby used up once; None without one."""
        for fault in self.armed:
            if fault.name == name and fault.verb == verb and fault.meets(process):
                fault.times -= 1
                if fault.times <= 0:
                    self.armed.remove(fault)
                return fault.amount
        return None

    def slowness(self, process: CudaProcess) -> float:
        """By how much its transfers take longer."""
        factor = 1.0
        for fault in self.armed:
            if fault.name == "slow" and fault.meets(process):
                factor *= fault.amount
        return factor


Result = dict[str, Any]


class World:
    """State, and the few operations on it that keep it consistent."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self.now = 0.0
        """Wall seconds; set by the machine before it lets anybody work."""
        usable = (*(gpu for gpu in spec.gpus if not gpu.mig_enabled), *spec.instances)
        self.capacity = {gpu.uuid: gpu.memory_bytes for gpu in usable}
        """Memory of all that a process can use: whole GPUs, and the instances of those in MIG mode."""
        self.processes: dict[int, CudaProcess] = {}
        self.epochs = dict.fromkeys(self.capacity, 0)
        """Highest epoch that each GPU has seen."""
        self.violations = Violations()
        self.faults = Faults()
        self.totals = {"requests": 0, "checkpoints": 0, "restores": 0}
        self.xids: dict[str, list[int]] = {gpu.uuid: [] for gpu in (*spec.gpus, *spec.instances)}
        self.lost: set[str] = set()
        """GPUs that fell off the bus: nothing can be read of them."""
        self.nvml_codes: dict[str, dict[str, int]] = {uuid: {} for uuid in self.xids}
        """By GPU: NVML functions that fail for it, with the code that they answer (stub library only)."""
        self.stalled_until = 0.0
        """NVML answers nothing before this moment (wall)."""
        self.wedged = dict.fromkeys(self.capacity, 0)
        """Memory that dead processes hold for ever; only a reboot would free it."""
        self.effects: list[Effect] = []
        self._crowded: dict[str, frozenset[str]] = {}

    def used_bytes(self, gpu: str) -> int:
        """Memory in use on a GPU."""
        parts = self.parts(gpu)
        held = sum(process.memory.get(part, 0) for process in self.processes.values() for part in parts)
        return held + sum(self.wedged.get(part, 0) for part in parts)

    def parts(self, gpu: str) -> tuple[str, ...]:
        """The GPU and its MIG instances."""
        return (gpu, *(one.uuid for one in self.spec.instances if one.mig and one.mig.parent == gpu))

    def free_bytes(self, gpu: str) -> int:
        """Room on a GPU."""
        return self.capacity[gpu] - self.used_bytes(gpu)

    def parked_bytes(self) -> int:
        """Host memory that the copies of parked processes take."""
        return sum(sum(process.parked.values()) for process in self.processes.values())

    def attempt(self, call: DriverCall, run: Callable[[], Result | None]) -> None:
        """Run and answer; a result of None means that the answer comes later."""
        try:
            result = run()
        except RefusedError as refusal:
            self.refuse(call, refusal.code, refusal.text)
        else:
            if result is not None:
                self.effects.append(Answer(call.token, Code.SUCCESS, result))

    def refuse(self, call: DriverCall, code: Code, why: str) -> None:
        """Answer with a code and the reason."""
        self.effects.append(Answer(call.token, code, {"text": why}))

    def enter(self, process: CudaProcess, state: State) -> None:
        """Change a process' state and tell it, if it wants to know."""
        process.state = state
        if process.watch:
            self.effects.append(Tell(process.pid, state))

    def violated(self, kind: Kind, process: CudaProcess, why: str, gpu: str | None = None) -> None:
        """Count a violation."""
        self.violations.add(Violation(kind, why, self.now, process.pid, process.seat, gpu))

    def wedge(self, process: CudaProcess) -> None:
        """It ended. Where ``wedge-on-kill`` is armed, one that was restored and not parked again keeps its memory for
        ever, as with open driver 595.71 (open-gpu-kernel-modules, cuda-checkpoint #53): lock and checkpoint it first.
        """
        if not process.restored or process.used_bytes == 0 or self.faults.take("wedge-on-kill", process) is None:
            return
        for gpu, count in process.memory.items():
            self.wedged[gpu] += count
        why = "it was restored and ended with memory on its GPUs; lock and checkpoint before a kill"
        self.violated(Kind.KILLED_AFTER_RESTORE, process, why)

    def memory_changed(self, gpus: Iterable[str], *, punish: bool = True) -> None:
        """Compare seats with slots; one crowd on one GPU is one violation, however long it lasts."""
        for gpu in gpus:
            there = [p for p in self.processes.values() if p.memory.get(gpu, 0) > 0 and not p.asleep]
            seats = frozenset(process.seat for process in there)
            if len(seats) <= self.spec.slots:
                self._crowded.pop(gpu, None)
            elif not seats <= self._crowded.get(gpu, frozenset()):
                self._crowded[gpu] = seats
                if punish:
                    why = f"{len(seats)} seats have memory on {gpu}: {', '.join(sorted(seats))}"
                    self.violated(Kind.SLOTS, there[-1], f"{why}; slots: {self.spec.slots}", gpu)


class Peers:
    """Processes that share a communicator, as they declared with ``attach`` or ``mark``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def others(self, process: CudaProcess) -> list[CudaProcess]:
        """The other ranks of its communicator."""
        named = process.communicator
        everyone = self._world.processes.values()
        return [one for one in everyone if one is not process and named is not None and one.communicator == named]

    def hold_up(self, process: CudaProcess) -> bool:
        """Whether its lock hangs: another rank stands still, so its submitted work never ends (cuda-checkpoint #30)."""
        still = (State.LOCKED, State.CHECKPOINTED)
        return process.state is State.RUNNING and any(one.state in still for one in self.others(process))
