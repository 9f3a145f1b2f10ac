"""All seats that a router knows, and the models that they serve. Pure."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from kybernate.messages import SeatAllocated, SeatEvent
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import SeatState
from services.router.lanes import Call, Lane, lane_of


@dataclass(slots=True, eq=False)
class Model:
    """The seats of one model, and the calls that wait for it."""

    name: str
    lanes: dict[str, Lane] = field(default_factory=dict)
    held: dict[int, Call] = field(default_factory=dict)
    orphans: dict[int, Call] = field(default_factory=dict)
    """Those of ``held`` for which no seat can be used at present."""


class Change(NamedTuple):
    """Something was learned about a seat."""

    lane: Lane
    before: SeatRecord | None
    """What was known; None: nothing."""
    left: str
    """The model that it no longer serves; empty: none."""

    @property
    def opened(self) -> bool:
        """Whether it serves now and did not before."""
        was = self.before is not None and self.before.state is SeatState.ACTIVE
        return self.lane.record.state is SeatState.ACTIVE and not was

    @property
    def moved(self) -> bool:
        """Whether connections made before are of no use any more."""
        record = self.lane.record
        return self.before is not None and (
            self.before.endpoint != record.endpoint or record.state is not SeatState.ACTIVE
        )


class SeatTable:
    """Lanes by key of the roster, models by name. ``models`` follows what the lanes serve."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.models: dict[str, Model] = {}

    def model(self, name: str) -> Model:
        """The model of this name, made known if it was not."""
        return self.models.setdefault(name, Model(name))

    def forget_empty(self, name: str) -> None:
        """A model without seats that nobody waits for does not exist."""
        model = self.models.get(name)
        if model is not None and not model.lanes and not model.held:
            del self.models[name]

    def hear(self, event: SeatEvent) -> Change | None:
        """Take an event; None when it says nothing new."""
        if isinstance(event, SeatAllocated):
            return None  # what the plugin says is a hint for the manager, which alone knows the seat's state
        lane = self.lanes.get(seat_key(event.node, event.seat))
        if lane is None:
            lane = lane_of(event)
            return None if lane is None else self._change(lane, None)
        before, unseen = lane.record, lane.unseen
        return self._change(lane, before) if lane.hear(event) or unseen != lane.unseen else None

    def see(self, record: SeatRecord, *, overrule: bool = False) -> Change | None:
        """Take a row of the roster; None when it says nothing new."""
        lane = self.lanes.get(record.key)
        if lane is None:
            return self._change(Lane(record, f"roster:{record.key}:{record.epoch}"), None)
        before, unseen = lane.record, lane.unseen
        return self._change(lane, before) if lane.see(record, overrule=overrule) or unseen != lane.unseen else None

    def drop(self, lane: Lane) -> Change:
        """The seat does not exist any more."""
        before = lane.record
        lane.record = before.model_copy(update={"state": SeatState.FREE})
        change = self._change(lane, before)
        del self.lanes[lane.key]
        return change

    def retry_after(self, model: str, speed: float) -> int:
        """Wall seconds, at least 1: the learned time of a switch to this model."""
        lanes = self.models[model].lanes.values() if model in self.models else ()
        learned = [lane.record.activate_seconds for lane in lanes if lane.record.activate_seconds > 0]
        return max(1, math.ceil(min(learned) / speed)) if learned else 1

    def known(self) -> str:
        """Names of the models, for texts."""
        return ", ".join(sorted(self.models)) or "none yet"

    def _change(self, lane: Lane, before: SeatRecord | None) -> Change:
        self.lanes[lane.key] = lane
        old, new = lane.model, "" if lane.record.state is SeatState.FREE else lane.record.model
        if old == new:
            return Change(lane, before, "")
        if old in self.models:
            del self.models[old].lanes[lane.key]
        lane.serve(new)
        if new:
            self.model(new).lanes[lane.key] = lane
        return Change(lane, before, old)
