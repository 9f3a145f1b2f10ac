"""What the parts of the fake machine share: GPUs, processes, time, effects, violations. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from kybernate.dev.fakes.gpu.codes import Code, State
from kybernate.dev.fakes.gpu.faults import Faults
from kybernate.dev.fakes.gpu.process import Answer, Call, Effect, Process, RefusedError, Tell
from kybernate.dev.fakes.gpu.spec import MachineSpec
from kybernate.dev.fakes.gpu.violations import Kind, Violation, Violations

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
        self.processes: dict[int, Process] = {}
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

    def attempt(self, call: Call, run: Callable[[], Result | None]) -> None:
        """Run and answer; a result of None means that the answer comes later."""
        try:
            result = run()
        except RefusedError as refusal:
            self.refuse(call, refusal.code, refusal.text)
        else:
            if result is not None:
                self.effects.append(Answer(call.token, Code.SUCCESS, result))

    def refuse(self, call: Call, code: Code, why: str) -> None:
        """Answer with a code and the reason."""
        self.effects.append(Answer(call.token, code, {"text": why}))

    def enter(self, process: Process, state: State) -> None:
        """Change a process' state and tell it, if it wants to know."""
        process.state = state
        if process.watch:
            self.effects.append(Tell(process.pid, state))

    def violated(self, kind: Kind, process: Process, why: str, gpu: str | None = None) -> None:
        """Count a violation."""
        self.violations.add(Violation(kind, why, self.now, process.pid, process.seat, gpu))

    def wedge(self, process: Process) -> None:
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
