"""Commands to the node's manager, answered within milliseconds."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from kybernate.envelope import Message


class Command(Message):
    """Base of commands to a seat's manager."""

    node: str
    seat: str
    actor: str = "router"
    """Who asks: ``router``, ``operator`` or the name of an API key."""
    deadline: float | None = None
    """Unix seconds after which the command must not be begun any more."""
    if_epoch: int | None = None
    """Refuse unless the seat's epoch is this one."""


class ActivateSeat(Command):
    """Bring this seat to VRAM. A router sends it beside its signal; an operator's is demand by itself."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.activate"


class ParkSeat(Command):
    """Take this seat out of VRAM."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.park"


class PinSeat(Command):
    """Keep this seat active: it is activated, and never parked by policy until unpinned."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.pin"


class UnpinSeat(Command):
    """Let policy park this seat again."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.unpin"


class CommandReply(BaseModel):
    """The answer to a command: taken (progress comes as events), or refused with a reason to act on."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    accepted: bool
    op: str = ""
    """Names the operation in events."""
    epoch: int = 0
    """The seat's epoch now."""
    code: str = ""
    """``unknown-seat``, ``pinned``, ``quarantined``, ``stale-epoch``, ``too-late``, ``not-ready`` … when refused."""
    reason: str = ""
    retry_after_seconds: float | None = None
