"""The failure table: what can go wrong in each step of a park or activation, and the remedy. Data only.

What drivers do wrong is in docs/dev/checkpointer.md, Hazards. ``Procedure`` applies the rows; each has a test.
"""

from dataclasses import dataclass
from enum import StrEnum


class ProcessState(StrEnum):
    """State of one process as the driver reports it."""

    RUNNING = "RUNNING"
    LOCKED = "LOCKED"
    CHECKPOINTED = "CHECKPOINTED"
    FAILED = "FAILED"  # unusable; only a kill frees its memory
    GONE = "GONE"  # it ended, or no longer uses CUDA
    UNKNOWN = "UNKNOWN"  # must be read (again)


class JobGoal(StrEnum):
    """The state that a half drives its seat to."""

    PARKED = "parked"
    ACTIVE = "active"
    DEAD = "dead"


class Verb(StrEnum):
    """One step. The first five are about one process, the others about the whole seat."""

    STATE = "state"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"
    CHECKS = "checks"  # no rule forbids the park: MIG, managed memory, NCCL, several GPUs …
    HEADROOM = "headroom"  # host memory is reserved for what is not copied yet
    EVIDENCE = "evidence"  # all checkpointed, none in the process list, the memory is free
    FREEZE = "freeze"
    MAP = "map"  # the seat can be restored to other GPUs than those it was parked on
    ROOM = "room"  # the GPUs are reserved and have enough free memory for the restore
    THAW = "thaw"
    VERIFY = "verify"  # all are RUNNING
    KILL = "kill"  # and prove that the memory is free


READS = frozenset({Verb.STATE, Verb.CHECKS, Verb.HEADROOM, Verb.EVIDENCE, Verb.MAP, Verb.ROOM, Verb.VERIFY})
"""Steps without effect outside this process; they are not journaled."""


class StepTrouble(StrEnum):
    """How a step can go wrong."""

    NOT_READY = "not ready"  # submitted work did not finish in time; nothing changed
    REFUSED = "refused"  # any other result code, or an unmet condition
    ILLEGAL = "illegal state"  # not in the state that the call requires; nothing changed
    OUT_OF_MEMORY = "out of memory"
    OPERATING_SYSTEM = "operating system"
    HUNG = "hung"  # a call about a process overran its deadline, and the driver answers others
    SLOW = "slow"  # the driver stalls, or NVML alone, as for seconds when large processes end: no seat's fault
    HELPER_DIED = "helper died"  # or it could not call the driver
    GONE = "gone"  # the process ended; its pid may be reused


class StepFailedError(Exception):
    """A step failed; ``text`` is the reason for the operator."""

    def __init__(self, text: str, trouble: StepTrouble = StepTrouble.REFUSED) -> None:
        super().__init__(text)
        self.text, self.trouble = text, trouble


TERMINAL = frozenset({StepTrouble.OUT_OF_MEMORY, StepTrouble.OPERATING_SYSTEM})
"""Of a restore: the process is lost, and its state reads CHECKPOINTED as before (cuda-checkpoint #44)."""
SPENT = "spent"
"""Journaled when that happens."""


class Remedy(StrEnum):
    """What follows a failed step. The state of the process is always read again first."""

    REREAD = "reread"  # continue from the state that the driver reports now
    ROLL_BACK = "roll back"  # undo: change the goal to the opposite state
    RETRY = "retry"  # repeat the step, three times at most
    CONDEMN = "condemn"  # kill, prove that the memory is free; a cold start follows
    QUARANTINE = "quarantine"  # touch nothing any more; an operator must act


@dataclass(frozen=True, slots=True)
class Rule:
    """A remedy, and the one that follows when it is used up (a second rollback, a fourth try)."""

    remedy: Remedy
    then: Remedy = Remedy.CONDEMN


_V, _T, _R = Verb, StepTrouble, Remedy
_PLAIN = (_T.NOT_READY, _T.REFUSED, _T.OUT_OF_MEMORY, _T.OPERATING_SYSTEM)

RULES: dict[tuple[Verb, StepTrouble], Rule] = {
    # Hangs and deaths of the helper are also counted outside this table: the second hang of a seat is quarantine.
    **{(verb, _T.HUNG): Rule(_R.REREAD) for verb in Verb},
    **{(verb, _T.HELPER_DIED): Rule(_R.REREAD) for verb in Verb},
    **{(verb, _T.ILLEGAL): Rule(_R.RETRY) for verb in Verb},
    **{(verb, _T.SLOW): Rule(_R.RETRY, _R.QUARANTINE) for verb in Verb},
    **{(verb, trouble): Rule(_R.ROLL_BACK) for verb in (_V.CHECKS, _V.MAP) for trouble in (_T.HUNG, _T.SLOW)},
    (_V.ROOM, _T.SLOW): Rule(_R.ROLL_BACK, _R.QUARANTINE),
    (_V.LOCK, _T.HUNG): Rule(_R.ROLL_BACK),
    **{(_V.STATE, trouble): Rule(_R.RETRY, _R.QUARANTINE) for trouble in _PLAIN},
    # Nothing has changed yet: the seat keeps running.
    **{(_V.CHECKS, trouble): Rule(_R.ROLL_BACK) for trouble in _PLAIN},
    # In the rollback of a failed restore the seat is condemned: without memory for its copies it is lost.
    **{(_V.HEADROOM, trouble): Rule(_R.ROLL_BACK) for trouble in _PLAIN},
    **{(_V.LOCK, trouble): Rule(_R.ROLL_BACK) for trouble in _PLAIN},
    # The driver does not keep a process in a good state when its checkpoint fails (README of cuda-checkpoint): on 595
    # state and unlock look well, and every later CUDA call fails. Nothing here can tell, so the seat starts cold.
    **{(_V.CHECKPOINT, trouble): Rule(_R.CONDEMN) for trouble in _PLAIN},
    (_V.RESTORE, _T.NOT_READY): Rule(_R.ROLL_BACK),
    (_V.RESTORE, _T.REFUSED): Rule(_R.ROLL_BACK),
    # Terminal on real drivers: every later restore answers 304 and part of the memory stays held.
    (_V.RESTORE, _T.OUT_OF_MEMORY): Rule(_R.CONDEMN),
    (_V.RESTORE, _T.OPERATING_SYSTEM): Rule(_R.CONDEMN),
    **{(_V.UNLOCK, trouble): Rule(_R.RETRY) for trouble in _PLAIN},
    # All is checkpointed but memory is still in use: restore the seat rather than give its GPUs to another one.
    **{(_V.EVIDENCE, trouble): Rule(_R.ROLL_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.FREEZE, trouble): Rule(_R.ROLL_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    # Nothing has changed yet: the seat stays parked.
    **{(_V.MAP, trouble): Rule(_R.ROLL_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    # In a rollback the memory was the seat's own; a foreign process took it, and an operator must act.
    **{(_V.ROOM, trouble): Rule(_R.ROLL_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.THAW, trouble): Rule(_R.ROLL_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.VERIFY, trouble): Rule(_R.RETRY, _R.QUARANTINE) for trouble in _PLAIN},
    (_V.VERIFY, _T.REFUSED): Rule(_R.RETRY),
}
"""The failure table. A pair that is not listed means condemn; a seat that cannot be killed is quarantined."""

MAX_RETRIES = 3
MAX_HANGS = 1
MAX_REFUSALS = 1
"""Refused restores of a container after which the next one condemns it: a stale context is refused each time."""
MAX_HELPER_DEATHS = 3
