"""The procedure of a park or activation: the next step, the effect of each failure, the rollback. Pure.

``Procedure`` holds the known states of the processes of one seat and returns one step at a time; the backend executes
it and reports the result. The same object drives a fresh job, a rollback and the replay after a crash, because the next
step follows from the observed states and not from a position in a script.

Order of a park: check the rules, reserve host memory, lock all, checkpoint each, prove that the memory is free, freeze.
Of an activation: build the map if it goes to other GPUs, wait for room, thaw, restore all, unlock all, verify. Attached
members (without VRAM) go through the same verbs; they are restored first, so that a refusal leaves no memory moved, and
one that is gone, or that the driver does not know any more, is left out. A half
rolls back at most once and retries a step three times; the second hang of a seat, in this half or an earlier one, is
quarantine. So every half ends: ``parked``, ``active``, ``lost`` (killed, its memory proven free), ``gone`` or
``quarantined``.
"""

from collections import Counter
from dataclasses import dataclass, field

from kybernate.messages import Outcome
from services.checkpointer.core.failures import (
    MAX_HANGS,
    MAX_HELPER_DEATHS,
    MAX_REFUSALS,
    MAX_RETRIES,
    RULES,
    TERMINAL,
    JobGoal,
    ProcessState,
    Remedy,
    Rule,
    StepTrouble,
    Verb,
)

RESTORED = {ProcessState.LOCKED, ProcessState.RUNNING}
HUNG_TOO_OFTEN = "the second hang of this seat: no driver call for ten minutes; see the kernel log, then delete its pod"
GIVEN_UP = f"given up after {MAX_HELPER_DEATHS + 1} calls: see the checkpointer's log and nvidia-smi"


@dataclass(frozen=True, slots=True)
class Step:
    """The next step; ``member`` is the index of the process, None for the whole seat."""

    verb: Verb
    member: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The half is over. ``reason`` is empty if it reached its goal without a failure."""

    outcome: Outcome
    reason: str = ""


def replay_goal(intent: JobGoal, states: list[ProcessState]) -> JobGoal:
    """Goal of the replay of an interrupted half, from its journaled intent and the present states.

    An interrupted park is finished if anything is checkpointed, else undone. An interrupted activation is finished if
    anything is restored (it must be unlocked), else the seat stays parked.
    """
    if intent is JobGoal.PARKED:
        return JobGoal.PARKED if ProcessState.CHECKPOINTED in states else JobGoal.ACTIVE
    if intent is JobGoal.ACTIVE:
        return JobGoal.ACTIVE if {ProcessState.LOCKED, ProcessState.RUNNING} & set(states) else JobGoal.PARKED
    return JobGoal.DEAD


@dataclass
class Procedure:
    """One half of a job for one seat. Call ``next``, execute the step, call ``done`` or ``failed``, until ``End``."""

    goal: JobGoal
    states: list[ProcessState]
    frozen: bool = False
    """True if a process of the seat is stopped; driver calls about it would hang."""
    replaying: bool = False
    """After a crash: ``replay_goal`` chooses the goal once all states are known."""
    gentle: bool = True
    """Before a kill, processes are locked and checkpointed as far as possible."""
    attached: frozenset[int] = frozenset()
    """Indices of the processes without VRAM."""
    hangs: int = 0
    """Calls about this seat that hung, in this half and earlier ones."""
    refusals: int = 0
    """Restores of this seat that were refused in earlier halves, without a success since."""
    moving: bool = False
    """True if an activation goes to other GPUs than those the seat was parked on."""
    reason: str = ""
    rolled_back: bool = False
    _intent: JobGoal = field(init=False)
    _done: set[Verb] = field(default_factory=set)
    """Steps about the whole seat that succeeded and still hold."""
    _end: End | None = None
    _deaths: int = 0
    _tries: Counter[Step] = field(default_factory=Counter)
    _spent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._intent = self.goal

    def next(self) -> Step | End:
        """The next step, or the end. Idempotent until ``done`` or ``failed`` is called."""
        if self._end is not None:
            return self._end
        if self.goal is not JobGoal.DEAD and ProcessState.UNKNOWN in self.states:
            return self._thawed(Step(Verb.STATE, self.states.index(ProcessState.UNKNOWN)))
        self._decide()
        if self._end is not None:
            return self._end
        if self.goal is JobGoal.DEAD:
            return self._towards_dead()
        return self._towards_parked() if self.goal is JobGoal.PARKED else self._towards_active()

    def done(self, step: Step, seen: ProcessState | None = None, killed: int = 0) -> None:
        """The step succeeded. ``seen``: the state that STATE read; ``killed``: processes that KILL killed."""
        after = {
            Verb.STATE: seen,
            Verb.LOCK: ProcessState.LOCKED,
            Verb.CHECKPOINT: ProcessState.CHECKPOINTED,
            Verb.RESTORE: ProcessState.LOCKED,
            Verb.UNLOCK: ProcessState.RUNNING,
        }.get(step.verb)
        if step.member is not None and after is not None:
            self.states[step.member] = after
        elif step.member is None:
            self._done.add(step.verb)
        match step.verb:
            case Verb.FREEZE:
                self.frozen = True
            case Verb.THAW:
                self.frozen = False
                self._done.discard(Verb.FREEZE)
            case Verb.KILL:
                self._end = End("lost" if killed else "gone", self.reason)

    def failed(self, step: Step, trouble: StepTrouble, text: str = "") -> None:
        """The step failed: apply the rule of the table."""
        what = text if text and trouble is StepTrouble.HELPER_DIED else f"{step.verb}: {text or trouble}"
        if self.goal is JobGoal.DEAD:
            self._failed_dying(step, trouble, what)
            return
        self._invalidate(step, trouble)
        if step.member in self.attached and trouble in (StepTrouble.GONE, StepTrouble.ILLEGAL):
            # Left out of the park because it had no context; frozen with the others it looks like a checkpointed one.
            self._tries[step] += 1
            if self._tries[step] <= MAX_RETRIES:
                return
        elif trouble is StepTrouble.GONE:
            self.reason = self.reason or what
            return
        self.hangs += trouble is StepTrouble.HUNG
        self._deaths += trouble is StepTrouble.HELPER_DIED
        if trouble is StepTrouble.HUNG and self.hangs > MAX_HANGS:
            self._apply(Remedy.QUARANTINE, f"{what}; {HUNG_TOO_OFTEN}")
            return
        if self._deaths > MAX_HELPER_DEATHS:
            self._apply(Remedy.QUARANTINE, GIVEN_UP)
            return
        if step.verb is Verb.RESTORE and trouble in TERMINAL and step.member is not None:
            self._spent.add(step.member)  # it is lost; no further call about it
        rule = RULES.get((step.verb, trouble), Rule(Remedy.CONDEMN))
        if step.verb is Verb.RESTORE and trouble is StepTrouble.REFUSED and self.refusals >= MAX_REFUSALS:
            rule = Rule(Remedy.CONDEMN)
        remedy = rule.remedy
        if remedy is Remedy.ROLL_BACK and (self.rolled_back or self._half_moved()):
            remedy = rule.then
        elif remedy is Remedy.RETRY:
            self._tries[step] += 1
            remedy = rule.then if self._tries[step] > MAX_RETRIES else Remedy.REREAD
        self._apply(remedy, what)

    def _decide(self) -> None:
        """Decide what follows from the states alone: a dead member condemns the seat; a replay gets its goal."""
        if self.goal is JobGoal.DEAD:
            return
        present = self._present()
        if ProcessState.GONE in present and self._untouched():
            self._end = End("active", "a GPU process of the seat ended before anything was done; look again")
        elif ProcessState.FAILED in present:
            self._apply(Remedy.CONDEMN, "a process is unusable (the driver reports FAILED)")
        elif ProcessState.GONE in present or not present:
            self._apply(Remedy.CONDEMN, "a GPU process of the seat is gone")
        elif self.replaying:
            intent, self.replaying = self.goal, False
            self.goal = replay_goal(intent, present)
            if self.goal is not intent:
                self.rolled_back = True
                self.reason = self.reason or "interrupted by a restart of the checkpointer, and undone"
        elif self.goal is JobGoal.PARKED and self._intent is JobGoal.ACTIVE and not set(present) - RESTORED:
            self.goal = JobGoal.ACTIVE  # the restore that was reported as failed succeeded

    def _present(self) -> list[ProcessState]:
        """The states, without those of attached processes that are gone: they come and go with an engine's tools."""
        return [s for i, s in enumerate(self.states) if s is not ProcessState.GONE or i not in self.attached]

    def _half_moved(self) -> bool:
        """True if one of its holders is on other GPUs already: parked again, the copies would belong to two groups."""
        holders = [state for index, state in enumerate(self.states) if index not in self.attached]
        return self.moving and len(holders) > 1 and not RESTORED.isdisjoint(holders)

    def _untouched(self) -> bool:
        """True if a park has done nothing yet and a process runs: some GPU processes of engines live for seconds."""
        fresh = self.goal is JobGoal.PARKED and not (self.rolled_back or self.replaying or Verb.CHECKS in self._done)
        return fresh and set(self._present()) == {ProcessState.RUNNING, ProcessState.GONE}

    def _towards_parked(self) -> Step | End:
        if set(self._present()) != {ProcessState.CHECKPOINTED}:
            if Verb.CHECKS not in self._done and not self.rolled_back and ProcessState.CHECKPOINTED not in self.states:
                return Step(Verb.CHECKS)
            if Verb.HEADROOM not in self._done:
                return Step(Verb.HEADROOM)
        if ProcessState.RUNNING in self.states:
            return self._thawed(Step(Verb.LOCK, self.states.index(ProcessState.RUNNING)))
        if ProcessState.LOCKED in self.states:
            return self._thawed(Step(Verb.CHECKPOINT, self.states.index(ProcessState.LOCKED)))
        if Verb.EVIDENCE not in self._done:
            return Step(Verb.EVIDENCE)
        return End("parked", self.reason) if Verb.FREEZE in self._done else Step(Verb.FREEZE)

    def _towards_active(self) -> Step | End:
        if ProcessState.CHECKPOINTED in self.states:
            if self.moving and Verb.MAP not in self._done:
                return Step(Verb.MAP)
            parked = [index for index, state in enumerate(self.states) if state is ProcessState.CHECKPOINTED]
            restore = Step(Verb.RESTORE, min(parked, key=lambda index: index not in self.attached))
            return self._thawed(restore) if Verb.ROOM in self._done else Step(Verb.ROOM)
        locked = [index for index, state in enumerate(self.states) if state is ProcessState.LOCKED]
        if locked:
            return self._thawed(Step(Verb.UNLOCK, locked[-1] if self.rolled_back else locked[0]))
        return End("active", self.reason) if Verb.VERIFY in self._done else self._thawed(Step(Verb.VERIFY))

    def _towards_dead(self) -> Step:
        # Killing a running process that was once restored can hang the host: lock and checkpoint it first if possible.
        gentle = {
            ProcessState.UNKNOWN: Verb.STATE,
            ProcessState.RUNNING: Verb.LOCK,
            ProcessState.LOCKED: Verb.CHECKPOINT,
        }
        for index, state in enumerate(self.states):
            if self.gentle and index not in self._spent and state in gentle:
                return self._thawed(Step(gentle[state], index))
        return Step(Verb.KILL)

    def _thawed(self, step: Step) -> Step:
        """The step, or a thaw before it: driver calls about a stopped process hang."""
        return Step(Verb.THAW) if self.frozen else step

    def _invalidate(self, step: Step, trouble: StepTrouble) -> None:
        """Forget what the failed step made uncertain."""
        if step.member not in self.attached:  # those hold no memory
            self._done -= {Verb.ROOM, Verb.EVIDENCE, Verb.VERIFY}
        self.frozen = self.frozen or step.verb is Verb.FREEZE  # some processes may have been stopped
        if step.member is not None:
            self.states[step.member] = ProcessState.GONE if trouble is StepTrouble.GONE else ProcessState.UNKNOWN
        elif step.verb in (Verb.VERIFY, Verb.EVIDENCE):
            self.states = [ProcessState.UNKNOWN] * len(self.states)

    def _failed_dying(self, step: Step, trouble: StepTrouble, what: str) -> None:
        if step.verb is Verb.KILL:
            self._tries[step] += 1
            if trouble is StepTrouble.REFUSED or self._tries[step] > MAX_RETRIES:
                self._apply(Remedy.QUARANTINE, what)
        elif step.verb is Verb.THAW:
            self.frozen = False  # SIGKILL works on stopped processes; skip lock and checkpoint
            self._spent.update(range(len(self.states)))
        elif step.member is not None:
            self._spent.add(step.member)

    def _apply(self, remedy: Remedy, what: str) -> None:
        if what not in self.reason:
            self.reason = f"{self.reason}; {what}" if self.reason else what
        match remedy:
            case Remedy.ROLL_BACK:
                self.rolled_back, self.replaying = True, False
                self._done.discard(Verb.HEADROOM)
                self.goal = JobGoal.ACTIVE if self.goal is JobGoal.PARKED else JobGoal.PARKED
            case Remedy.CONDEMN:
                self.goal = JobGoal.DEAD
            case Remedy.QUARANTINE:
                self._end = End("quarantined", self.reason)
