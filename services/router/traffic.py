"""The router's decisions: which seat serves a call, who waits, who is sent when. Pure and synchronous.

``Traffic.handle(happening, now)`` is the only way in, its list of effects the only way out. A held call ends in
exactly one of: forwarded, timed out (503), rejected (429, 503 with the manager's reason), caller gone. A forwarded
call that comes back before the first byte of its answer waits again, until its deadline.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kybernate.messages import SeatActivated, SeatEvent
from kybernate.roster import SeatRecord
from kybernate.seat import COMING, SeatState
from services.router import happenings as h
from services.router.ages import steps
from services.router.alarms import Alarms, Name
from services.router.asks import WAKE_UNHEARD_SECONDS, Asks, Identity
from services.router.lanes import ASKABLE, CLOSING, CUT, FREEZING, Call, Lane, Rank, best
from services.router.seats import Change, Model, SeatTable
from services.router.trust import Trust

SUSPECT_SECONDS = 0.25
"""How long a seat whose engine refused a connection gets nothing, unless it says something new."""
MISSING_SECONDS = 10.0
"""A seat that vanished from the roster is forgotten after so long; a manager writes it again sooner if it is there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router. Durations in wall seconds; ``speed`` turns learned model seconds into Retry-After."""

    hold_seconds: float = 300.0
    queue_limit: int = 2000
    held_bytes: int = 256 * 2**20
    permit_seconds: float = 2.0
    speed: float = 1.0


class Level(NamedTuple):
    """What this router has for one (model, seat) now."""

    waiting: int = 0
    in_flight: int = 0
    arrivals: int = 0
    """Since the router started."""
    oldest_wait: float | None = None
    """Wall seconds."""
    seat: str | None = None
    tier: str = "standard"
    cause: str = "router"
    served: int = 0
    served_seconds: float = 0.0
    """Wall seconds in flight of those."""
    ages: tuple[tuple[float, int], ...] = ()
    """Of those that wait, oldest first: (wall seconds, how many)."""


class Traffic:
    """All seats and calls of one router."""

    def __init__(self, limits: Limits, identity: Identity) -> None:
        self.limits = limits
        self.trust = Trust()
        self.seats = SeatTable()
        self._calls: dict[int, Call] = {}
        self._held_bytes = 0
        self._alarms = Alarms()
        self._asks = Asks(identity, self._alarms)
        self._dirty: dict[str, Lane | None] = {}
        self._out: list[h.Effect] = []
        self._now = 0.0
        self._takers: dict[type, Callable[[Any], None]] = {
            h.Arrived: self._arrived,
            h.Ended: self._ended,
            h.Refused: self._refused,
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
        self._now, self._out = now, []
        self._takers.get(type(happening), self._heard)(happening)
        while self._dirty:
            name, opened = self._dirty.popitem()
            self._settle(name, opened)
        return self._out

    @property
    def lanes(self) -> dict[str, Lane]:
        """All seats by key of the roster."""
        return self.seats.lanes

    @property
    def models(self) -> dict[str, Model]:
        """All models by name."""
        return self.seats.models

    def next_at(self) -> float | None:
        """When a Tick is wanted at the latest."""
        return self._alarms.next()

    def level(self, model: str, key: str | None, now: float) -> Level:
        """The present level of (model, seat); key None: calls that no seat can serve at present."""
        if key is None:
            orphans = self.models[model].orphans if model in self.models else {}
            first = next(iter(orphans.values()), None)
            return Level(
                len(orphans),
                oldest_wait=now - first.arrived if first else None,
                cause=first.cause if first else model,
                ages=steps([now - call.arrived for call in orphans.values()]),
            )
        lane = self.lanes.get(key)
        if lane is None or lane.model != model:
            return Level(seat=lane.record.seat if lane else None)
        oldest = min(lane.waiting.values(), key=lambda call: call.request, default=None)
        return Level(
            len(lane.waiting),
            len(lane.in_flight),
            lane.arrivals,
            now - oldest.arrived if oldest else None,
            lane.record.seat,
            lane.record.tier,
            oldest.cause if oldest else lane.last_cause,
            lane.served,
            lane.served_seconds,
            steps([now - call.arrived for call in lane.waiting.values()]),
        )

    def activation(self, key: str, epoch: int) -> SeatActivated | None:
        """The event that opened this seat at this epoch, if it was heard."""
        lane = self.lanes.get(key)
        event = lane.activation if lane else None
        return event if event is not None and event.epoch == epoch else None

    # --- calls ----------------------------------------------------------------------------------------------------

    def _arrived(self, m: h.Arrived) -> None:
        model = self.models.get(m.model)
        if model is None:
            if self.trust.ever_synced:
                self._unknown(m.request, m.model)
                return
            model = self.seats.model(m.model)
        longest = self.limits.hold_seconds
        patience = longest if m.hold_seconds is None else min(longest, m.hold_seconds)
        call = Call(m.request, m.model, m.cause, m.size, m.kind, self._now, self._now + patience)
        found = best(self._ranked(model), None)
        if found is not None and found[0] is Rank.OPEN:
            self._calls[m.request] = call
            self._count(call, found[1])
            self._forward(call, found[1], opened=False)
            return
        if len(model.held) >= self.limits.queue_limit:
            self._reject(call, 429, "queue_full", f"{len(model.held)} requests wait for model {m.model} already")
        elif self._held_bytes + m.size > self.limits.held_bytes:
            self._reject(call, 429, "queue_full", f"waiting requests take {self._held_bytes} bytes already")
        else:
            self._calls[m.request] = call
            if found is not None:
                self._count(call, found[1])
            self._hold(call, model, found)

    def _count(self, call: Call, lane: Lane) -> None:
        lane.arrivals += 1
        lane.last_cause = call.cause

    def _hold(self, call: Call, model: Model, found: tuple[Rank, Lane] | None) -> None:
        call.held = True
        model.held[call.request] = call
        self._held_bytes += call.size
        self._alarms.set(("deadline", call.request), call.deadline)
        self._place(call, model, found)

    def _place(self, call: Call, model: Model, found: tuple[Rank, Lane] | None) -> None:
        """Let a held call wait at the best seat there is, and ask for what that seat lacks."""
        lane = found[1] if found else None
        if found is not None and found[0] is Rank.REFUSED:
            assert lane is not None
            code = "activation_refused" if lane.refusal else "seat_quarantined"
            self._reject(call, 503, code, f"model {model.name} cannot be run: seat {lane.record.seat}: {_why(lane)}")
            return
        if call.lane is not lane or (lane is None and call.request not in model.orphans):
            self._unplace(call, model)
            call.lane = lane
            queue = model.orphans if lane is None else lane.waiting
            queue[call.request] = call
            self._touch(model.name, lane, edge=len(queue) == 1)
        if found is not None and found[0] is Rank.UNSURE:
            self._say(self._asks.ask(found[1]))
        elif found is not None and found[1].record.state in ASKABLE:
            self._say(self._asks.wake(found[1], self._now))

    def _unplace(self, call: Call, model: Model) -> None:
        lane = call.lane
        queue = model.orphans if lane is None else lane.waiting
        if queue.pop(call.request, None) is None:
            return
        if lane is not None and not queue:
            lane.wake_sent = None
        self._touch(model.name, lane, edge=not queue)

    def _unhold(self, call: Call) -> None:
        if not call.held:
            return
        model = self.models[call.model]
        self._unplace(call, model)
        call.held = False
        del model.held[call.request]
        self._held_bytes -= call.size
        self._alarms.clear(("deadline", call.request))
        self.seats.forget_empty(call.model)

    def _forward(self, call: Call, lane: Lane, *, opened: bool) -> None:
        self._unhold(call)
        record = lane.record
        assert record.endpoint is not None  # Rank.OPEN says so
        effect = h.Forward(
            call.request, lane.key, record.seat, record.endpoint, record.epoch, self._now - call.arrived, opened
        )
        if call.kind == "wake":
            del self._calls[call.request]
        else:
            call.lane, call.sent = lane, self._now
            lane.in_flight[call.request] = call
            self._touch(call.model, lane, edge=len(lane.in_flight) == 1)
            if call.kind == "permit":
                self._alarms.set(("permit", call.request), self._now + self.limits.permit_seconds)
        self._out.append(effect)

    def _ended(self, m: h.Ended) -> None:
        call = self._calls.pop(m.request, None)
        if call is not None:
            self._unhold(call)
            if call.kind == "call" and call.lane is not None and call.request in call.lane.in_flight:
                call.lane.served += 1
                call.lane.served_seconds += self._now - call.sent
            self._land(call)

    def _land(self, call: Call) -> None:
        """A forwarded call is not in flight any more."""
        lane = call.lane
        if lane is None or lane.in_flight.pop(call.request, None) is None:
            return
        self._touch(call.model, lane, edge=not lane.in_flight)
        if lane.record.state in CLOSING:
            self._say(self._asks.acknowledge(lane, self._now))

    def _refused(self, m: h.Refused) -> None:
        call = self._calls.get(m.request)
        if call is None or call.held or call.lane is None:
            return
        lane = call.lane
        self._land(call)
        call.lane = None
        if m.suspect and lane.record.state is SeatState.ACTIVE:
            lane.suspect_until = self._now + SUSPECT_SECONDS
            self._alarms.set(("suspect", lane.key), lane.suspect_until)
        if self._now >= call.deadline:
            self._time_out(call)
            return
        model = self.seats.model(call.model)
        found = best(self._ranked(model), None)
        if found is not None and found[0] is Rank.OPEN:
            self._forward(call, found[1], opened=False)
        else:
            self._hold(call, model, found)

    def _reject(self, call: Call, status: int, code: str, message: str) -> None:
        after = self.seats.retry_after(call.model, self.limits.speed)
        self._calls.pop(call.request, None)
        self._unhold(call)
        self._out.append(h.Reject(call.request, status, code, f"{message}; try again in {after} s", after))

    def _unknown(self, request: int, model: str) -> None:
        text = f"model {model!r} does not exist; known models: {self.seats.known()}"
        self._out.append(h.Reject(request, 404, "model_not_found", text))

    def _time_out(self, call: Call) -> None:
        at = f"seat {call.lane.record.seat} is {_why(call.lane)}" if call.lane else "it has no seat that could serve"
        waited = (self._now - call.arrived) * self.limits.speed
        text = f"model {call.model} could not be called within {waited:.0f} s (hold_seconds): {at}"
        self._reject(call, 503, "hold_timeout", text)

    # --- seats ----------------------------------------------------------------------------------------------------

    def _ranked(self, model: Model) -> Iterator[tuple[Rank, Lane]]:
        now, sure = self._now, self.trust.sure
        for lane in model.lanes.values():
            yield lane.rank(now, sure(lane.record.node, now)), lane

    def _settle(self, name: str, opened: Lane | None) -> None:
        """Look at every held call of a model again, oldest first."""
        model = self.models.get(name)
        if model is None:
            return
        ranked = list(self._ranked(model))
        for call in sorted(model.held.values(), key=lambda call: call.request):
            found = best(ranked, call.lane)
            if found is not None and found[0] is Rank.OPEN:
                self._forward(call, found[1], opened=found[1] is opened)
            else:
                self._place(call, model, found)
        self.seats.forget_empty(name)

    def _heard(self, event: h.Happening) -> None:
        assert isinstance(event, SeatEvent)
        self._learned(self.seats.hear(event))

    def _missing(self, m: h.SeatMissing) -> None:
        lane = self.lanes.get(m.key)
        if lane is not None and not lane.unseen:
            lane.unseen = True
            self._alarms.clear(("missing", m.key))
            self._alarms.set(("missing", m.key), self._now + MISSING_SECONDS)

    def _learned(self, change: Change | None) -> None:
        """Do what follows from a seat's new state, epoch, endpoint or model."""
        if change is None:
            return
        lane, state = change.lane, change.lane.record.state
        if change.left:
            self._touch(change.left, lane, edge=True)
            self._dirty.setdefault(change.left, None)
        if change.moved:
            self._out.append(h.Disconnect(lane.key))
        if state not in ASKABLE:
            lane.wake_sent = None
        self._freeze(lane)
        if state in CUT and lane.frozen_since is None:
            self._cut(lane)
        if state in CLOSING:
            self._say(self._asks.acknowledge(lane, self._now))
        if lane.model:
            self._dirty[lane.model] = lane if change.opened else self._dirty.get(lane.model)

    def _freeze(self, lane: Lane) -> None:
        """Requests in flight may stand still with their seat; they are kept until the stall budget is used up."""
        state, stall = lane.record.state, lane.record.stall_seconds
        if state in FREEZING and stall > 0 and lane.in_flight and lane.frozen_since is None:
            lane.frozen_since = self._now
            self._alarms.set(("frozen", lane.key), self._now + stall)
        elif lane.frozen_since is not None and state not in (*FREEZING, *COMING):
            stood = self._now - lane.frozen_since
            for call in lane.in_flight.values():
                call.sent += stood  # what it stood still was no service
            lane.frozen_since = None
            self._alarms.clear(("frozen", lane.key))

    def _cut(self, lane: Lane) -> None:
        lost = lane.record.state is SeatState.LOST
        for call in list(lane.in_flight.values()):
            if call.kind == "permit":
                self._ended(h.Ended(call.request))
            else:
                self._out.append(h.Cut(call.request, "upstream_failed" if lost else "seat_evicted"))

    # --- what the bus and the managers say ------------------------------------------------------------------------

    def _replied(self, m: h.Replied) -> None:
        lane = self.lanes.get(m.key)
        if lane is not None and m.reply is not None:
            self._asks.wake_answered(lane, m.reply, self._now)
            self._stir([lane])

    def _manager_said(self, m: h.ManagerSaid) -> None:
        self._asks.ask_answered(m.node, heard=m.records is not None, now=self._now)
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
                self._say(self._asks.acknowledge(lane, self._now))
        self._stir(self.lanes.values())
        if first:
            for model in [model for model in self.models.values() if not model.lanes]:
                for call in list(model.held.values()):
                    self._calls.pop(call.request)
                    self._unhold(call)
                    self._unknown(call.request, call.model)

    def _confirmed(self, m: h.Confirmed) -> None:
        if not self.trust.confirm(m.at):
            self._out.append(h.Resync())

    def _stir_node(self, node: str) -> None:
        self._stir(lane for lane in self.lanes.values() if lane.record.node == node)

    def _stir(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            if lane.model:
                self._dirty.setdefault(lane.model, None)

    # --- time -----------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        for name in self._alarms.due(self._now):
            self._rang(name)

    def _rang(self, name: Name) -> None:
        kind, of = name
        if isinstance(of, int):
            call = self._calls.get(of)
            if call is not None and kind == "deadline" and call.held:
                self._time_out(call)
            elif call is not None and kind == "permit":
                self._ended(h.Ended(of))
            return
        if kind == "ask":
            self._asks.ask_again(of)
            self._stir_node(of)
            return
        lane = self.lanes.get(of)
        if lane is None:
            return
        if kind == "ack" and lane.record.state in CLOSING:
            self._say(self._asks.acknowledge(lane, self._now))
        elif kind == "wake" and lane.waiting and lane.record.state in ASKABLE:
            self._say(self._asks.wake(lane, self._now))
            self._alarms.set(name, self._now + WAKE_UNHEARD_SECONDS)
        elif kind == "frozen" and lane.frozen_since is not None:
            self._cut(lane)  # the budget is used up
        elif kind == "refusal":
            lane.refusal = None
        elif kind == "missing" and lane.unseen:
            self._learned(self.seats.drop(lane))
        self._stir([lane])

    def _say(self, effect: h.Effect | None) -> None:
        if effect is not None:
            self._out.append(effect)

    def _touch(self, model: str, lane: Lane | None, *, edge: bool) -> None:
        self._out.append(h.LevelChanged(model, lane.key if lane else None, edge))


def _why(lane: Lane) -> str:
    state = lane.refusal or str(lane.record.state)
    return f"{state} ({lane.record.reason})" if lane.record.reason and not lane.refusal else state
