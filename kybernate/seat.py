"""One seat: its states, the table of what may follow what, and nothing else. Pure.

A seat's state belongs to one pod UID on one node, and only that node's GPU manager calls ``advance``. What is not
in the table is refused loudly and changes nothing. ``docs/seat-states.md`` is drawn from this table.
"""

from enum import StrEnum

LEDGER_FORMAT = 1
"""Of the ledger that a manager keeps of its seats. Raised when a manager that knows only the number before would take a
ledger for something else."""


class SeatState(StrEnum):
    """What a seat is doing."""

    FREE = "free"  # no pod owns it
    WAITING = "waiting"  # a pod owns it; its container waits at the start gate
    STARTING = "starting"  # ticket given; the engine loads and takes VRAM
    ACTIVE = "active"  # holds VRAM and serves
    DRAINING = "draining"  # holds VRAM, finishes what is in flight, gets nothing new
    PARKING = "parking"  # the checkpointer moves its VRAM out
    PARKED = "parked"  # checkpointed; its VRAM is free
    ACTIVATING = "activating"  # the checkpointer moves its VRAM back
    MIGRATING = "migrating"  # as activating, on another group than it was parked on; holds that one
    BACKOFF = "backoff"  # its container exited; kubelet will start it again
    LOST = "lost"  # its processes cannot be used again and are being killed
    QUARANTINED = "quarantined"  # needs a decision of the operator; has a reason
    RELEASING = "releasing"  # its pod is deleted; holds what it held until its processes are gone


class Trigger(StrEnum):
    """What can happen to a seat."""

    ALLOCATED = "allocated"  # kubelet gave it to a pod (seen in PodResources)
    TICKET = "ticket"  # the start gate opened
    HEALTHY = "healthy"  # the engine answers its health check
    NO_PROCESS = "no-process"  # a ticket was given and no process came in time
    EVICT = "evict"  # another seat, idleness or an operator wants its GPUs
    DEMAND = "demand"  # it is wanted again while it drains
    DRAINED = "drained"  # nothing in flight any more, or the deadline passed
    EVIDENCE = "evidence"  # the backend proved that its VRAM is free
    ROLLED_BACK = "rolled-back"  # a failed park was undone; it runs
    LEASE = "lease"  # its group's GPUs are reserved for it
    VERIFIED = "verified"  # the backend proved that it runs
    NOT_RESTORED = "not-restored"  # activation failed before anything was restored
    UNRECOVERABLE = "unrecoverable"  # its processes are beyond use
    EXITED = "exited"  # its container exited
    CALLED = "called"  # kubelet starts its container again
    REMAP = "remap"  # another group's GPUs are reserved for it; it comes back to VRAM there
    MOVED_ACTIVE = "moved-active"  # the backend proved that it runs there
    MOVED_PARKED = "moved-parked"  # nothing was restored; it is parked where it was
    QUARANTINE = "quarantine"  # leave it alone and report it to the operator
    CLEARED_ACTIVE = "cleared-active"  # quarantine ended; the driver says it runs
    CLEARED_PARKED = "cleared-parked"  # quarantine ended; the driver says it is parked
    DELETED = "deleted"  # its pod is gone from the node's list
    GONE = "gone"  # none of its processes exists any more


_S, _T = SeatState, Trigger

TRANSITIONS: dict[tuple[SeatState, Trigger], SeatState] = {
    (_S.FREE, _T.ALLOCATED): _S.WAITING,
    (_S.WAITING, _T.TICKET): _S.STARTING,
    (_S.STARTING, _T.HEALTHY): _S.ACTIVE,
    (_S.STARTING, _T.EVIDENCE): _S.PARKED,
    (_S.STARTING, _T.NO_PROCESS): _S.WAITING,
    (_S.STARTING, _T.UNRECOVERABLE): _S.LOST,
    (_S.STARTING, _T.EXITED): _S.BACKOFF,
    (_S.ACTIVE, _T.EVICT): _S.DRAINING,
    (_S.ACTIVE, _T.UNRECOVERABLE): _S.LOST,  # its processes are on another group's GPUs
    (_S.ACTIVE, _T.EXITED): _S.BACKOFF,
    (_S.DRAINING, _T.DEMAND): _S.ACTIVE,
    (_S.DRAINING, _T.DRAINED): _S.PARKING,
    (_S.DRAINING, _T.EXITED): _S.BACKOFF,
    (_S.PARKING, _T.EVIDENCE): _S.PARKED,
    (_S.PARKING, _T.ROLLED_BACK): _S.ACTIVE,
    (_S.PARKING, _T.UNRECOVERABLE): _S.LOST,
    (_S.PARKING, _T.EXITED): _S.BACKOFF,
    (_S.PARKED, _T.LEASE): _S.ACTIVATING,
    (_S.PARKED, _T.REMAP): _S.MIGRATING,
    (_S.PARKED, _T.EXITED): _S.BACKOFF,
    (_S.ACTIVATING, _T.VERIFIED): _S.ACTIVE,
    (_S.ACTIVATING, _T.NOT_RESTORED): _S.PARKED,
    (_S.ACTIVATING, _T.UNRECOVERABLE): _S.LOST,
    (_S.ACTIVATING, _T.EXITED): _S.BACKOFF,
    (_S.MIGRATING, _T.MOVED_ACTIVE): _S.ACTIVE,
    (_S.MIGRATING, _T.MOVED_PARKED): _S.PARKED,
    (_S.MIGRATING, _T.UNRECOVERABLE): _S.LOST,
    (_S.MIGRATING, _T.EXITED): _S.BACKOFF,
    (_S.BACKOFF, _T.CALLED): _S.WAITING,
    (_S.LOST, _T.GONE): _S.WAITING,
    (_S.QUARANTINED, _T.CLEARED_ACTIVE): _S.ACTIVE,
    (_S.QUARANTINED, _T.CLEARED_PARKED): _S.PARKED,
    (_S.QUARANTINED, _T.UNRECOVERABLE): _S.LOST,
    (_S.QUARANTINED, _T.EXITED): _S.BACKOFF,
    (_S.RELEASING, _T.GONE): _S.FREE,
    **{
        (state, _T.QUARANTINE): _S.QUARANTINED
        for state in (_S.STARTING, _S.ACTIVE, _S.DRAINING, _S.PARKING, _S.ACTIVATING, _S.MIGRATING, _S.LOST)
    },
    **{(state, _T.DELETED): _S.RELEASING for state in _S if state not in (_S.FREE, _S.RELEASING)},
}

HOLDING = frozenset(
    {
        _S.STARTING,
        _S.ACTIVE,
        _S.DRAINING,
        _S.PARKING,
        _S.ACTIVATING,
        _S.MIGRATING,
        _S.LOST,
        _S.QUARANTINED,
    }
)
"""States in which a seat owns its group's GPUs. RELEASING owns what the state before it owned."""


COMING = frozenset({_S.ACTIVATING, _S.MIGRATING})
"""States in which the checkpointer brings a parked seat back, where it was or on another group."""


class IllegalTransitionError(Exception):
    """The table has no such row; the seat stays as it was."""

    def __init__(self, state: SeatState, trigger: Trigger) -> None:
        super().__init__(f"a {state} seat cannot take {trigger!s}")
        self.state = state
        self.trigger = trigger


def advance(state: SeatState, trigger: Trigger) -> SeatState:
    """The state after ``trigger``. Raises IllegalTransitionError for a pair that the table does not list."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalTransitionError(state, trigger) from None
