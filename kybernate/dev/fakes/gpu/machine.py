"""The fake machine: calls, time and what /proc says go in, answers and kills come out. Pure.

The rules are those measured on real drivers: a wrong state changes nothing (ILLEGAL_STATE), a restore without room
loses the process for good, calls of a locked process wait, checkpoint calls on a stopped process hang until it is
continued, state queries wait for a running checkpoint or restore, a parked process vanishes from the process list.
"""

import math

from kybernate.dev.fakes.gpu.calls import OwnCalls, Verbs
from kybernate.dev.fakes.gpu.process import (
    Caller,
    CallTarget,
    Code,
    CudaProcess,
    DriverCall,
    Effect,
    Operation,
    RefusedError,
    integer,
)
from kybernate.dev.fakes.gpu.readings import Readings, Xids
from kybernate.dev.fakes.gpu.spec import MachineSpec
from kybernate.dev.fakes.gpu.world import Result, Violations, World


class Machine:
    """One made-up machine. Every method that changes something returns what the shell has to do."""

    def __init__(self, spec: MachineSpec) -> None:
        self.world = World(spec)
        self._own_calls = OwnCalls(self.world)
        self._verbs = Verbs(self.world, self._own_calls)
        self._readings = Readings(self.world)
        self._xids = Xids(self.world)
        self._shared_at = 0.0
        """The ends of all copies are as of then."""
        self._stalled: list[DriverCall] = []
        """Readings that came while NVML stalls."""

    @property
    def violations(self) -> Violations:
        """What was done that hardware would have punished."""
        return self.world.violations

    @property
    def processes(self) -> dict[int, CudaProcess]:
        """Attached processes by pid."""
        return self.world.processes

    def call(self, call: DriverCall, caller: Caller, now: float, target: CallTarget | None = None) -> list[Effect]:
        """A call came in; ``target`` is what /proc says about the process that a checkpoint call names."""
        self._pass(now)
        self.world.attempt(call, lambda: self._dispatch(call, caller, target or CallTarget()))
        self._verbs.advance_held_up()
        return self._take_effects()

    def tick(self, now: float) -> list[Effect]:
        """Time passed; finishes what is due. The shell says by ``observe`` first who is stopped."""
        self._pass(now)
        for process in tuple(self.processes.values()):
            self._verbs.finish_due(process)
        self._verbs.advance_held_up()
        self._xids.expire()
        if now >= self.world.stalled_until:
            stalled, self._stalled = self._stalled, []
            for call in stalled:
                self.world.attempt(call, lambda call=call: self._readings.table[call.name](call.arguments))  # type: ignore[misc]
        return self._take_effects()

    def observe(self, pid: int, *, stopped: bool, now: float) -> list[Effect]:
        """Whether a process is stopped by SIGSTOP."""
        self._pass(now)
        process = self.processes.get(pid)
        if process is not None and process.stopped != stopped:
            process.stopped = stopped
            self._verbs.finish_due(process)
            self._verbs.advance(process)
            self._verbs.advance_held_up()
        return self._take_effects()

    def gone(self, pid: int, now: float) -> list[Effect]:
        """A process ended: its memory is free at once, calls about it fail."""
        self._pass(now)
        process = self.processes.pop(pid, None)
        if process is not None:
            pending = list(process.verbs) if process.operation is None else [process.operation.call, *process.verbs]
            for call in pending:
                self.world.refuse(call, Code.OPERATING_SYSTEM, f"process {pid} is gone")
            self.world.wedge(process)
            self.world.memory_changed(process.memory)
            self._verbs.advance_held_up()
        return self._take_effects()

    def next_time(self) -> float | None:
        """When the next operation ends, as far as that needs only time."""
        ends = [p.operation.ends_at for p in self.processes.values() if p.operation is not None and not p.stopped]
        copies = [copy.copied_at for copy in self._copies(self.world.now)]
        stall = self.world.stalled_until if self._stalled else math.inf
        return min((end for end in (*ends, *copies, stall, self._xids.next_time()) if end < math.inf), default=None)

    def watched(self) -> list[int]:
        """Processes whose stop and continue matter now: something about them waits."""
        return [p.pid for p in self.processes.values() if p.operation is not None or p.verbs]

    def _dispatch(self, call: DriverCall, caller: Caller, target: CallTarget) -> Result | None:
        if call.name in self._own_calls.table:
            return self._own_calls.run(call, caller)
        if call.name in self._verbs.table:
            return self._verbs.run(call, target)
        if call.name in ("devices", "processes") and self.world.now < self.world.stalled_until:
            self._stalled.append(call)
            return None
        if call.name in self._readings.table:
            return self._readings.table[call.name](call.arguments)
        if call.name == "attach":
            return self._own_calls.attach(call, caller)
        if call.name == "wait_xid":
            return self._xids.wait(call)
        if call.name == "inject":
            return self._inject(call)
        tables = (self._own_calls.table, self._verbs.table, self._readings.table)
        known = ", ".join(sorted({"attach", "inject", "wait_xid"}.union(*tables)))
        raise RefusedError(Code.NOT_SUPPORTED, f"unknown call {call.name!r}; known are {known}")

    def _inject(self, call: DriverCall) -> Result:
        fault = call.arguments.get("fault")
        if fault in ("xid", "lost", "found", "nvml"):
            self._xids.inject(call)
        elif fault == "stall":
            self.world.stalled_until = self.world.now + integer(call.arguments, "seconds") / self.world.spec.speed
        elif fault == "mark":
            self._own_calls.mark(integer(call.arguments, "pid"), call.arguments.get("marks") or {})
        elif fault == "clear":
            self._clear()
        else:
            self.world.faults.inject(call.arguments)
        return {"armed": len(self.world.faults.armed)}

    def _clear(self) -> None:
        """No faults any more; transfers that hung end now, lost GPUs are there again."""
        self.world.faults.armed.clear()
        self.world.lost.clear()
        self.world.stalled_until = self.world.now
        for codes in self.world.nvml_codes.values():
            codes.clear()
        for process in self.processes.values():
            if process.operation is not None and process.operation.ends_at == math.inf:
                process.operation.ends_at = self.world.now

    def _pass(self, now: float) -> None:
        self.world.now = now
        self._share_link()

    def _share_link(self) -> None:
        """Set when each copy ends, before copies begin or stop, and after: more than the link to host memory carries at
        full speed share it fairly."""
        while copies := self._copies(self._shared_at):
            speed = min(1.0, self.world.spec.lanes / len(copies))
            for copy in copies:
                longer = (copy.copied_at - self._shared_at) * (copy.speed / speed - 1)
                copy.copied_at, copy.ends_at, copy.speed = copy.copied_at + longer, copy.ends_at + longer, speed
            self._shared_at = min(copy.copied_at for copy in copies)
            if self._shared_at > self.world.now:
                break
        self._shared_at = self.world.now

    def _copies(self, at: float) -> list[Operation]:
        """Operations whose copy has not ended then; none where any number runs at full speed."""
        operations = (process.operation for process in self.processes.values() if self.world.spec.lanes)
        return [one for one in operations if one is not None and at < one.copied_at < math.inf]

    def _take_effects(self) -> list[Effect]:
        self._share_link()
        effects, self.world.effects = self.world.effects, []
        return effects
