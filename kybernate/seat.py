"""The states of a seat. Pure.

A seat belongs to one pod UID on one node, and only that node's GPU manager changes it
(``services/gpu_manager/core/facts.py``, ``docs/dev/seat-states.md``).
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
    PARKED = "parked"  # its VRAM is free
    ACTIVATING = "activating"  # the checkpointer moves its VRAM back
    MIGRATING = "migrating"  # as activating, on another group than it was parked on; holds that one
    BACKOFF = "backoff"  # its container exited; kubelet will start it again
    LOST = "lost"  # its processes cannot be used again and are being killed
    QUARANTINED = "quarantined"  # needs a decision of the operator; has a reason
    RELEASING = "releasing"  # its pod is deleted; holds what it held until its processes are gone


HOLDING = frozenset(
    {
        SeatState.STARTING,
        SeatState.ACTIVE,
        SeatState.DRAINING,
        SeatState.PARKING,
        SeatState.ACTIVATING,
        SeatState.MIGRATING,
        SeatState.LOST,
        SeatState.QUARANTINED,
    }
)
"""States in which a seat owns its group's GPUs. RELEASING owns what the state before it owned."""

COMING = frozenset({SeatState.ACTIVATING, SeatState.MIGRATING})
"""States in which the checkpointer brings a parked seat back, where it was or on another group."""


# --- starts inside a container ----------------------------------------------------------------------------------------

_START = "#"
WITHOUT_RUN = "without kyb-run in front of its engine"
"""Ends the reason of a seat that a restart parks where kubelet, and its pause, starts the engine again."""


def container_of(container_id: str) -> str:
    """The id that the runtime knows, of a container or of a start of the engine inside one."""
    return container_id.partition(_START)[0]


def start_inside(container_id: str, call: str) -> str:
    """The id of what kyb-run starts in a container that runs, by this call at the start gate."""
    return f"{container_of(container_id)}{_START}{call}"
