"""A pure model of a driver and its processes, strict about the order of verbs; procedures run against it."""

from dataclasses import dataclass, field

from services.checkpointer.core.failures import JobGoal, ProcessState, StepTrouble, Verb
from services.checkpointer.core.procedure import End, Procedure, Step

NEEDS = {
    Verb.LOCK: (ProcessState.RUNNING, ProcessState.LOCKED),
    Verb.CHECKPOINT: (ProcessState.LOCKED, ProcessState.CHECKPOINTED),
    Verb.RESTORE: (ProcessState.CHECKPOINTED, ProcessState.LOCKED),
    Verb.UNLOCK: (ProcessState.LOCKED, ProcessState.RUNNING),
}


@dataclass
class Fault:
    """The ``nth`` use of a verb on a member fails; ``lands``: the verb takes effect nevertheless."""

    verb: Verb
    trouble: StepTrouble
    member: int | None = None
    times: int = 1
    lands: bool = False
    becomes: ProcessState | None = None


@dataclass
class Sim:
    """The true state of one seat, behind the driver."""

    states: list[ProcessState]
    frozen: bool = False
    faults: list[Fault] = field(default_factory=list)
    attached: frozenset[int] = frozenset()
    room: bool = True
    done: list[Step] = field(default_factory=list)
    killed: bool = False
    dying: bool = False
    """A checkpoint before a kill needs no room: its result is discarded."""

    def do(self, step: Step) -> ProcessState | None:
        """Raises TroubleError; asserts what no procedure may ever do."""
        self.done.append(step)
        fault = next((f for f in self.faults if f.verb is step.verb and f.member in (None, step.member)), None)
        if fault is not None:
            fault.times -= 1
            if fault.times == 0:
                self.faults.remove(fault)
            if fault.lands:
                self._change(step)
            if fault.becomes is not None and step.member is not None:
                self.states[step.member] = fault.becomes
            raise TroubleError(fault.trouble)
        if step.verb is Verb.ROOM and not self.room:
            raise TroubleError(StepTrouble.REFUSED)
        assert step.verb not in (Verb.STATE, Verb.VERIFY) or not self.frozen, f"{step} of a frozen process hangs"
        if step.verb is Verb.VERIFY and self.present != {ProcessState.RUNNING}:
            raise TroubleError(StepTrouble.REFUSED)
        if step.verb is Verb.EVIDENCE and self.present != {ProcessState.CHECKPOINTED}:
            raise TroubleError(StepTrouble.REFUSED)
        return self._change(step)

    @property
    def present(self) -> set[ProcessState]:
        """The states, without attached processes that are gone."""
        return {s for i, s in enumerate(self.states) if s is not ProcessState.GONE or i not in self.attached}

    def _change(self, step: Step) -> ProcessState | None:
        if step.member is not None:
            if self.states[step.member] is ProcessState.GONE:
                raise TroubleError(StepTrouble.GONE)
            if step.verb is Verb.STATE:
                return self.states[step.member]
            before, after = NEEDS[step.verb]
            if self.states[step.member] is not before:
                raise TroubleError(StepTrouble.REFUSED)
            assert not self.frozen, f"{step} on a frozen process hangs"
            if step.verb is Verb.RESTORE:
                assert self._since(Verb.CHECKPOINT, Verb.ROOM), "restored without a look at the room"
            if step.verb is Verb.CHECKPOINT and not self.dying:
                assert self._since(Verb.RESTORE, Verb.HEADROOM), "checkpointed without room for the copy"
            self.states[step.member] = after
        elif step.verb in (Verb.CHECKS, Verb.MAP):
            assert not {Verb.LOCK, Verb.RESTORE} & {one.verb for one in self.done}, "too late for a refusal"
        elif step.verb is Verb.FREEZE:
            assert self.present == {ProcessState.CHECKPOINTED}, "froze what is not checkpointed"
            self.frozen = True
        elif step.verb is Verb.THAW:
            self.frozen = False
        elif step.verb is Verb.KILL:
            self.killed = any(state is not ProcessState.GONE for state in self.states)
            self.states = [ProcessState.GONE] * len(self.states)
        return None

    def _since(self, last: Verb, wanted: Verb) -> bool:
        """Whether ``wanted`` was done after the last ``last``."""
        done = [one.verb for one in self.done[:-1]]
        return wanted in (done[len(done) - done[::-1].index(last) :] if last in done else done)

    def observed(self) -> list[ProcessState]:
        """The states that a checkpointer knows at its start: no call is made about a stopped process."""
        return [
            ProcessState.CHECKPOINTED if self.frozen and s is ProcessState.CHECKPOINTED else ProcessState.UNKNOWN
            for s in self.states
        ]

    def procedure(self, goal: JobGoal, *, replaying: bool = False, hangs: int = 0, moving: bool = False) -> Procedure:
        states, frozen, attached = self.observed(), self.frozen, self.attached
        return Procedure(
            goal, states, frozen=frozen, replaying=replaying, attached=attached, hangs=hangs, moving=moving
        )


class TroubleError(Exception):
    """A step failed."""

    def __init__(self, trouble: StepTrouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


def run(procedure: Procedure, sim: Sim, *, steps: int | None = None, limit: int = 200) -> End | None:
    """Run to the end, or for ``steps`` steps (then the result is None)."""
    for count in range(limit):
        step = procedure.next()
        assert step == procedure.next(), "asking twice must not matter"
        if isinstance(step, End):
            return step
        if count == steps:
            return None
        was_alive = any(state is not ProcessState.GONE for state in sim.states)
        sim.dying = procedure.goal is JobGoal.DEAD
        try:
            seen = sim.do(step)
        except TroubleError as error:
            procedure.failed(step, error.trouble)
        else:
            procedure.done(step, seen, killed=int(was_alive and step.verb is Verb.KILL))
    raise AssertionError(f"no end after {limit} steps: {sim.done[-10:]}")
