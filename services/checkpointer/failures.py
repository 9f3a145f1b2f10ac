"""The failure table: what can go wrong in each step of a park or activation, and what follows. Data only.

Source of the rows: research/checkpoint.md §7. ``Procedure`` follows them; each row is a test.
"""

from dataclasses import dataclass
from enum import StrEnum


class ProcessState(StrEnum):
    """What the driver says about one process."""

    RUNNING = "RUNNING"
    LOCKED = "LOCKED"
    CHECKPOINTED = "CHECKPOINTED"
    FAILED = "FAILED"  # beyond use; only killing it frees what it holds
    GONE = "GONE"  # no such process any more, or it does not use CUDA any more
    UNKNOWN = "UNKNOWN"  # has to be read (again)


class JobGoal(StrEnum):
    """Where a half is heading."""

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
    CHECKS = "checks"  # nothing speaks against parking it: MIG, managed memory, NCCL, several GPUs …
    HEADROOM = "headroom"  # host memory for what is not copied yet, reserved
    EVIDENCE = "evidence"  # all checkpointed, none in the process list, the memory is free
    FREEZE = "freeze"
    MAP = "map"  # it can be restored to other GPUs than those it was parked on
    ROOM = "room"  # the GPUs are reserved and have free what the restore will take
    THAW = "thaw"
    VERIFY = "verify"  # all run
    KILL = "kill"  # and prove that the memory is free


READS = frozenset({Verb.STATE, Verb.CHECKS, Verb.HEADROOM, Verb.EVIDENCE, Verb.MAP, Verb.ROOM, Verb.VERIFY})
"""Steps that change nothing outside this process; they are not journaled."""


class StepTrouble(StrEnum):
    """How a step can go wrong."""

    NOT_READY = "not ready"  # submitted work did not finish in time; nothing changed
    REFUSED = "refused"  # any other result code, or an unmet condition
    OUT_OF_MEMORY = "out of memory"
    OPERATING_SYSTEM = "operating system"
    HUNG = "hung"  # its deadline passed and the helper was killed
    HELPER_DIED = "helper died"  # or the driver cannot be reached
    GONE = "gone"  # the process is not the one we know


class Remedy(StrEnum):
    """What follows from a trouble. The state of the process is always read again first."""

    REREAD = "reread"  # go on from what the driver says now
    TURN_BACK = "turn back"  # undo: head for the other end
    RETRY = "retry"  # the same again, three times at most
    CONDEMN = "condemn"  # kill, prove that the memory is free; a cold start follows
    QUARANTINE = "quarantine"  # touch nothing any more and tell a person


@dataclass(frozen=True, slots=True)
class Rule:
    """A remedy, and what to do when it is used up (a second turn, a fourth try)."""

    remedy: Remedy
    then: Remedy = Remedy.CONDEMN


_V, _T, _R = Verb, StepTrouble, Remedy
_PLAIN = (_T.NOT_READY, _T.REFUSED, _T.OUT_OF_MEMORY, _T.OPERATING_SYSTEM)

RULES: dict[tuple[Verb, StepTrouble], Rule] = {
    # A hang is counted beside this table: the second one of a seat is quarantine. So are deaths of the helper.
    **{(verb, _T.HUNG): Rule(_R.REREAD) for verb in Verb},
    **{(verb, _T.HELPER_DIED): Rule(_R.REREAD) for verb in Verb},
    (_V.CHECKS, _T.HUNG): Rule(_R.TURN_BACK),
    (_V.MAP, _T.HUNG): Rule(_R.TURN_BACK),
    (_V.LOCK, _T.HUNG): Rule(_R.TURN_BACK),
    **{(_V.STATE, trouble): Rule(_R.RETRY, _R.QUARANTINE) for trouble in _PLAIN},
    # Nothing was touched yet: the seat runs on as it was.
    **{(_V.CHECKS, trouble): Rule(_R.TURN_BACK) for trouble in _PLAIN},
    # On the way back from a failed restore: without memory for the copies again, the seat cannot be saved.
    **{(_V.HEADROOM, trouble): Rule(_R.TURN_BACK) for trouble in _PLAIN},
    **{(_V.LOCK, trouble): Rule(_R.TURN_BACK) for trouble in _PLAIN},
    # Out of memory here is host memory (or MIG's misleading answer): the seat runs on as it was.
    **{(_V.CHECKPOINT, trouble): Rule(_R.TURN_BACK) for trouble in _PLAIN},
    (_V.RESTORE, _T.NOT_READY): Rule(_R.TURN_BACK),
    (_V.RESTORE, _T.REFUSED): Rule(_R.TURN_BACK),
    # Terminal on real drivers: every later restore answers 304 and part of the memory stays held.
    (_V.RESTORE, _T.OUT_OF_MEMORY): Rule(_R.CONDEMN),
    (_V.RESTORE, _T.OPERATING_SYSTEM): Rule(_R.CONDEMN),
    **{(_V.UNLOCK, trouble): Rule(_R.RETRY) for trouble in _PLAIN},
    # Everything is checkpointed but memory is still in use: give it back to the seat rather than to somebody else.
    **{(_V.EVIDENCE, trouble): Rule(_R.TURN_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.FREEZE, trouble): Rule(_R.TURN_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    # Nothing was touched yet: the seat stays parked where it was.
    **{(_V.MAP, trouble): Rule(_R.TURN_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    # In a rollback the memory was the seat's own; whoever took it is foreign, and a person must look.
    **{(_V.ROOM, trouble): Rule(_R.TURN_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.THAW, trouble): Rule(_R.TURN_BACK, _R.QUARANTINE) for trouble in _PLAIN},
    **{(_V.VERIFY, trouble): Rule(_R.RETRY, _R.QUARANTINE) for trouble in _PLAIN},
    (_V.VERIFY, _T.REFUSED): Rule(_R.RETRY),
}
"""The failure table. A pair that is not listed means condemn; what cannot be killed is quarantined."""

MAX_RETRIES = 3
MAX_HANGS = 1
MAX_HELPER_DEATHS = 3
