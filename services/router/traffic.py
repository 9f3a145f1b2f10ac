"""The router's decisions: which seat serves a call, who waits, who is sent when. Pure and synchronous.

``Traffic.handle(happening, now)`` is the only way in, its list of effects the only way out. A held call ends in
exactly one of: forwarded, timed out (503), rejected (429, 503 with the manager's reason), caller gone. A forwarded
call that comes back before the first byte of its answer waits again, until its deadline.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kybernate.messages import SeatActivated, SeatEvent
from kybernate.roster import SeatRecord
from kybernate.seat import COMING, SeatState
from services.router import happenings as h
from services.router.accounting import Level, level
from services.router.admission import Admission
from services.router.alarms import Alarms, Name
from services.router.asks import WAKE_UNHEARD_SECONDS, Asks, Identity
from services.router.hold import Limits
from services.router.lanes import ASKABLE, CLOSING, CUT, FREEZING, Lane
from services.router.seats import Change, Model, SeatTable
from services.router.trust import Trust
from services.router.turn import Turn

MISSING_SECONDS = 10.0
"""A seat that vanished from the roster is forgotten after so long; a manager writes it again sooner if it is there."""


class Traffic:
    """All seats and calls of one router."""

    def __init__(self, limits: Limits, identity: Identity) -> None:
        self.limits = limits
        self.trust = Trust()
        self.seats = SeatTable()
        self._alarms, self._turn = Alarms(), Turn()
        self._asks = Asks(identity, self._alarms)
        self._admission = Admission(limits, self.seats, self.trust, self._asks, self._alarms, self._turn)
        self._dirty: dict[str, Lane | None] = {}
        self._takers: dict[type, Callable[[Any], None]] = {
            h.Arrived: self._admission.arrived,
            h.Ended: self._admission.ended,
            h.Refused: self._admission.came_back,
            SeatRecord: lambda record: self._learned(self.seats.see(record)),
            h.SeatMissing: self._missing,
            h.Synced: self._synced,
            h.Confirmed: self._confirmed,
            h.BusLost: lambda _: self.trust.lose(),
            h.ManagerSaid: self._manager_said,
            h.Replied: self._replied,
            h.Tick: lambda _: self._ring(),
        }

    def handle(self, happening: h.Happening, now: float) -> list[h.Effect]:
        """Take one happening at ``now`` (wall seconds, monotonic); returns what to do, in order."""
        self._turn.begin(now)
        self._takers.get(type(happening), self._heard)(happening)
        while self._dirty:
            name, opened = self._dirty.popitem()
            self._admission.settle(name, opened)
        return self._turn.effects

    @property
    def lanes(self) -> dict[str, Lane]:
        """All seats by key of the roster."""
        return self.seats.lanes

    @property
    def models(self) -> dict[str, Model]:
        """All models by name."""
        return self.seats.models

    def serves(self, model: str) -> bool:
        """Whether any seat is of this model; what callers make up has none."""
        known = self.models.get(model)
        return known is not None and bool(known.lanes)

    def next_at(self) -> float | None:
        """When a Tick is wanted at the latest."""
        return self._alarms.next()

    def level(self, model: str, key: str | None, now: float) -> Level:
        """The present level of (model, seat); key None: calls that no seat can serve at present."""
        return level(self.seats, model, key, now)

    def activation(self, key: str, epoch: int) -> SeatActivated | None:
        """The event that opened this seat at this epoch, if it was heard."""
        lane = self.lanes.get(key)
        event = lane.activation if lane else None
        return event if event is not None and event.epoch == epoch else None

    # --- seats ----------------------------------------------------------------------------------------------------

    def _heard(self, event: h.Happening) -> None:
        assert isinstance(event, SeatEvent)
        self._learned(self.seats.hear(event))

    def _missing(self, m: h.SeatMissing) -> None:
        lane = self.lanes.get(m.key)
        if lane is not None and not lane.unseen:
            lane.unseen = True
            self._alarms.clear(("missing", m.key))
            self._alarms.set(("missing", m.key), self._turn.now + MISSING_SECONDS)

    def _learned(self, change: Change | None) -> None:
        """Do what follows from a seat's new state, epoch, endpoint or model."""
        if change is None:
            return
        lane, state = change.lane, change.lane.record.state
        if change.left:
            self._turn.touch(change.left, lane, edge=True)
            self._dirty.setdefault(change.left, None)
        if change.moved:
            self._turn.effects.append(h.Disconnect(lane.key))
        if state not in ASKABLE:
            lane.wake_sent = None
        self._freeze(lane)
        if state in CUT and lane.frozen_since is None:
            self._cut(lane)
        if state in CLOSING:
            self._turn.say(self._asks.acknowledge(lane, self._turn.now))
        if lane.model:
            self._dirty[lane.model] = lane if change.opened else self._dirty.get(lane.model)

    def _freeze(self, lane: Lane) -> None:
        """Requests in flight may stand still with their seat; they are kept until the stall budget is used up."""
        state, stall = lane.record.state, lane.record.stall_seconds
        if state in FREEZING and stall > 0 and lane.in_flight and lane.frozen_since is None:
            lane.frozen_since = self._turn.now
            self._alarms.set(("frozen", lane.key), self._turn.now + stall)
        elif lane.frozen_since is not None and state not in (*FREEZING, *COMING):
            stood = self._turn.now - lane.frozen_since
            for call in lane.in_flight.values():
                call.sent += stood  # what it stood still was no service
            lane.frozen_since = None
            self._alarms.clear(("frozen", lane.key))

    def _cut(self, lane: Lane) -> None:
        lost = lane.record.state is SeatState.LOST
        for call in list(lane.in_flight.values()):
            if call.kind == "permit":
                self._admission.ended(h.Ended(call.request))
            else:
                self._turn.effects.append(h.Cut(call.request, "upstream_failed" if lost else "seat_evicted"))

    # --- what the bus and the managers say ------------------------------------------------------------------------

    def _replied(self, m: h.Replied) -> None:
        lane = self.lanes.get(m.key)
        if lane is not None and m.reply is not None:
            self._asks.wake_answered(lane, m.reply, self._turn.now)
            self._stir([lane])

    def _manager_said(self, m: h.ManagerSaid) -> None:
        self._asks.ask_answered(m.node, heard=m.records is not None, now=self._turn.now)
        if m.records is None:
            return
        for record in m.records:
            self._learned(self.seats.see(record))
        self.trust.verify(m.node, m.at)
        self._stir_node(m.node)

    def _synced(self, m: h.Synced) -> None:
        first = not self.trust.ever_synced
        for record in m.records:
            self._learned(self.seats.see(record, overrule=True))
        self.trust.sync(m.at)
        for lane in self.lanes.values():
            if lane.key not in m.present:
                self._missing(h.SeatMissing(lane.key))
            lane.wake_sent = None
            if lane.record.state in CLOSING:
                self._turn.say(self._asks.acknowledge(lane, self._turn.now))
        self._stir(self.lanes.values())
        if first:
            self._admission.reject_unknown()

    def _confirmed(self, m: h.Confirmed) -> None:
        if not self.trust.confirm(m.at):
            self._turn.effects.append(h.Resync())

    def _stir_node(self, node: str) -> None:
        self._stir(lane for lane in self.lanes.values() if lane.record.node == node)

    def _stir(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            if lane.model:
                self._dirty.setdefault(lane.model, None)

    # --- time -----------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        for name in self._alarms.due(self._turn.now):
            self._rang(name)

    def _rang(self, name: Name) -> None:
        kind, of = name
        if isinstance(of, int):
            self._admission.rang(kind, of)
            return
        if kind == "ask":
            self._asks.ask_again(of)
            self._stir_node(of)
            return
        lane = self.lanes.get(of)
        if lane is None:
            return
        if kind == "ack" and lane.record.state in CLOSING:
            self._turn.say(self._asks.acknowledge(lane, self._turn.now))
        elif kind == "wake" and lane.waiting and lane.record.state in ASKABLE:
            self._turn.say(self._asks.wake(lane, self._turn.now))
            self._alarms.set(name, self._turn.now + WAKE_UNHEARD_SECONDS)
        elif kind == "frozen" and lane.frozen_since is not None:
            self._cut(lane)  # the budget is used up
        elif kind == "refusal":
            lane.refusal = None
        elif kind == "missing" and lane.unseen:
            self._learned(self.seats.drop(lane))
        self._stir([lane])
