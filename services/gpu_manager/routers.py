"""Which routers are there, and what they said about seats that drain. Pure.

Drained means that every router that may still forward has said it does not. A router that fell silent proves
nothing: it stops counting only when its presence has expired, and by then it has stopped by its own clock.
"""

from dataclasses import dataclass, field

from kybernate.messages import DrainAck, Presence
from services.gpu_manager.inputs import Now

DEAD_AFTER_SECONDS = 10.0
SETTLE_SECONDS = 3.0
"""Wall seconds after a start or a return of the bus in which every router that is on the bus says that it is there."""
PERMIT_SECONDS = 1.5
"""Wall seconds for which a router without NATS may go by an answer that the manager gave it over HTTP."""


@dataclass
class Routers:
    """Present routers by instance, and their acknowledgements by seat."""

    present: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Instance → (incarnation, wall time at which it counts as dead)."""
    acks: dict[str, dict[str, DrainAck]] = field(default_factory=dict)
    """Seat → instance → its last acknowledgement."""
    settled_at: float = 0.0
    """Wall time before which the list of routers may be incomplete."""
    permitted_until: float = 0.0
    """Wall time until which some router may forward by what it was told over HTTP."""

    def unsettle(self, now: Now) -> None:
        """Routers may be there that were not heard: wait a little before trusting the list."""
        self.settled_at = now.wall + SETTLE_SECONDS

    def settled(self, now: Now) -> bool:
        """Whether every living router must have been heard by now."""
        return now.wall >= self.settled_at

    def hear(self, presence: Presence, now: Now) -> None:
        """A router is alive; a new incarnation replaces the old one, whose requests died with it."""
        self.present[presence.instance] = (presence.incarnation, now.wall + DEAD_AFTER_SECONDS)

    def remember(self, known: dict[str, str], now: Now) -> None:
        """Routers that the manager before this one knew: present until heard again or expired, also off the bus."""
        for instance, incarnation in known.items():
            self.present.setdefault(instance, (incarnation, now.wall + DEAD_AFTER_SECONDS))

    def permit(self, now: Now) -> None:
        """Somebody was told over HTTP what is active."""
        self.permitted_until = now.wall + PERMIT_SECONDS

    def expire(self, now: Now) -> None:
        """Forget routers that fell silent."""
        for instance in [name for name, (_, dead_at) in self.present.items() if dead_at <= now.wall]:
            del self.present[instance]

    def acknowledge(self, ack: DrainAck) -> None:
        """Keep what a router said about a seat."""
        self.acks.setdefault(ack.seat, {})[ack.instance] = ack

    def forget(self, seat: str) -> None:
        """The seat does not drain any more."""
        self.acks.pop(seat, None)

    def quiet(self, seat: str, epoch: int, now: Now, *, frozen: bool = False) -> bool:
        """Whether every present router has acknowledged (seat, epoch) with nothing in flight.

        ``frozen``: what is in flight stands still with the seat, so only permissions must be over.
        """
        if not self.settled(now) or now.wall < self.permitted_until:
            return False
        acks = self.acks.get(seat, {})
        for instance, (incarnation, _) in self.present.items():
            ack = acks.get(instance)
            if ack is None or ack.epoch != epoch or ack.incarnation != incarnation:
                return False
            if ack.in_flight and not (frozen and ack.permits == 0):
                return False
        return True
