"""The life of a call from its arrival to its end: forwarded, held at a seat, or rejected. Pure."""

import math
from collections import Counter

from kybernate.seat import SeatState
from kybernate.sizes import count
from services.router.core.managers import PendingCommands
from services.router.core.step import CallArrived, CallEnded, CallReturned, Forward, LevelChanged, Reject, RouterStep
from services.router.core.trust import Trust
from services.router.core.upstreams import (
    ACTIVATABLE,
    CLOSING,
    Found,
    Model,
    Rank,
    RoutedCall,
    Upstream,
    UpstreamTable,
    best,
)
from services.router.settings import RouterSettings

SUSPECT_SECONDS = 0.25
"""How long a seat whose engine failed before the first byte gets no calls, unless the seat changes earlier."""
GONE_SECONDS = 10.0
"""So long a model is known that has lost its last seat, and calls wait for it: its pod may be made anew."""
FEW_WAITING = 16
"""So many calls may wait for a place before its engine has answered any, or as many as it has places; and up to so many
behind as many declared places, also if the wait is long."""
_SPREAD = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are spread evenly: callers that are rejected together come back apart."""


class Admission:
    """All calls of one router, held or in flight. Alarms: ``deadline``, ``permit``, ``suspect``."""

    def __init__(
        self, settings: RouterSettings, table: UpstreamTable, trust: Trust, commands: PendingCommands, step: RouterStep
    ) -> None:
        self._settings, self._table, self._trust, self._commands, self._step = settings, table, trust, commands, step
        self._calls: dict[int, RoutedCall] = {}

    def arrived(self, m: CallArrived) -> None:
        """Forward, hold or reject a new call."""
        model = self._table.models.get(m.model)
        if model is None:
            if self._step.now >= self._trust.settles:
                self._reject_unknown(m.request, m.model)
                return
            model = Model(m.model)
        longest, patience = self._settings.hold_seconds / self._settings.speed, m.hold_seconds
        hold = longest if patience is None else min(longest, patience)
        now = self._step.now
        gives_up, limit = (math.inf, "") if patience is None else (now + patience, f"{patience:g} s ({m.by})")
        call = RoutedCall(m.request, m.model, m.cause, m.kind, now, now + hold, gives_up, limit, m.priority, m.tenant)
        found = self._best(self._ranked(model), call)
        if m.kind == "wake":
            self._wake(call, model, found)
            return
        if found is None or found[0] is not Rank.OPEN:
            reason = self._full(call, model, found, patience)
            if reason is not None and (other := self._displaced(call, model)) is not None:
                who = "higher priority" if call.priority > other.priority else "a tenant with fewer requests"
                self._reject(other, 429, "queue_full", f"{reason}; a request of {who} took the place")
            elif reason is not None:
                self._reject(call, 429, "queue_full", reason)
                return
        self._calls[m.request] = call
        if found is not None:
            found[1].counts.arrivals += 1
            found[1].counts.last_cause = call.cause
        self._route(call, model, found)

    def _wake(self, call: RoutedCall, model: Model, found: Found) -> None:
        """All wakes of a model that wait are one; a later one only makes it last longer."""
        if found is not None and found[0] in (Rank.OPEN, Rank.FULL):
            record = found[1].record
            assert record.endpoint is not None  # the rank implies it
            self._step.effects.append(Forward(call.request, found[1].key, record.seat, record.endpoint, record.epoch))
        elif model.wake is not None:
            model.wake.deadline = max(model.wake.deadline, call.deadline)
            self._step.alarms.clear(("deadline", model.wake.request))
            self._step.alarms.set(("deadline", model.wake.request), model.wake.deadline)
        else:
            self._calls[call.request] = call
            self._route(call, model, found)

    def _route(self, call: RoutedCall, model: Model, found: Found, opened: Upstream | None = None) -> None:
        """Forward the call if the best seat is open, reject it if its manager refuses, else hold it there."""
        if found is not None and found[0] is Rank.OPEN:
            self._forward(call, found[1], opened=found[1] is opened)
        elif found is not None and found[0] is Rank.REFUSED:
            upstream = found[1]
            if upstream.record.failed_until:
                self._reject(call, 503, "engine_failed", upstream.record.failed, until=upstream.record.failed_until)
                return
            code = "activation_refused" if upstream.activation_request.refusal else "seat_quarantined"
            self._reject(call, 503, code, f"model {model.name} cannot be run now", _why(upstream))
        elif call.held:
            self._place(call, model, found)
        else:
            self._hold(call, model, found)

    def _forward(self, call: RoutedCall, upstream: Upstream, *, opened: bool) -> None:
        stays = call.held and call.upstream is upstream and call.kind != "wake"
        if call.held:
            self._table.models[call.model].served(call)
        self._release(call, stays=stays)
        record = upstream.record
        assert record.endpoint is not None  # Rank.OPEN implies it
        held_seconds = self._step.now - call.arrived
        event = upstream.activation if opened else None
        if event is not None and event.epoch != record.epoch:
            event = None
        effect = Forward(call.request, upstream.key, record.seat, record.endpoint, record.epoch, held_seconds, event)
        if call.kind == "wake":
            del self._calls[call.request]
        else:
            call.upstream, call.sent = upstream, self._step.now
            upstream.in_flight[call.request] = call
            call.found = len(upstream.in_flight)
            edge = len(upstream.in_flight) == 1 and not stays  # else the seat has as many requests as before
            self._step.effects.append(LevelChanged(call.model, upstream.key, edge))
            if call.kind == "permit":
                upstream.permits += 1
                self._step.set_alarm(("permit", call.request), self._settings.permit_seconds)
        self._step.effects.append(effect)

    def ended(self, m: CallEnded) -> None:
        """Remove a call that was answered, abandoned by its caller, or whose permit expired."""
        call = self._calls.pop(m.request, None)
        if call is None:
            return
        self._release(call)
        upstream = call.upstream
        if call.kind == "call" and upstream is not None and call.request in upstream.in_flight:
            seconds = self._step.now - call.sent
            upstream.counts.served += 1
            upstream.counts.served_seconds += seconds
            if m.answered is not None:
                taken = len(upstream.in_flight) >= upstream.limit - upstream.kept
                upstream.capacity.ended(call.found, seconds, self._step.now, answered=m.answered, taken=taken)
        self._land(call)
        if upstream is not None:
            self._fill(upstream)

    def _land(self, call: RoutedCall) -> None:
        """Remove a call from those in flight."""
        upstream = call.upstream
        if upstream is not None and upstream.in_flight.pop(call.request, None) is not None:
            upstream.permits -= call.kind == "permit"
            self._step.effects.append(LevelChanged(call.model, upstream.key, not upstream.in_flight))
            if upstream.record.state in CLOSING:
                self._commands.acknowledge_drain(upstream)

    def _fill(self, upstream: Upstream) -> None:
        """Forward calls that wait for the model while the seat has places."""
        model = self._table.models.get(upstream.model)
        while model is not None and model.held and (call := self._next(model, upstream)) is not None:
            self._forward(call, upstream, opened=False)

    def _next(self, model: Model, upstream: Upstream) -> RoutedCall | None:
        """Return the waiting call that a place of the seat is free for."""
        rank = self._rank(upstream)
        if rank is Rank.OPEN:
            return model.first()
        kept_from = upstream.kept_from if rank is Rank.FULL else None
        return None if kept_from is None else model.first_of_others(kept_from)

    def returned(self, m: CallReturned) -> None:
        """Route a call again whose forwarding failed before the first byte, unless its deadline has passed."""
        call = self._calls.get(m.request)
        if call is None or call.held or call.upstream is None:
            return
        upstream = call.upstream
        self._land(call)
        call.upstream = None
        if m.taken:  # that was no wait
            call.arrived += self._step.now - call.sent
            call.deadline = min(call.gives_up, call.deadline + self._step.now - call.sent)
        if m.suspect and upstream.record.state is SeatState.ACTIVE:
            upstream.suspect_until = self._step.now + SUSPECT_SECONDS
            self._step.alarms.set(("suspect", upstream.key), upstream.suspect_until)
        if self._step.now >= call.deadline:
            self._time_out(call)
            return
        model = self._table.model(call.model)
        self._route(call, model, self._best(self._ranked(model), call))

    def _full(self, call: RoutedCall, model: Model, found: Found, patience: float | None) -> str | None:
        """Return why a call cannot wait; None if it can. ``patience``: wall seconds that its caller waits, if known.

        (1) Too many calls of its model wait already. (2) Its best seat is active, and a place would be free too late.
        Where places are declared, as many calls may wait, at most FEW_WAITING, however long answers take.
        """
        waiting = len(model.held) - (model.wake is not None)
        if self._queue_full(model):
            return f"model {model.name} has {count(waiting, 'request')} waiting already (KYB_QUEUE_LIMIT)"  # (1)
        if found is None or found[0] is not Rank.FULL:
            return None
        upstream, now = found[1], self._step.now
        ahead = model.ahead(call.priority, call.tenant)
        busy = count(len(upstream.in_flight), "request")
        text = f"model {model.name} is overloaded: {busy} in flight, {waiting} waiting"
        if call.tenant and call.tenant not in upstream.tenants | model.tenants(call.priority):
            return None  # others' answers are long, which is no reason to refuse its first
        seconds = upstream.place_seconds(now, ahead + 1)
        served = upstream.place_seconds(now, ahead + 1 + upstream.limit)
        if seconds is None or served is None:  # nothing was answered yet
            return text if ahead >= max(upstream.limit, FEW_WAITING) else None
        soon = seconds <= self._settings.queue_seconds or ahead < min(upstream.record.max_requests, FEW_WAITING)
        if soon and (patience is None or served <= patience):
            return None
        if not soon:
            return f"{text}; a place is expected in {seconds:.1f} s"
        return f"{text}; an answer is expected in {served:.1f} s, the caller waits {patience:g} s"  # (2)

    def _displaced(self, call: RoutedCall, model: Model) -> RoutedCall | None:
        """Return the waiting call that must make place for this one.

        (1) The last one with the lowest priority, if that is lower. (2) In a full queue the last one of the tenant with
        the most calls of the same priority, if this call's tenant has at least two fewer.
        """
        lowest = min(model.waiting, default=call.priority)
        if lowest < call.priority:
            return model.last(lowest)  # (1)
        tenants = model.waiting.get(call.priority, Counter[str]())
        most = max(tenants, key=lambda tenant: tenants[tenant], default=call.tenant)
        if lowest > call.priority or not self._queue_full(model) or tenants[most] < tenants[call.tenant] + 2:
            return None
        return model.last(lowest, most)  # (2)

    def _queue_full(self, model: Model) -> bool:
        return len(model.held) - (model.wake is not None) >= self._settings.queue_limit

    def _hold(self, call: RoutedCall, model: Model, found: Found) -> None:
        """Hold a call at the best seat until its deadline."""
        call.held = True
        self._table.models[model.name] = model
        model.add(call)
        self._place(call, model, found)
        self._step.alarms.set(("deadline", call.request), call.deadline)

    def _place(self, call: RoutedCall, model: Model, found: Found) -> None:
        """Move a held call to the best seat, and query that seat's manager or request the activation."""
        upstream = found[1] if found else None
        if call.upstream is not upstream or (upstream is None and call.request not in model.orphans):
            self._leave(call, model)
            call.upstream = upstream
            queue = model.orphans if upstream is None else upstream.waiting
            queue[call.request] = call
            self._step.effects.append(LevelChanged(model.name, upstream.key if upstream else None, len(queue) == 1))
        if found is not None and found[0] is Rank.UNCONFIRMED:
            self._commands.query_manager(found[1])
        elif found is not None and found[1].record.state in ACTIVATABLE:
            self._commands.request_activation(found[1])

    def _release(self, call: RoutedCall, *, stays: bool = False) -> None:
        """Remove a call from the queue if it is held; ``stays``: it is forwarded to the seat that it waits for."""
        if not call.held:
            return
        model = self._table.models[call.model]
        self._leave(call, model, stays=stays)
        call.held = False
        model.remove(call)
        self._table.forget_empty(model)
        self._step.alarms.clear(("deadline", call.request))

    def _leave(self, call: RoutedCall, model: Model, *, stays: bool = False) -> None:
        upstream = call.upstream
        queue = model.orphans if upstream is None else upstream.waiting
        if queue.pop(call.request, None) is None:
            return
        if upstream is not None and not queue:
            upstream.activation_request.sent_at = None
        self._step.effects.append(LevelChanged(model.name, upstream.key if upstream else None, not queue and not stays))

    def _reject(
        self, call: RoutedCall, status: int, code: str, message: str, detail: str = "", *, until: float = 0.0
    ) -> None:
        seconds = self._table.retry_after(call.model, self._step.now, self._settings.speed)
        after = math.ceil(seconds * (1 + call.request * _SPREAD % 1))
        self._calls.pop(call.request, None)
        self._release(call)
        self._step.effects.append(Reject(call.request, status, code, message, after, detail, until))

    def _reject_unknown(self, request: int, model: str) -> None:
        table = self._table
        if why := self._trust.incomplete(table.rows, table.seqs, self._step.now):
            text = f"model {model!r} is not known, but may exist: {why}"
            self._step.effects.append(Reject(request, 503, "roster_incomplete", text, 1))
        else:
            self._step.effects.append(Reject(request, 404, "model_not_found", f"model {model!r} does not exist"))

    def _time_out(self, call: RoutedCall) -> None:
        upstream = call.upstream
        at = f"it is {upstream.record.state}" if upstream else "it has no seat that could serve"
        own = f"{self._settings.hold_seconds:g} s (KYB_HOLD_SECONDS)"
        limit = call.patience if self._step.now >= call.gives_up else own
        text = f"model {call.model} could not be called within {limit}: {at}"
        if upstream is not None and self._rank(upstream) is Rank.FULL:
            text = f"{text}, and its engine answers {count(len(upstream.in_flight), 'other request')}"
            self._reject(call, 429, "queue_full", text)
        else:
            self._reject(call, 503, "hold_timeout", text, _why(upstream) if upstream else "")

    @staticmethod
    def _best(ranked: list[tuple[Rank, Upstream]], call: RoutedCall) -> Found:
        """The best seat for this call: of full ones, one that is open to it by the kept place."""
        found = best(ranked, call.upstream)
        if found is None or found[0] is not Rank.FULL:
            return found
        kept = [(seat, seat.kept_from) for rank, seat in ranked if rank is Rank.FULL]
        return best([(Rank.OPEN, seat) for seat, of in kept if of is not None and call.tenant not in of], None) or found

    def _ranked(self, model: Model) -> list[tuple[Rank, Upstream]]:
        return [(self._rank(upstream), upstream) for upstream in model.upstreams.values()]

    def _rank(self, upstream: Upstream) -> Rank:
        now = self._step.now
        return upstream.rank(now, self._trust.sure(upstream.record.node, now))

    def settle(self, name: str, opened: Upstream | None) -> None:
        """Route every held call of a model again, oldest first; ``opened``: the seat that has just become active."""
        model = self._table.models.get(name)
        if model is None:
            return
        ranked = self._ranked(model)
        for call in sorted(model.held.values(), key=lambda call: call.order):
            found = self._best(ranked, call)
            self._route(call, model, found, opened)
            if found is not None and found[0] is Rank.OPEN and self._rank(found[1]) is not Rank.OPEN:
                ranked = self._ranked(model)

    def reject_unknown(self, name: str) -> None:
        """Reject the calls that wait for a model without a seat, if all seats are known."""
        model = self._table.models.get(name)
        if model is None or model.upstreams or self._step.now < self._trust.settles:
            return
        model.expected = False
        for call in list(model.held.values()):
            self._calls.pop(call.request)
            self._release(call)
            self._reject_unknown(call.request, call.model)
        self._table.forget_empty(model)

    def alarm(self, kind: str, request: int) -> None:
        """Handle an alarm of one call."""
        call = self._calls.get(request)
        if call is not None and kind == "deadline" and call.held:
            self._time_out(call)
        elif call is not None and kind == "permit":
            self.ended(CallEnded(request))


def _why(upstream: Upstream) -> str:
    record = upstream.record
    why = upstream.activation_request.refusal or f"{record.state}{f' ({record.reason})' if record.reason else ''}"
    return f"its seat on {record.node}/{record.group or record.home_group}: {why}"
