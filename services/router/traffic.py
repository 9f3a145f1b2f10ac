"""The router's decisions: which seat serves a call, who waits, who is sent when. Pure and synchronous.

``Traffic.handle(happening, now)`` is the only way in, its list of effects the only way out. A held call ends in
exactly one of: forwarded, timed out (503), rejected (429, 503 with the manager's reason), caller gone. A forwarded
call that comes back before the first byte of its answer waits again, until its deadline.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kybernate.messages import ActivateSeat, DrainAck, SeatActivated, SeatAllocated, SeatEvent
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import SeatState
from services.router import happenings as h
from services.router.alarms import Alarms, Name
from services.router.lanes import CLOSING, CUT, Call, Lane, Rank, best, lane_of
from services.router.trust import Trust

SUSPECT_SECONDS = 0.25
"""How long a seat whose engine refused a connection gets nothing, unless it says something new."""
ACK_SECONDS = 1.0
ASK_SECONDS = 1.0
WAKE_UNHEARD_SECONDS = 1.0
"""ActivateSeat is sent again so long after one that nobody answered."""
WAKE_AGAIN_SECONDS = 5.0
"""And so long after one that was answered, while calls still wait."""
PASSING_REFUSALS = frozenset({"", "not-ready", "too-late", "stale-epoch", "busy", "unknown-seat", "deleted"})
"""Codes of a refused ActivateSeat that pass by themselves; any other is final for those who wait."""
REFUSAL_SECONDS = 5.0
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


@dataclass(frozen=True, slots=True)
class Identity:
    """Who acknowledges drains."""

    instance: str
    incarnation: str


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


@dataclass(slots=True, eq=False)
class Model:
    """The seats of one model, and the calls that wait for it."""

    name: str
    lanes: dict[str, Lane] = field(default_factory=dict)
    held: dict[int, Call] = field(default_factory=dict)
    orphans: dict[int, Call] = field(default_factory=dict)
    """Those of ``held`` for which no seat can be used at present."""


class Traffic:
    """All seats and calls of one router."""

    def __init__(self, limits: Limits, identity: Identity) -> None:
        self.limits = limits
        self.identity = identity
        self.trust = Trust()
        self.lanes: dict[str, Lane] = {}
        self.models: dict[str, Model] = {}
        self._calls: dict[int, Call] = {}
        self._held_bytes = 0
        self._alarms = Alarms()
        self._asking: set[str] = set()
        self._dirty: dict[str, Lane | None] = {}
        self._out: list[h.Effect] = []
        self._now = 0.0
        self._takers: dict[type, Callable[[Any], None]] = {
            h.Arrived: self._arrived,
            h.Ended: self._ended,
            h.Refused: self._refused,
            SeatRecord: self._saw,
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

    def next_at(self) -> float | None:
        """When a Tick is wanted at the latest."""
        return self._alarms.next()

    def level(self, model: str, key: str | None, now: float) -> Level:
        """The present level of (model, seat); key None: calls that no seat can serve at present."""
        if key is None:
            orphans = self.models[model].orphans if model in self.models else {}
            first = next(iter(orphans.values()), None)
            return Level(
                len(orphans), oldest_wait=now - first.arrived if first else None, cause=first.cause if first else model
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
            model = self.models[m.model] = Model(m.model)
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
            self._ask(found[1])
        elif found is not None and found[0] is Rank.PARKED:
            self._wake(found[1])

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
        if not model.held and not model.lanes:
            del self.models[call.model]

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
            call.lane = lane
            lane.in_flight[call.request] = call
            self._touch(call.model, lane, edge=len(lane.in_flight) == 1)
            if call.kind == "permit":
                self._alarms.set(("permit", call.request), self._now + self.limits.permit_seconds)
        self._out.append(effect)

    def _ended(self, m: h.Ended) -> None:
        call = self._calls.pop(m.request, None)
        if call is not None:
            self._unhold(call)
            self._land(call)

    def _land(self, call: Call) -> None:
        """A forwarded call is not in flight any more."""
        lane = call.lane
        if lane is None or lane.in_flight.pop(call.request, None) is None:
            return
        self._touch(call.model, lane, edge=not lane.in_flight)
        if lane.record.state in CLOSING:
            self._acknowledge(lane)

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
        model = self.models.setdefault(call.model, Model(call.model))
        found = best(self._ranked(model), None)
        if found is not None and found[0] is Rank.OPEN:
            self._forward(call, found[1], opened=False)
        else:
            self._hold(call, model, found)

    def _reject(self, call: Call, status: int, code: str, message: str) -> None:
        after = self.retry_after(call.model)
        self._calls.pop(call.request, None)
        self._unhold(call)
        self._out.append(h.Reject(call.request, status, code, f"{message}; try again in {after} s", after))

    def _unknown(self, request: int, model: str) -> None:
        known = ", ".join(sorted(self.models)) or "none yet"
        text = f"model {model!r} does not exist; known models: {known}"
        self._out.append(h.Reject(request, 404, "model_not_found", text))

    def _time_out(self, call: Call) -> None:
        at = f"seat {call.lane.record.seat} is {_why(call.lane)}" if call.lane else "it has no seat that could serve"
        waited = (self._now - call.arrived) * self.limits.speed
        text = f"model {call.model} could not be called within {waited:.0f} s (hold_seconds): {at}"
        self._reject(call, 503, "hold_timeout", text)

    def retry_after(self, model: str) -> int:
        """Wall seconds, at least 1: the learned time of a switch to this model."""
        lanes = self.models[model].lanes.values() if model in self.models else ()
        learned = [lane.record.activate_seconds for lane in lanes if lane.record.activate_seconds > 0]
        return max(1, math.ceil(min(learned) / self.limits.speed)) if learned else 1

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
        if not model.lanes and not model.held:
            self.models.pop(name, None)

    def _heard(self, event: h.Happening) -> None:
        if not isinstance(event, SeatEvent) or isinstance(event, SeatAllocated):
            return  # what the plugin says is a hint for the manager, which alone knows the seat's state
        lane = self.lanes.get(seat_key(event.node, event.seat))
        if lane is None:
            if (lane := lane_of(event)) is not None:
                self._learned(lane, None)
            return
        before = lane.record
        if lane.hear(event):
            self._learned(lane, before)

    def _saw(self, record: SeatRecord, *, overrule: bool = False) -> None:
        lane = self.lanes.get(record.key)
        if lane is None:
            self._learned(Lane(record, record.since, f"roster:{record.key}:{record.epoch}"), None)
            return
        before, unseen = lane.record, lane.unseen
        if lane.see(record, overrule=overrule):
            self._learned(lane, before)
        elif unseen and not lane.unseen:
            self._stir([lane])

    def _missing(self, m: h.SeatMissing) -> None:
        lane = self.lanes.get(m.key)
        if lane is not None and not lane.unseen:
            lane.unseen = True
            self._alarms.clear(("missing", m.key))
            self._alarms.set(("missing", m.key), self._now + MISSING_SECONDS)

    def _drop(self, lane: Lane) -> None:
        del self.lanes[lane.key]
        lane.record = lane.record.model_copy(update={"state": SeatState.FREE})
        self._index(lane)
        self._out.append(h.Disconnect(lane.key))

    def _learned(self, lane: Lane, before: SeatRecord | None) -> None:
        """A seat's state, epoch, endpoint or model is new."""
        record, key = lane.record, lane.key
        self.lanes.setdefault(key, lane)
        self._index(lane)
        was_active = before is not None and before.state is SeatState.ACTIVE
        opened = record.state is SeatState.ACTIVE and not was_active
        if before is not None and (before.endpoint != record.endpoint or record.state is not SeatState.ACTIVE):
            self._out.append(h.Disconnect(key))
        if record.state is not SeatState.PARKED:
            lane.wake_sent = None
        if record.state in CUT:
            self._cut(lane)
        if record.state in CLOSING:
            self._acknowledge(lane)
        if lane.model:
            self._dirty[lane.model] = lane if opened else self._dirty.get(lane.model)

    def _index(self, lane: Lane) -> None:
        """Keep ``models`` in step with what the seat runs."""
        name = "" if lane.record.state is SeatState.FREE else lane.record.model
        if name == lane.model:
            return
        if lane.model and (old := self.models.get(lane.model)) is not None:
            old.lanes.pop(lane.key, None)
            self._touch(lane.model, lane, edge=True)
            self._dirty.setdefault(lane.model, None)
        lane.serve(name)
        if name:
            self.models.setdefault(name, Model(name)).lanes[lane.key] = lane

    def _cut(self, lane: Lane) -> None:
        lost = lane.record.state is SeatState.LOST
        for call in list(lane.in_flight.values()):
            if call.kind == "permit":
                self._ended(h.Ended(call.request))
            else:
                self._out.append(h.Cut(call.request, "upstream_failed" if lost else "seat_evicted"))

    def _acknowledge(self, lane: Lane) -> None:
        record = lane.record
        self._out.append(
            DrainAck(
                cause=lane.cause,
                node=record.node,
                seat=record.seat,
                instance=self.identity.instance,
                incarnation=self.identity.incarnation,
                epoch=record.epoch,
                in_flight=len(lane.in_flight),
            )
        )
        self._alarms.set(("ack", lane.key), self._now + ACK_SECONDS)

    # --- asking ---------------------------------------------------------------------------------------------------

    def _wake(self, lane: Lane) -> None:
        """Once per seat while calls wait there; again when nobody answered, or nothing came of it."""
        if lane.wake_sent is not None:
            patience = WAKE_AGAIN_SECONDS if lane.wake_heard else WAKE_UNHEARD_SECONDS
            if self._now < lane.wake_sent + patience:
                return
        first = min(lane.waiting.values(), key=lambda call: call.request)
        lane.wake_sent, lane.wake_heard = self._now, False
        command = ActivateSeat(cause=first.cause, node=lane.record.node, seat=lane.record.seat)
        self._out.append(h.Wake(first.request, lane.key, command))
        self._alarms.set(("wake", lane.key), self._now + WAKE_UNHEARD_SECONDS)

    def _replied(self, m: h.Replied) -> None:
        lane = self.lanes.get(m.key)
        if lane is None or m.reply is None:
            return
        lane.wake_heard = True
        if not m.reply.accepted and m.reply.code not in PASSING_REFUSALS and lane.record.state is SeatState.PARKED:
            lane.refusal = m.reply.reason or m.reply.code
            self._alarms.set(("refusal", m.key), self._now + (m.reply.retry_after_seconds or REFUSAL_SECONDS))
            self._dirty.setdefault(lane.model, None)

    def _ask(self, lane: Lane) -> None:
        node, url = lane.record.node, lane.record.manager_url
        if url and node not in self._asking:
            self._asking.add(node)
            self._out.append(h.AskManager(node, url))

    def _manager_said(self, m: h.ManagerSaid) -> None:
        self._asking.discard(m.node)
        if m.records is None:
            self._asking.add(m.node)
            self._alarms.set(("ask", m.node), self._now + ASK_SECONDS)
            return
        for record in m.records:
            self._saw(record)
        self.trust.verify(m.node, m.at)
        self._stir(lane for lane in self.lanes.values() if lane.record.node == m.node)

    def _synced(self, m: h.Synced) -> None:
        first = not self.trust.ever_synced
        for record in m.records:
            self._saw(record, overrule=True)
        self.trust.sync(m.at)
        for lane in self.lanes.values():
            if lane.key not in m.present:
                self._missing(h.SeatMissing(lane.key))
            lane.wake_sent = None
            if lane.record.state in CLOSING:
                self._acknowledge(lane)
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
            self._asking.discard(of)
            self._stir(lane for lane in self.lanes.values() if lane.record.node == of)
            return
        lane = self.lanes.get(of)
        if lane is None:
            return
        if kind == "ack" and lane.record.state in CLOSING:
            self._acknowledge(lane)
        elif kind == "wake" and lane.waiting and lane.record.state is SeatState.PARKED:
            self._wake(lane)
            self._alarms.set(name, self._now + WAKE_UNHEARD_SECONDS)
        elif kind == "refusal":
            lane.refusal = None
        elif kind == "missing" and lane.unseen:
            self._drop(lane)
        self._stir([lane])

    def _touch(self, model: str, lane: Lane | None, *, edge: bool) -> None:
        self._out.append(h.LevelChanged(model, lane.key if lane else None, edge))


def _why(lane: Lane) -> str:
    state = lane.refusal or str(lane.record.state)
    return f"{state} ({lane.record.reason})" if lane.record.reason and not lane.refusal else state
