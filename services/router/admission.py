"""Which call is sent, which one waits, which one is refused: the life of a call from its arrival to its end. Pure."""

from collections.abc import Iterator

from kybernate.seat import SeatState
from services.router import happenings as h
from services.router.alarms import Alarms
from services.router.asks import Asks
from services.router.hold import Found, HoldQueue, Limits
from services.router.lanes import CLOSING, Call, Lane, Rank, best
from services.router.seats import Model, SeatTable
from services.router.trust import Trust
from services.router.turn import Turn

SUSPECT_SECONDS = 0.25
"""How long a seat whose engine refused a connection gets nothing, unless it says something new."""


class Admission:
    """All calls of one router, waiting or in flight. Its alarms are ``permit`` and ``suspect``, and its queue's."""

    def __init__(self, limits: Limits, seats: SeatTable, trust: Trust, asks: Asks, alarms: Alarms, turn: Turn) -> None:
        self._limits, self._seats, self._trust, self._asks, self._alarms = limits, seats, trust, asks, alarms
        self._turn = turn
        self._calls: dict[int, Call] = {}
        self._queue = HoldQueue(limits, seats, asks, alarms, turn)

    def arrived(self, m: h.Arrived) -> None:
        """Somebody wants a model: send, hold or refuse the call."""
        model = self._seats.models.get(m.model)
        if model is None:
            if self._trust.ever_synced:
                self._unknown(m.request, m.model)
                return
            model = self._seats.model(m.model)
        longest = self._limits.hold_seconds
        patience = longest if m.hold_seconds is None else min(longest, m.hold_seconds)
        call = Call(m.request, m.model, m.cause, m.size, m.kind, self._turn.now, self._turn.now + patience)
        found = best(self._ranked(model), None)
        if found is not None and found[0] is Rank.OPEN:
            self._calls[m.request] = call
            self._count(call, found[1])
            self._forward(call, found[1], opened=False)
            return
        if (reason := self._queue.full(model, m.size)) is not None:
            self._reject(call, 429, "queue_full", reason)
            return
        self._calls[m.request] = call
        if found is not None:
            self._count(call, found[1])
        self._wait(call, model, found)

    def _count(self, call: Call, lane: Lane) -> None:
        lane.arrivals += 1
        lane.last_cause = call.cause

    def _wait(self, call: Call, model: Model, found: Found) -> None:
        """Nobody can serve it now: it waits, or goes on waiting, unless its manager says that it waits in vain."""
        if found is not None and found[0] is Rank.REFUSED:
            lane = found[1]
            code = "activation_refused" if lane.refusal else "seat_quarantined"
            self._reject(call, 503, code, f"model {model.name} cannot be run: seat {lane.record.seat}: {_why(lane)}")
        elif call.held:
            self._queue.place(call, model, found)
        else:
            self._queue.hold(call, model, found)

    def _forward(self, call: Call, lane: Lane, *, opened: bool) -> None:
        self._queue.release(call)
        record = lane.record
        assert record.endpoint is not None  # Rank.OPEN says so
        effect = h.Forward(
            call.request, lane.key, record.seat, record.endpoint, record.epoch, self._turn.now - call.arrived, opened
        )
        if call.kind == "wake":
            del self._calls[call.request]
        else:
            call.lane, call.sent = lane, self._turn.now
            lane.in_flight[call.request] = call
            self._turn.touch(call.model, lane, edge=len(lane.in_flight) == 1)
            if call.kind == "permit":
                self._alarms.set(("permit", call.request), self._turn.now + self._limits.permit_seconds)
        self._turn.effects.append(effect)

    def ended(self, m: h.Ended) -> None:
        """Nothing is owed to this call any more."""
        call = self._calls.pop(m.request, None)
        if call is not None:
            self._queue.release(call)
            if call.kind == "call" and call.lane is not None and call.request in call.lane.in_flight:
                call.lane.served += 1
                call.lane.served_seconds += self._turn.now - call.sent
            self._land(call)

    def _land(self, call: Call) -> None:
        """A forwarded call is not in flight any more."""
        lane = call.lane
        if lane is None or lane.in_flight.pop(call.request, None) is None:
            return
        self._turn.touch(call.model, lane, edge=not lane.in_flight)
        if lane.record.state in CLOSING:
            self._turn.say(self._asks.acknowledge(lane, self._turn.now))

    def came_back(self, m: h.Refused) -> None:
        """A call that was sent got no answer: send it elsewhere, or let it wait again until its deadline."""
        call = self._calls.get(m.request)
        if call is None or call.held or call.lane is None:
            return
        lane = call.lane
        self._land(call)
        call.lane = None
        if m.suspect and lane.record.state is SeatState.ACTIVE:
            lane.suspect_until = self._turn.now + SUSPECT_SECONDS
            self._alarms.set(("suspect", lane.key), lane.suspect_until)
        if self._turn.now >= call.deadline:
            self._time_out(call)
            return
        model = self._seats.model(call.model)
        found = best(self._ranked(model), None)
        if found is not None and found[0] is Rank.OPEN:
            self._forward(call, found[1], opened=False)
        else:
            self._wait(call, model, found)

    def _reject(self, call: Call, status: int, code: str, message: str) -> None:
        after = self._seats.retry_after(call.model, self._limits.speed)
        self._calls.pop(call.request, None)
        self._queue.release(call)
        self._seats.forget_empty(call.model)
        self._turn.effects.append(h.Reject(call.request, status, code, f"{message}; try again in {after} s", after))

    def _unknown(self, request: int, model: str) -> None:
        text = f"model {model!r} does not exist; known models: {self._seats.known()}"
        self._turn.effects.append(h.Reject(request, 404, "model_not_found", text))

    def _time_out(self, call: Call) -> None:
        at = f"seat {call.lane.record.seat} is {_why(call.lane)}" if call.lane else "it has no seat that could serve"
        waited = (self._turn.now - call.arrived) * self._limits.speed
        text = f"model {call.model} could not be called within {waited:.0f} s (hold_seconds): {at}"
        self._reject(call, 503, "hold_timeout", text)

    def _ranked(self, model: Model) -> Iterator[tuple[Rank, Lane]]:
        now, sure = self._turn.now, self._trust.sure
        for lane in model.lanes.values():
            yield lane.rank(now, sure(lane.record.node, now)), lane

    def settle(self, name: str, opened: Lane | None) -> None:
        """Look at every held call of a model again, oldest first."""
        model = self._seats.models.get(name)
        if model is None:
            return
        ranked = list(self._ranked(model))
        for call in sorted(model.held.values(), key=lambda call: call.request):
            found = best(ranked, call.lane)
            if found is not None and found[0] is Rank.OPEN:
                self._forward(call, found[1], opened=found[1] is opened)
            else:
                self._wait(call, model, found)
        self._seats.forget_empty(name)

    def reject_unknown(self) -> None:
        """The seats are known now: nobody need wait any longer for a model that none of them has."""
        for model in [model for model in self._seats.models.values() if not model.lanes]:
            for call in list(model.held.values()):
                self._calls.pop(call.request)
                self._queue.release(call)
                self._unknown(call.request, call.model)

    def rang(self, kind: str, request: int) -> None:
        """An alarm of this call rang."""
        call = self._calls.get(request)
        if call is not None and kind == "deadline" and call.held:
            self._time_out(call)
        elif call is not None and kind == "permit":
            self.ended(h.Ended(request))


def _why(lane: Lane) -> str:
    state = lane.refusal or str(lane.record.state)
    return f"{state} ({lane.record.reason})" if lane.record.reason and not lane.refusal else state
