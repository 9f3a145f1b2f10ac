"""What is known of one seat: its facts, and what may happen to it. Its state and its hold on GPUs follow. Pure.

A process holds the GPUs of its group until evidence shows that its memory is free, and a ticket holds them until
nothing can come of it. Silence changes no fact. ``docs/dev/seat-states.md`` is drawn from this table.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kybernate.seat import COMING, SeatState

S = SeatState


class Owner(StrEnum):
    """Whether a pod has the seat."""

    NONE = "none"
    POD = "pod"
    LEAVING = "leaving"  # its pod goes, or is gone while its processes may not be


class Process(StrEnum):
    """The process of its container."""

    NONE = "none"
    ENDED = "ended"  # kubelet starts its container again
    LOADS = "loads"  # it does not serve yet
    RUNS = "runs"


class Residence(StrEnum):
    """Where the memory of its engine is."""

    NOWHERE = "nowhere"  # no engine: it never started, or the last one ended by itself
    VRAM = "vram"
    RAM = "ram"  # a copy, or an engine that sleeps
    DISK = "disk"  # an image
    NOTHING = "nothing"  # parked, nothing is kept: it loads again


class Ticket(StrEnum):
    """Whether a container may come by its last ticket."""

    NONE = "none"
    OPEN = "open"
    FORMER = "former"  # or that of the owner before: its container may start beside this one's


class Promise(StrEnum):
    """What was ordered, and is not done."""

    NONE = "none"
    DRAINS = "drains"  # a switch takes it off its GPUs
    PARKS = "parks"  # it is drained
    ARRIVES = "arrives"  # a switch brings it back
    MOVES = "moves"  # on another group
    ENDS = "ends"  # its processes are being killed
    DROPS = "drops"  # it rests, and so are its processes: its copy is dropped
    HANDS_OFF = "hands-off"  # an operator or evidence decides


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a seat."""

    owner: Owner = Owner.NONE
    process: Process = Process.NONE
    residence: Residence = Residence.NOWHERE
    ticket: Ticket = Ticket.NONE
    promise: Promise = Promise.NONE
    unlocated: bool = False
    """Its processes may be on any group of its pool: the ledger was lost, and nothing has named their GPUs since."""
    conflict: bool = False
    """Evidence shows its hold, nothing granted it, and its group had no room for it."""
    unlisted: bool = False
    """The driver has its processes although the pods say that its container does not run."""
    alive: bool = field(init=False, compare=False)
    """It has a process."""
    waits: bool = field(init=False, compare=False)
    """A container may come by its ticket."""
    comes: bool = field(init=False, compare=False)
    """A switch brings it back; its memory is where it was, as far as evidence shows."""
    holds: bool = field(init=False, compare=False)
    """Its group's GPUs are its own, or may become so by its ticket."""
    at_home: bool = field(init=False, compare=False)
    """A container starts, if ever, with the GPUs that kubelet gave it."""
    state: SeatState = field(init=False, compare=False)
    acts_as: SeatState = field(init=False, compare=False)
    """Its state, but one that is parked and has no process waits: a call at the start gate brings it, and no switch."""

    def __post_init__(self) -> None:
        alive, waits = self.process in (Process.LOADS, Process.RUNS), self.ticket is not Ticket.NONE
        comes = self.promise in (Promise.ARRIVES, Promise.MOVES)
        object.__setattr__(self, "alive", alive)
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "comes", comes)
        object.__setattr__(self, "holds", waits or comes or self.residence is Residence.VRAM)
        object.__setattr__(self, "at_home", not (alive or waits))
        object.__setattr__(self, "state", _state(self))
        object.__setattr__(self, "acts_as", S.WAITING if self.state is S.PARKED and not alive else self.state)


_SERVING = {
    Promise.NONE: S.ACTIVE,
    Promise.DRAINS: S.DRAINING,
    Promise.PARKS: S.PARKING,
    Promise.ARRIVES: S.ACTIVATING,
    Promise.MOVES: S.MIGRATING,
}


def _state(facts: Facts) -> SeatState:
    rules = (
        (facts.owner is Owner.NONE, S.FREE),
        (facts.owner is Owner.LEAVING, S.RELEASING),
        (facts.promise is Promise.HANDS_OFF, S.QUARANTINED),
        (facts.promise is Promise.ENDS, S.LOST),
        (facts.waits or (facts.process is Process.LOADS and facts.promise is Promise.NONE), S.STARTING),
        (facts.process is Process.ENDED, S.BACKOFF),
        (facts.residence is Residence.NOWHERE, S.WAITING),
        (facts.residence is not Residence.VRAM and not facts.comes, S.PARKED),
    )
    return next((state for fits, state in rules if fits), None) or _SERVING.get(facts.promise, S.PARKED)


class Trigger(StrEnum):
    """What can happen to a seat."""

    ALLOCATED = "allocated"  # kubelet gave it to a pod (seen in PodResources)
    TICKET = "ticket"  # the start gate opened
    HEALTHY = "healthy"  # the engine answers its health check
    YIELDS = "yields"  # its start gives way to another seat: a restart parks it
    NO_PROCESS = "no-process"  # a ticket was given and no process came in time
    EVICT = "evict"  # another seat, idleness or an operator wants its GPUs
    DEMAND = "demand"  # it is wanted again while it drains
    DRAINED = "drained"  # nothing in flight any more, or the deadline passed
    EVIDENCE = "evidence"  # the backend proved that its VRAM is free
    EMPTIED = "emptied"  # its engine was ended: it starts cold
    ROLLED_BACK = "rolled-back"  # a failed park was undone; it runs, or loads on
    LEASE = "lease"  # its group's GPUs are reserved for it
    REMAP = "remap"  # another group's GPUs are reserved for it; it comes back to VRAM there
    VERIFIED = "verified"  # the backend proved that it runs
    NOT_RESTORED = "not-restored"  # activation failed before anything was restored; it is parked where it was
    WOKE = "woke"  # it rested and has its memory again: something else than a switch woke it
    FOUND = "found"  # a process that nothing let in holds memory in its container
    UNRECOVERABLE = "unrecoverable"  # its processes are beyond use
    EXITED = "exited"  # its container exited
    CALLED = "called"  # kubelet starts its container again
    QUARANTINE = "quarantine"  # leave it alone and report it to the operator
    CLEARED_ACTIVE = "cleared-active"  # quarantine ended; the driver says it runs
    CLEARED_LOADING = "cleared-loading"  # the same of an engine that has not been healthy yet
    CLEARED_PARKED = "cleared-parked"  # quarantine ended; the driver says it is parked
    DELETED = "deleted"  # its pod is gone from the node's list
    GONE = "gone"  # none of its processes exists any more
    FREED = "freed"  # nor does its pod


_T = Trigger
_COMES = tuple(sorted(COMING))
_RUNS = (S.STARTING, S.ACTIVE, S.DRAINING, S.PARKING, *_COMES)
_IN_USE: dict[str, Any] = {"process": Process.RUNS, "residence": Residence.VRAM}
_GRANTED: dict[str, Any] = {**_IN_USE, "promise": Promise.NONE, "ticket": Ticket.NONE, "conflict": False}
_COPY: dict[str, Any] = {**_GRANTED, "residence": Residence.RAM}
_EMPTY: dict[str, Any] = {
    one: getattr(Facts(), one)
    for one in ("process", "residence", "ticket", "promise", "unlocated", "conflict", "unlisted")
}

TABLE: dict[Trigger, tuple[tuple[SeatState, ...], dict[str, Any]]] = {
    _T.ALLOCATED: ((S.FREE,), {"owner": Owner.POD}),
    _T.TICKET: ((S.WAITING,), {"ticket": Ticket.OPEN}),
    _T.HEALTHY: ((S.STARTING,), {**_IN_USE, "ticket": Ticket.NONE}),
    _T.YIELDS: ((S.STARTING,), {**_IN_USE, "process": Process.LOADS, "ticket": Ticket.NONE, "promise": Promise.PARKS}),
    _T.NO_PROCESS: ((S.STARTING,), {"ticket": Ticket.NONE, "unlocated": False, "conflict": False}),
    _T.EVICT: ((S.ACTIVE,), {"promise": Promise.DRAINS}),
    _T.DEMAND: ((S.DRAINING,), {"promise": Promise.NONE}),
    _T.DRAINED: ((S.DRAINING,), {"promise": Promise.PARKS}),
    _T.EVIDENCE: ((S.STARTING, S.PARKING), _COPY),
    _T.EMPTIED: ((S.PARKING, S.PARKED), {**_EMPTY, "residence": Residence.NOTHING}),
    _T.ROLLED_BACK: ((S.PARKING,), {"promise": Promise.NONE}),
    _T.LEASE: ((S.PARKED,), {"promise": Promise.ARRIVES}),
    _T.REMAP: ((S.PARKED,), {"promise": Promise.MOVES}),
    _T.VERIFIED: (_COMES, {"promise": Promise.NONE}),
    _T.NOT_RESTORED: (_COMES, _COPY),
    _T.WOKE: ((S.PARKED,), {**_IN_USE, "promise": Promise.NONE}),
    _T.FOUND: ((S.PARKED, S.WAITING, S.BACKOFF), {**_IN_USE, "promise": Promise.ENDS}),
    _T.UNRECOVERABLE: ((S.STARTING, S.ACTIVE, S.PARKING, *_COMES, S.QUARANTINED), {**_IN_USE, "promise": Promise.ENDS}),
    _T.EXITED: ((*_RUNS, S.PARKED, S.QUARANTINED), {**_EMPTY, "process": Process.ENDED}),
    _T.CALLED: ((S.BACKOFF,), _EMPTY),
    _T.QUARANTINE: ((*_RUNS, S.LOST), {"promise": Promise.HANDS_OFF}),
    _T.CLEARED_ACTIVE: ((S.QUARANTINED,), _GRANTED),
    _T.CLEARED_LOADING: ((S.QUARANTINED,), {**_GRANTED, "process": Process.LOADS}),
    _T.CLEARED_PARKED: ((S.QUARANTINED,), _COPY),
    _T.DELETED: (
        tuple(state for state in S if state not in (S.FREE, S.RELEASING)),
        {"owner": Owner.LEAVING, "promise": Promise.NONE},
    ),
    _T.GONE: ((S.LOST,), _EMPTY),
    _T.FREED: ((S.RELEASING,), {**_EMPTY, "owner": Owner.NONE}),
}
"""In which states (``acts_as``) it can happen, and which facts it changes."""


class IllegalTransitionError(Exception):
    """The table has no such row; the seat stays as it was."""


def after(facts: Facts, trigger: Trigger) -> Facts:
    """The facts after it. Raises IllegalTransitionError for a state that the table does not list."""
    states, changes = TABLE[trigger]
    if facts.acts_as not in states or (trigger is Trigger.NO_PROCESS and facts.alive):
        raise IllegalTransitionError(f"a {facts.state} seat cannot take {trigger!s}")
    return changed(facts, **changes)


def changed(facts: Facts, **changes: Any) -> Facts:
    """The facts with these changes. One that was coming back is in VRAM, unless they say that it is not."""
    came = {"residence": Residence.VRAM} if facts.comes and "promise" in changes else {}
    return replace(facts, **came | changes)
