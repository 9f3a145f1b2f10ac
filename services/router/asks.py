"""What a router asks managers for, and what it assures them of: when, and when again. Pure."""

from dataclasses import dataclass

from kybernate.messages import ActivateSeat, CommandReply, DrainAck
from services.router import happenings as h
from services.router.alarms import Alarms
from services.router.lanes import ASKABLE, Lane

ACK_SECONDS = 1.0
"""Acknowledgements are repeated so often while a seat is being closed."""
ASK_SECONDS = 1.0
"""A manager that did not answer over HTTP is asked again so much later."""
WAKE_UNHEARD_SECONDS = 1.0
"""ActivateSeat is sent again so long after one that nobody answered."""
WAKE_AGAIN_SECONDS = 5.0
"""And so long after one that was answered, while calls still wait."""
PASSING_REFUSALS = frozenset({"", "not-ready", "too-late", "stale-epoch", "busy", "unknown-seat", "deleted"})
"""Codes of a refused ActivateSeat that pass by themselves; any other is final for those who wait."""
REFUSAL_SECONDS = 5.0
"""How long a final refusal is believed, unless the manager says how long or the seat says something new."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who acknowledges drains."""

    instance: str
    incarnation: str


class Asks:
    """One per router; its alarms are ``wake``, ``ack``, ``ask`` and ``refusal``."""

    def __init__(self, identity: Identity, alarms: Alarms) -> None:
        self.identity = identity
        self._alarms = alarms
        self._asking: set[str] = set()
        """Nodes whose manager is being asked, or did not answer a moment ago."""

    def wake(self, lane: Lane, now: float) -> h.Wake | None:
        """Ask for the activation of a seat that calls wait for; None when it was asked for recently enough."""
        if lane.wake_sent is not None:
            patience = WAKE_AGAIN_SECONDS if lane.wake_heard else WAKE_UNHEARD_SECONDS
            if now < lane.wake_sent + patience:
                return None
        first = min(lane.waiting.values(), key=lambda call: call.request)
        lane.wake_sent, lane.wake_heard = now, False
        self._alarms.set(("wake", lane.key), now + WAKE_UNHEARD_SECONDS)
        command = ActivateSeat(cause=first.cause, node=lane.record.node, seat=lane.record.seat)
        return h.Wake(first.request, lane.key, command)

    def wake_answered(self, lane: Lane, reply: CommandReply, now: float) -> None:
        """The manager took it or refused it."""
        lane.wake_heard = True
        if not reply.accepted and reply.code not in PASSING_REFUSALS and lane.record.state in ASKABLE:
            lane.refusal = reply.reason or reply.code
            self._alarms.set(("refusal", lane.key), now + (reply.retry_after_seconds or REFUSAL_SECONDS))

    def ask(self, lane: Lane) -> h.AskManager | None:
        """Ask the manager over HTTP whether what is known of its seats is still so; None when it is asked already."""
        node, url = lane.record.node, lane.record.manager_url
        if not url or node in self._asking:
            return None
        self._asking.add(node)
        return h.AskManager(node, url)

    def ask_answered(self, node: str, *, heard: bool, now: float) -> None:
        """The manager answered, or did not; then it is left in peace for a moment."""
        if heard:
            self._asking.discard(node)
        else:
            self._alarms.set(("ask", node), now + ASK_SECONDS)

    def ask_again(self, node: str) -> None:
        """The moment has passed."""
        self._asking.discard(node)

    def acknowledge(self, lane: Lane, now: float) -> DrainAck:
        """Nothing new goes to this seat, and so many are in flight there."""
        self._alarms.set(("ack", lane.key), now + ACK_SECONDS)
        return DrainAck(
            cause=lane.cause,
            node=lane.record.node,
            seat=lane.record.seat,
            instance=self.identity.instance,
            incarnation=self.identity.incarnation,
            epoch=lane.record.epoch,
            in_flight=len(lane.in_flight),
            permits=sum(call.kind == "permit" for call in lane.in_flight.values()),
        )
