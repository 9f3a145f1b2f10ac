"""The router's decisions: which seat serves a call, which calls wait, which are rejected. Pure and synchronous.

``Traffic.handle(input, now)`` is the only entry point, and its list of effects the only result. A held call ends in
exactly one of: forwarded, timed out (503), rejected (404, 429, or 503 with the manager's reason), caller gone. A
forwarded call that fails before the first byte of its response waits again, until its deadline.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from kybernate.messages import Presence, SeatEvent
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.router.core import step
from services.router.core.admission import GONE_SECONDS, Admission
from services.router.core.managers import QUERY_RETRY_SECONDS, UNANSWERED_SECONDS, PendingCommands
from services.router.core.trust import ANSWER_SECONDS, AWAY_SECONDS, Trust
from services.router.core.upstreams import ACTIVATABLE, EVICTED, Change, Upstream, UpstreamTable
from services.router.settings import RouterSettings

MISSING_SECONDS = 10.0
"""Time after which a seat without a roster row is forgotten, and the manager is asked about one whose row stays older
than what is known; a living manager writes the row again earlier."""

MOST_PREPARED = 64
"""Connections opened to an engine before it is active: fewer than its queue of connections that wait takes."""


class Traffic:
    """All seats and calls of one router. Alarms: ``missing``, ``doubted``, ``query``, and those of its parts."""

    def __init__(self, settings: RouterSettings, incarnation: str) -> None:
        self.trust = Trust()
        self._incarnation = incarnation
        self.table = UpstreamTable()
        self._step = step.RouterStep()
        self.alarms = self._step.alarms
        """TimePassed is needed when the first of them rings."""
        self._commands = PendingCommands(settings.instance, incarnation, self._step)
        self._admission = Admission(settings, self.table, self.trust, self._commands, self._step)
        self._dirty: dict[str, Upstream | None] = {}
        """Models whose held calls must be routed again, with the seat that has just become active, if there is one."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            step.CallArrived: self._admission.arrived,
            step.CallEnded: self._admission.ended,
            step.CallReturned: self._admission.returned,
            SeatRecord: self._record_changed,
            step.SeatMissing: self._missing,
            step.RosterRead: self._roster_read,
            Presence: self._manager_present,
            step.BusLost: self._bus_lost,
            step.ManagerAnswered: self._manager_answered,
            step.ActivationAnswered: self._activation_answered,
            step.TimePassed: self._time_passed,
        }

    def handle(self, message: step.Input, now: float) -> list[step.Effect]:
        """Handle one input at ``now`` (wall seconds, monotonic); return what to do, in order."""
        self._step.now, self._step.effects = now, []
        self._handlers.get(type(message), self._seat_event)(message)
        while self._dirty:
            name, opened = self._dirty.popitem()
            self._admission.settle(name, opened)
        return self._step.effects

    def serves(self, model: str) -> bool:
        """Return whether a seat serves this model; False for names that only callers use."""
        known = self.table.models.get(model)
        return known is not None and bool(known.upstreams)

    def absent(self, model: str, now: float) -> bool:
        """Return whether no seat serves this model; False also while rows of the roster may not have arrived."""
        return not self.serves(model) and not self.incomplete(now)

    def incomplete(self, now: float) -> str:
        """Return why a model that is not known may exist; empty: it does not."""
        return self.trust.incomplete(self.table.rows, self.table.seqs, now)

    # --- seats ----------------------------------------------------------------------------------------------------

    def _seat_event(self, event: step.Input) -> None:
        assert isinstance(event, SeatEvent)
        self._changed(self.table.apply(event))

    def _record_changed(self, record: SeatRecord, *, complete: bool = False) -> None:
        self._changed(self.table.apply(record, complete=complete))
        upstream = self.table.upstreams[record.key]
        if record.epoch >= upstream.record.epoch:
            return
        upstream.doubted_url = record.manager_url
        if upstream.doubted == inf:
            upstream.doubted = self._step.now
            self._step.alarms.clear(("doubted", record.key))
            self._step.set_alarm(("doubted", record.key), MISSING_SECONDS)

    def _missing(self, m: step.SeatMissing) -> None:
        upstream = self.table.upstreams.get(m.key)
        if upstream is not None and not upstream.unseen:
            upstream.unseen = True
            self._step.alarms.clear(("missing", m.key))
            self._step.set_alarm(("missing", m.key), MISSING_SECONDS)

    def _changed(self, change: Change | None) -> None:
        """Do what follows from a seat's new state, epoch, endpoint or model."""
        if change is None:
            return
        upstream, state = change.upstream, change.upstream.record.state
        if change.left:
            self._step.effects.append(step.LevelChanged(change.left, upstream.key, True))
            self._dirty.setdefault(change.left, None)
            if not self.serves(change.left):
                self._step.set_alarm(("gone", change.left), GONE_SECONDS)
        if change.moved:
            self._step.effects.append(step.Disconnect(upstream.key))
        if state is SeatState.ACTIVATING and upstream.waiting and upstream.record.endpoint is not None:
            count = min(len(upstream.waiting), upstream.limit, MOST_PREPARED)
            self._step.effects.append(step.Prepare(upstream.key, upstream.record.endpoint, count))
        if state not in ACTIVATABLE:
            upstream.activation_request.sent_at = None
        if state in EVICTED:
            self._cut(upstream)
        if change.closed:
            self._commands.acknowledge_drain(upstream)
        if upstream.model:
            self._step.alarms.clear(("gone", upstream.model))
            self._dirty[upstream.model] = upstream if change.opened else self._dirty.get(upstream.model)

    def _cut(self, upstream: Upstream) -> None:
        lost = upstream.record.state is SeatState.LOST
        for call in list(upstream.in_flight.values()):
            if call.kind == "permit":
                self._admission.ended(step.CallEnded(call.request))
            else:
                self._step.effects.append(step.Cut(call.request, "upstream_failed" if lost else "seat_evicted"))

    # --- answers of the bus and of the managers ---------------------------------------------------------------------

    def _activation_answered(self, m: step.ActivationAnswered) -> None:
        upstream = self.table.upstreams.get(m.key)
        if upstream is not None and self._commands.activation_answered(upstream, m.reply):
            self._reroute([upstream])

    def _manager_answered(self, m: step.ManagerAnswered) -> None:
        records = m.records or ()
        answered = bool(records) and all(record.node == m.node for record in records)
        if m.away:
            self.trust.verify(m.node, m.at + AWAY_SECONDS)
            self._reroute_node(m.node)
        if not answered:  # or by another node's manager, which has the address by now
            self._step.set_alarm(("query", m.node), QUERY_RETRY_SECONDS)
            return
        self._commands.end_query(m.node)
        for record in records:
            self._changed(self.table.apply(record, asked=m.at))
        self.trust.verify(m.node, m.at + ANSWER_SECONDS)
        self._reroute_node(m.node)

    def _roster_read(self, m: step.RosterRead) -> None:
        first = not self.trust.ever_synced
        for record in m.records:
            self._record_changed(record, complete=True)
        if m.at is None:
            return
        self.trust.sync(m.at, self._step.now)
        known = self.table.upstreams.keys()  # tens of thousands: nothing here may take long
        if not known <= m.present:
            for key in known - m.present:
                self._missing(step.SeatMissing(key))
        for upstream in self.table.closing.values():
            self._commands.acknowledge_drain(upstream)
        for name, model in self.table.models.items():
            if model.held:
                self._dirty.setdefault(name, None)
                for upstream in model.upstreams.values():
                    upstream.activation_request.sent_at = None
        if first:
            self._step.alarms.set(("settled", ""), self.trust.settles)

    def _bus_lost(self, _: step.BusLost) -> None:
        self.trust.lose()

    def _manager_present(self, m: Presence) -> None:
        """A manager counts the routers that it lists, and the rows that it has written."""
        if not (m.node and m.serving):
            return
        if m.rows is not None:
            self.trust.written(m.node, m.rows, m.seq, self._step.now)
        sent = (m.routers or {}).get(self._incarnation)
        if sent is not None and self.trust.count(m.node, sent, self._step.now):
            self._step.effects.append(step.Resync())

    def _reroute_node(self, node: str) -> None:
        self._reroute(upstream for upstream in self.table.upstreams.values() if upstream.record.node == node)

    def _reroute(self, upstreams: Iterable[Upstream]) -> None:
        for upstream in upstreams:
            if upstream.model:
                self._dirty.setdefault(upstream.model, None)

    # --- time -----------------------------------------------------------------------------------------------------

    def _time_passed(self, _: step.TimePassed) -> None:
        for kind, of in self._step.alarms.due(self._step.now):
            if isinstance(of, int):
                self._admission.alarm(kind, of)
            elif kind == "gone":
                self._admission.reject_unknown(of)
            elif kind == "settled":
                for name in list(self.table.models):
                    self._admission.reject_unknown(name)
            elif kind == "query":
                self._commands.end_query(of)
                self._reroute_node(of)
            elif (upstream := self.table.upstreams.get(of)) is not None:
                self._seat_alarm(kind, upstream)
                self._reroute([upstream])

    def _seat_alarm(self, kind: str, upstream: Upstream) -> None:
        """Handle an alarm of one seat. ``suspect`` needs only the rerouting that follows, which requests an activation
        again, too."""
        if kind == "ack":
            self._commands.acknowledge_drain(upstream)
        elif kind == "wake" and upstream.waiting and upstream.record.state in ACTIVATABLE:
            self._step.set_alarm(("wake", upstream.key), UNANSWERED_SECONDS)
        elif kind == "refusal":
            upstream.activation_request.refusal = None
        elif kind == "missing" and upstream.unseen:
            self._changed(self.table.drop(upstream))
        elif kind == "doubted" and upstream.doubted < inf:
            self._commands.query_manager(upstream)
            self._step.set_alarm(("doubted", upstream.key), MISSING_SECONDS)
