"""One switch of a group: which seat leaves, which one arrives, and the table of its phases.

Pure data with one rule: a phase follows another only in ``GroupSwitch.advance``. ``switch.py`` decides.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from services.gpu_manager.core.inputs import ModelTime, WallTime

RESEND_SECONDS = 1.0
"""Wall: how long to wait for the checkpointer's answer before the job is sent again."""
CUT_GRACE_SECONDS = 2.0
"""Wall: how long after a cut the engine may take to notice that its callers left."""


class SwitchPhase(StrEnum):
    """How far a switch is."""

    DRAINING = "draining"  # the victim serves what is in flight and gets nothing new
    CUTTING = "cutting"  # its streams are cut; the engine notices that the callers left
    JOB = "job"  # the checkpointer parks the victim and activates the incoming seat
    DONE = "done"


class SwitchTrigger(StrEnum):
    """What can happen to a switch."""

    IDLE = "idle"  # nothing is in flight any more
    DEADLINE = "deadline"  # the drain took too long
    GRACE_OVER = "grace-over"  # the engine had time to notice the cut
    CALLED_OFF = "called-off"  # the eviction is not justified any more; the victim serves on
    VICTIM_LEFT = "victim-left"  # it exited or was deleted before the job was sent
    REFUSED = "refused"  # the checkpointer does not take the job
    FINISHED = "finished"  # the checkpointer reports the end of the job


_P, _W = SwitchPhase, SwitchTrigger
SWITCH_TRANSITIONS: dict[tuple[SwitchPhase, SwitchTrigger], SwitchPhase] = {
    (_P.DRAINING, _W.IDLE): _P.JOB,
    (_P.DRAINING, _W.DEADLINE): _P.CUTTING,
    (_P.DRAINING, _W.CALLED_OFF): _P.DONE,
    (_P.DRAINING, _W.VICTIM_LEFT): _P.DONE,
    (_P.CUTTING, _W.IDLE): _P.JOB,
    (_P.CUTTING, _W.GRACE_OVER): _P.JOB,
    (_P.CUTTING, _W.VICTIM_LEFT): _P.DONE,
    (_P.JOB, _W.VICTIM_LEFT): _P.DONE,
    (_P.JOB, _W.REFUSED): _P.DONE,
    (_P.JOB, _W.FINISHED): _P.DONE,
}
"""A switch without a victim begins in the phase ``job``."""


@dataclass(slots=True)
class Drain:
    """How the victim leaves."""

    deadline: ModelTime
    """Draining ends with a cut then."""
    announced: WallTime = WallTime(0.0)
    """When the roster entry that closes the victim was written; 0: it is not."""
    overdue: WallTime = WallTime(0.0)
    """Since then routers that have not acknowledged it are not listed; 0: they are."""
    quiet: WallTime | None = None
    """Every router has been quiet since then."""
    idle: bool = False
    """The engine, asked since then, computes nothing."""
    cut: WallTime = WallTime(0.0)


@dataclass(slots=True)
class JobExchange:
    """What is known of the SwitchJob at the checkpointer."""

    sent: WallTime | None = None
    """When it was last sent; None: send it now."""
    journaled: bool = False
    """The checkpointer has it in its journal: it finishes without the manager."""


@dataclass(slots=True)
class SwitchTimes:
    """When the steps of a switch happened, for what is learned and reported."""

    decided: WallTime
    drained: WallTime
    """The victim was drained; without a victim, as ``decided``."""
    leaves: WallTime | None = None
    """Since then only the switch itself keeps the victim, where it had nothing in flight from the beginning."""
    parked: WallTime | None = None
    """The victim's VRAM was free."""
    control_seconds: float = 0.0
    """From drained until the job was journaled."""
    park_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Of the park."""


@dataclass(slots=True)
class GroupSwitch:
    """One switch of a group: which seat leaves, which one arrives, and how far it is."""

    op: str
    epoch: int
    group: str
    victim: str | None
    incoming: str | None
    cause: str
    phase: SwitchPhase
    drain: Drain
    times: SwitchTimes
    job: JobExchange = field(default_factory=JobExchange)
    clears_for: str | None = None
    """A seat of another group for which these GPUs are cleared."""
    room_for: str | None = None
    """A seat of this group for which more than the victim has to leave."""
    ordered: bool = False
    """An operator wants the victim parked: nothing calls the drain off."""

    def advance(self, trigger: SwitchTrigger) -> None:
        """Follow the table. A pair that it does not list is a KeyError and changes nothing."""
        self.phase = SWITCH_TRANSITIONS[self.phase, trigger]

    @property
    def holds_group(self) -> bool:
        """Its job is sent, or about to be: the checkpointer may fill the group's GPUs until the switch ends."""
        return self.phase is SwitchPhase.JOB

    @property
    def beneficiary(self) -> str | None:
        """The seat for which the victim leaves: the incoming one, or one that needs more than the victim's place."""
        return self.incoming or self.clears_for or self.room_for
