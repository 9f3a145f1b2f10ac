"""The life of a call from its arrival to its end: forwarded, held at a seat, or rejected. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from kybernate.seat import SeatState
from services.router.core.managers import PendingCommands, Trust
from services.router.core.step import CallArrived, CallEnded, CallReturned, Forward, Reject, RouterStep
from services.router.core.upstreams import ACTIVATABLE, Found, Model, Rank, RoutedCall, Upstream, UpstreamTable, best

SUSPECT_SECONDS = 0.25
"""How long a seat whose engine failed before the first byte gets no calls, unless the seat changes earlier."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router. Durations in wall seconds; ``speed`` turns learned model seconds into Retry-After."""

    hold_seconds: float = 300.0
    queue_limit: int = 2000
    held_bytes: int = 256 * 2**20
    permit_seconds: float = 2.0
    speed: float = 1.0


class HoldQueue:
    """Held calls, by model and by the seat that they wait for. Alarm: ``deadline``."""

    def __init__(self, limits: Limits, table: UpstreamTable, commands: PendingCommands, step: RouterStep) -> None:
        self._limits, self._table, self._commands, self._step = limits, table, commands, step
        self.bytes = 0
        """Bodies of all held calls."""

    def full(self, model: Model, size: int) -> str | None:
        """Return why a call of ``size`` bytes cannot be held; None if it can."""
        if len(model.held) >= self._limits.queue_limit:
            return f"{len(model.held)} requests wait for model {model.name} already"
        if self.bytes + size > self._limits.held_bytes:
            return f"waiting requests take {self.bytes} bytes already"
        return None

    def hold(self, call: RoutedCall, model: Model, found: Found) -> None:
        """Hold a call at the best seat until its deadline."""
        call.held = True
        model.held[call.request] = call
        self.bytes += call.size
        self._step.alarms.set(("deadline", call.request), call.deadline)
        self.place(call, model, found)

    def place(self, call: RoutedCall, model: Model, found: Found) -> None:
        """Move a held call to the best seat, and query that seat's manager or request the activation."""
        upstream = found[1] if found else None
        if call.upstream is not upstream or (upstream is None and call.request not in model.orphans):
            self._leave(call, model)
            call.upstream = upstream
            queue = model.orphans if upstream is None else upstream.waiting
            queue[call.request] = call
            self._step.level_changed(model.name, upstream.key if upstream else None, edge=len(queue) == 1)
        if found is not None and found[0] is Rank.UNCONFIRMED:
            self._commands.query_manager(found[1])
        elif found is not None and found[1].record.state in ACTIVATABLE:
            self._commands.request_activation(found[1])

    def release(self, call: RoutedCall) -> None:
        """Remove a call from the queue if it is held."""
        if not call.held:
            return
        model = self._table.models[call.model]
        self._leave(call, model)
        call.held = False
        del model.held[call.request]
        self.bytes -= call.size
        self._step.alarms.clear(("deadline", call.request))
        self._table.forget_empty(call.model)

    def _leave(self, call: RoutedCall, model: Model) -> None:
        upstream = call.upstream
        queue = model.orphans if upstream is None else upstream.waiting
        if queue.pop(call.request, None) is None:
            return
        if upstream is not None and not queue:
            upstream.activation_request.sent_at = None
        self._step.level_changed(model.name, upstream.key if upstream else None, edge=not queue)


class Admission:
    """All calls of one router, held or in flight. Alarms: ``permit``, ``suspect``, and those of its queue."""

    def __init__(
        self, limits: Limits, table: UpstreamTable, trust: Trust, commands: PendingCommands, step: RouterStep
    ) -> None:
        self._limits, self._table, self._trust, self._commands, self._step = limits, table, trust, commands, step
        self._calls: dict[int, RoutedCall] = {}
        self._queue = HoldQueue(limits, table, commands, step)

    def arrived(self, m: CallArrived) -> None:
        """Forward, hold or reject a new call."""
        model = self._table.models.get(m.model)
        if model is None:
            if self._trust.ever_synced:
                self._reject_unknown(m.request, m.model)
                return
            model = self._table.model(m.model)
        longest = self._limits.hold_seconds
        hold = longest if m.hold_seconds is None else min(longest, m.hold_seconds)
        call = RoutedCall(m.request, m.model, m.cause, m.size, m.kind, self._step.now, self._step.now + hold)
        found = best(self._ranked(model), None)
        is_open = found is not None and found[0] is Rank.OPEN
        if not is_open and (reason := self._queue.full(model, m.size)) is not None:
            self._reject(call, 429, "queue_full", reason)
            return
        self._calls[m.request] = call
        if found is not None:
            found[1].counts.arrivals += 1
            found[1].counts.last_cause = call.cause
        self._route(call, model, found)

    def _route(self, call: RoutedCall, model: Model, found: Found, opened: Upstream | None = None) -> None:
        """Forward the call if the best seat is open, reject it if its manager refuses, else hold it there."""
        if found is not None and found[0] is Rank.OPEN:
            self._forward(call, found[1], opened=found[1] is opened)
        elif found is not None and found[0] is Rank.REFUSED:
            upstream = found[1]
            code = "activation_refused" if upstream.activation_request.refusal else "seat_quarantined"
            text = f"model {model.name} cannot be run: seat {upstream.record.seat}: {_why(upstream)}"
            self._reject(call, 503, code, text)
        elif call.held:
            self._queue.place(call, model, found)
        else:
            self._queue.hold(call, model, found)

    def _forward(self, call: RoutedCall, upstream: Upstream, *, opened: bool) -> None:
        self._queue.release(call)
        record = upstream.record
        assert record.endpoint is not None  # Rank.OPEN implies it
        held_seconds = self._step.now - call.arrived
        effect = Forward(call.request, upstream.key, record.seat, record.endpoint, record.epoch, held_seconds, opened)
        if call.kind == "wake":
            del self._calls[call.request]
        else:
            call.upstream, call.sent = upstream, self._step.now
            upstream.in_flight[call.request] = call
            self._step.level_changed(call.model, upstream.key, edge=len(upstream.in_flight) == 1)
            if call.kind == "permit":
                self._step.set_alarm(("permit", call.request), self._limits.permit_seconds)
        self._step.emit(effect)

    def ended(self, m: CallEnded) -> None:
        """Remove a call that was answered, abandoned by its caller, or whose permit expired."""
        call = self._calls.pop(m.request, None)
        if call is not None:
            self._queue.release(call)
            if call.kind == "call" and call.upstream is not None and call.request in call.upstream.in_flight:
                call.upstream.counts.served += 1
                call.upstream.counts.served_seconds += self._step.now - call.sent
            self._land(call)

    def _land(self, call: RoutedCall) -> None:
        """Remove a call from those in flight."""
        upstream = call.upstream
        if upstream is not None and upstream.in_flight.pop(call.request, None) is not None:
            self._step.level_changed(call.model, upstream.key, edge=not upstream.in_flight)
            self._commands.acknowledge_drain(upstream)

    def returned(self, m: CallReturned) -> None:
        """Route a call again whose forwarding failed before the first byte, unless its deadline has passed."""
        call = self._calls.get(m.request)
        if call is None or call.held or call.upstream is None:
            return
        upstream = call.upstream
        self._land(call)
        call.upstream = None
        if m.suspect and upstream.record.state is SeatState.ACTIVE:
            upstream.suspect_until = self._step.now + SUSPECT_SECONDS
            self._step.alarms.set(("suspect", upstream.key), upstream.suspect_until)
        if self._step.now >= call.deadline:
            self._time_out(call)
            return
        model = self._table.model(call.model)
        self._route(call, model, best(self._ranked(model), None))

    def _reject(self, call: RoutedCall, status: int, code: str, message: str) -> None:
        after = self._table.retry_after(call.model, self._limits.speed)
        self._calls.pop(call.request, None)
        self._queue.release(call)
        self._table.forget_empty(call.model)
        self._step.emit(Reject(call.request, status, code, f"{message}; try again in {after} s", after))

    def _reject_unknown(self, request: int, model: str) -> None:
        text = f"model {model!r} does not exist; known models: {self._table.known_models()}"
        self._step.emit(Reject(request, 404, "model_not_found", text))

    def _time_out(self, call: RoutedCall) -> None:
        upstream = call.upstream
        at = f"seat {upstream.record.seat} is {_why(upstream)}" if upstream else "it has no seat that could serve"
        waited = (self._step.now - call.arrived) * self._limits.speed
        text = f"model {call.model} could not be called within {waited:.0f} s (hold_seconds): {at}"
        self._reject(call, 503, "hold_timeout", text)

    def _ranked(self, model: Model) -> Iterator[tuple[Rank, Upstream]]:
        now, sure = self._step.now, self._trust.sure
        for upstream in model.upstreams.values():
            yield upstream.rank(now, sure(upstream.record.node, now)), upstream

    def settle(self, name: str, opened: Upstream | None) -> None:
        """Route every held call of a model again, oldest first; ``opened``: the seat that has just become active."""
        model = self._table.models.get(name)
        if model is None:
            return
        ranked = list(self._ranked(model))
        for call in sorted(model.held.values(), key=lambda call: call.request):
            self._route(call, model, best(ranked, call.upstream), opened)
        self._table.forget_empty(name)

    def reject_unknown_models(self) -> None:
        """Reject the calls that arrived before the first reading of the roster and whose model has no seat in it."""
        for model in [model for model in self._table.models.values() if not model.upstreams]:
            for call in list(model.held.values()):
                self._calls.pop(call.request)
                self._queue.release(call)
                self._reject_unknown(call.request, call.model)

    def alarm(self, kind: str, request: int) -> None:
        """Handle an alarm of one call."""
        call = self._calls.get(request)
        if call is not None and kind == "deadline" and call.held:
            self._time_out(call)
        elif call is not None and kind == "permit":
            self.ended(CallEnded(request))


def _why(upstream: Upstream) -> str:
    if refusal := upstream.activation_request.refusal:
        return refusal
    state, reason = str(upstream.record.state), upstream.record.reason
    return f"{state} ({reason})" if reason else state
