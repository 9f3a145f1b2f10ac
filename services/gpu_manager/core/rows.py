"""What the list of obstacles is made of: rows, what is asked, and what holds. Pure."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from kybernate.messages import CommandReply
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.clock import NO_CLOCK, Clock
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState

S = SeatState


@dataclass(frozen=True, slots=True)
class Stage:
    """What a seat waits for, or does. Times in ``data`` are wall seconds from now; ``text`` has none that pass."""

    stage: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    clock: Clock = NO_CLOCK

    def as_json(self, now: Now) -> dict[str, Any]:
        """Plain data, with the clock as of now."""
        text = self.text + self.clock.text(now)
        return {"stage": self.stage, "text": text, "data": self.data, "clock": self.clock.as_json(now)}


Act = Literal["run", "ticket", "send", "command", "home", "guest"]
"""What is asked: may it take a free slot (``run``); may a second call of a starting seat have a ticket (``ticket``);
may a job or a drain bring it to the place of a victim (``send``); may a command want it there (``command``); has its
own group a slot for it (``home``); may another group bring it (``guest``)."""
Subject = Literal["group", "seat", "pair", "holder"]
Kind = Literal["stop", "wait", "prefer"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list. The docstring of ``holds`` says when it holds."""

    holds: "Callable[[Ask], Stage | None]"
    nr: int
    stage: str
    subject: Subject
    who: str
    """Who can end it; ``-``: time."""
    ends: str = ""
    """How it ends by itself; empty: it does not."""
    code: str = "blocked"
    """Of the commands that it refuses."""
    retry: float | None = None
    """Wall: when such a command is worth repeating."""

    @property
    def kind(self) -> Kind:
        """``stop`` and ``wait`` forbid, ``prefer`` does not."""
        return "stop" if self.nr < 200 else "wait" if self.nr < 400 else "prefer"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A row that holds now."""

    row: Row
    stage: Stage

    @property
    def text(self) -> str:
        """For people."""
        return self.stage.text

    def refusal(self, epoch: int, text: str = "") -> CommandReply:
        """The answer to a command that it refuses."""
        code, retry = self.row.code, self.row.retry
        return CommandReply(accepted=False, code=code, reason=text or self.text, epoch=epoch, retry_after_seconds=retry)


@dataclass
class Ask:
    """May this seat run on this group now? ``without``: a holder that counts as gone, with its switch."""

    node: NodeState
    group: Group
    now: Now
    of: ManagedSeat | None = None
    without: ManagedSeat | None = None
    act: Act = "run"

    @property
    def seat(self) -> ManagedSeat:
        """The seat; rows about a group alone do not read it."""
        assert self.of is not None
        return self.of

    @cached_property
    def fits(self) -> bool:
        """The seat has room there: slots, GPUs, VRAM."""
        return view.room(self.node, self.seat, without=self.without, on=self.group)

    @cached_property
    def stuck(self) -> dict[int, ManagedSeat]:
        """Holders that cannot leave now, the first of each row; empty where the seat fits beside all of them.

        A command counts every pinned seat of the group, parked or not: it will want its place back.
        """
        node, group = self.node, self.group
        holders = [*view.holders(node, group), *view.overlapping(node, group)]
        if self.act == "command":
            holders += [one for one in node.seats_on(group) if one.pinned and not one.lease]
        others = [one for one in holders if one is not self.of and one is not self.without]
        found = [(nr, one) for one in others if (nr := self.keeps(one))]
        if not self._lacks_room(found):
            return {}
        if not self._lacks_room(stops := [(nr, one) for nr, one in found if nr < 200]):
            found = [one for one in found if one not in stops]
        return dict(reversed(found))

    def _lacks_room(self, found: list[tuple[int, ManagedSeat]]) -> bool:
        """True when the seat does not fit beside these holders alone."""
        node, group, own = self.node, self.group, [one for _, one in found if one.group.name == self.group.name]
        if not found or (len(own) == len(found) and len(own) < group.slots):
            return bool(found) and not view.fit_together(node, group, [*own, self.seat])
        return True

    def keeps(self, holder: ManagedSeat) -> int:
        """The number of the row by which a holder does not leave; 0: it could."""
        if holder.state in (S.RELEASING, S.LOST):
            return 0 if self.act == "command" else 330
        if holder.state is S.QUARANTINED or holder.pinned:
            return 140 if holder.state is S.QUARANTINED else 170
        if self.act == "command" or holder.state is S.STARTING:
            return 0 if self.act == "command" else 340
        other = holder.group.name != self.group.name and holder.backoff.park.active(self.now)
        return 350 if other or holder.id in view.spared(view.holders(self.node, self.group), self.now) else 0


ROWS: list[Row] = []
"""The list, in order."""


def row(*columns: Any, **more: Any) -> Callable[[Callable[[Ask], Stage | None]], Row]:
    """Make a row of a function: the core's, or that of a rider."""

    def add(holds: Callable[[Ask], Stage | None]) -> Row:
        made = Row(holds, *columns, **more)
        insort(ROWS, made, key=lambda one: one.nr)
        return made

    return add
