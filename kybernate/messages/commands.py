"""Commands to the node's manager, answered within milliseconds."""

from typing import ClassVar, Literal

from kybernate.envelope import Message, Record


class Command(Message):
    """Base of commands to a node's manager."""

    node: str
    actor: str = "router"
    """Who asks: ``router``, ``operator`` or the name of an API key."""


class SeatCommand(Command):
    """Base of commands about a seat that are done, or refused, at once."""

    seat: str


class OrderCommand(Command):
    """Base of commands that set or take away what the manager is to bring about. A repeated one changes nothing."""

    dry_run: bool = False
    """From older releases only: it is refused."""


class ActivateSeat(SeatCommand):
    """Bring this seat to VRAM. A router sends it beside its signal; an operator's is demand by itself."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.activate"


class ParkSeat(SeatCommand):
    """Take this seat out of VRAM."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.park"


class PinSeat(SeatCommand):
    """Keep this seat active: it is activated, and never parked by policy until unpinned."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.pin"


class UnpinSeat(SeatCommand):
    """Let policy park this seat again."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.unpin"


class MigrateSeat(OrderCommand):
    """Park this seat, if it is active, and activate it on another group of its node."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.{seat}.migrate"

    seat: str
    to: str
    """Name of the group."""


class DrainNode(OrderCommand):
    """Park every seat that holds the node's GPUs, or those of one group, and start and activate none there."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.node.drain"

    group: str = ""
    """Name of the group; empty: all of the node."""
    purpose: Literal["maintenance", "upgrade"] = "maintenance"
    """Only ``upgrade`` also parks pinned seats."""


class ResumeNode(OrderCommand):
    """End a drain of the node, or of one group."""

    subject_template: ClassVar[str] = "kyb.v1.cmd.{node}.node.resume"

    group: str = ""
    """Name of the group; empty: the drain of the node."""


class OrderStatus(Record):
    """What an operator ordered, and how far it is."""

    verb: Literal["migrate", "drain", "resume"]
    target: str = ""
    """A seat or a group; empty: the node."""
    model: str = ""
    """Of ``migrate``: the seat's."""
    to: str = ""
    """Of ``migrate``: the group."""
    purpose: str = ""
    """Of ``drain``."""
    actor: str = ""
    begun_at: float = 0.0
    """Unix seconds."""
    text: str = ""
    """What it waits for, or what is true, for people."""
    outcome: Literal["", "done", "failed"] = ""
    """``done``: it is as ordered; empty: not yet. A drain stays in force until it is resumed."""


class CommandReply(Record):
    """The answer to a command: taken (progress comes as events), or refused with a reason to act on."""

    accepted: bool
    at: float | None = None
    """Unix seconds at which the manager decided on it; what follows does not wait for this answer."""
    op: str = ""
    """Names the operation in events."""
    epoch: int = 0
    """The seat's epoch now."""
    code: str = ""
    """``unknown-seat``, ``pinned``, ``quarantined``, ``not-ready`` … when refused."""
    reason: str = ""
    retry_after_seconds: float | None = None
    order: OrderStatus | None = None
    """Of ``migrate``, ``drain`` and ``resume``."""
