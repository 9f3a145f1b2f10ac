"""What a router asks of the GPU managers and acknowledges to them, and when it repeats that. Pure."""

from kybernate.messages import ActivateSeat, CommandReply, DrainAck
from services.router.core.step import QueryManager, RequestActivation, RouterStep
from services.router.core.upstreams import ACTIVATABLE, CLOSING, Upstream

ACK_SECONDS = 1.0
"""Interval at which drain acknowledgements are repeated while a seat is closing."""
QUERY_RETRY_SECONDS = 1.0
"""Time after which a manager that did not answer over HTTP is queried again."""
UNANSWERED_SECONDS = 1.0
"""Time after which ActivateSeat is repeated if its sender no longer waits for an answer."""
DUE_SECONDS = 3.0
"""Time after which ActivateSeat is repeated in any case; longer than its sender waits for an answer."""
ANSWERED_SECONDS = 5.0
"""Time after which ActivateSeat is repeated if it was answered but calls still wait."""
PASSING_REFUSALS = frozenset({"", "not-ready", "too-late", "stale-epoch", "busy", "unknown-seat", "deleted"})
"""Codes of temporary refusals of ActivateSeat; any other code rejects the calls that wait."""
REFUSAL_SECONDS = 5.0
"""How long a final refusal is valid, unless the manager sets a time or the seat changes earlier."""


class PendingCommands:
    """Commands and queries to managers, and when to repeat them. Alarms: ``wake``, ``ack``, ``refusal``."""

    def __init__(self, instance: str, incarnation: str, step: RouterStep) -> None:
        self._instance, self._incarnation, self._step = instance, incarnation, step
        self._querying: set[str] = set()
        """Nodes whose manager is being queried, or did not answer within ``QUERY_RETRY_SECONDS``."""

    def request_activation(self, upstream: Upstream) -> None:
        """Request the activation of a seat where calls wait, unless it was requested recently."""
        request, now = upstream.activation_request, self._step.now
        if request.sent_at is not None and now < request.sent_at + request.interval:
            return
        first = min(upstream.waiting.values(), key=lambda call: call.request)
        request.sent_at, request.interval = now, DUE_SECONDS
        self._step.set_alarm(("wake", upstream.key), UNANSWERED_SECONDS)
        command = ActivateSeat(cause=first.cause, node=upstream.record.node, seat=upstream.record.seat)
        self._step.effects.append(RequestActivation(first.request, upstream.key, command))

    def activation_answered(self, upstream: Upstream, reply: CommandReply | None) -> bool:
        """Record the manager's reply, None if none came; True: a final refusal, which is kept on the upstream."""
        upstream.activation_request.interval = UNANSWERED_SECONDS if reply is None else ANSWERED_SECONDS
        if reply is None or reply.accepted or reply.code in PASSING_REFUSALS:
            return False
        if upstream.record.state not in ACTIVATABLE:
            return False
        upstream.activation_request.refusal = reply.reason or reply.code
        self._step.set_alarm(("refusal", upstream.key), reply.retry_after_seconds or REFUSAL_SECONDS)
        return True

    def query_manager(self, upstream: Upstream) -> None:
        """Query the seat's manager over HTTP for the state of its seats, unless a query is pending."""
        node, url = upstream.record.node, upstream.manager_url
        if url and node not in self._querying:
            self._querying.add(node)
            self._step.effects.append(QueryManager(node, url))

    def end_query(self, node: str) -> None:
        """The manager has answered, or the delay after an unanswered query is over."""
        self._querying.discard(node)

    def acknowledge_drain(self, upstream: Upstream) -> None:
        """If the seat is closing, acknowledge that it gets no new calls, with the number of those in flight."""
        if upstream.record.state not in CLOSING:
            return
        self._step.set_alarm(("ack", upstream.key), ACK_SECONDS)
        ack = DrainAck(
            cause=upstream.cause,
            node=upstream.record.node,
            seat=upstream.record.seat,
            instance=self._instance,
            incarnation=self._incarnation,
            epoch=upstream.record.epoch,
            in_flight=len(upstream.in_flight),
        )
        self._step.effects.append(ack)
