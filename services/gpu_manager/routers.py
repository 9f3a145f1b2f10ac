"""Present routers and their acknowledgements of draining seats. Pure.

Drained means that every router that may still forward has acknowledged that it does not. A router that fell silent
proves nothing: it counts until its presence has expired, and by then it has stopped by its own clock.
"""

from dataclasses import dataclass, field

from kybernate.messages import DrainAck, Presence
from services.gpu_manager.inputs import Now, Wall

DEAD_AFTER_SECONDS = 10.0
SETTLE_SECONDS = 3.0
"""Wall seconds after a start or a return of the bus in which every router on the bus publishes its presence."""
PERMIT_SECONDS = 1.5
"""Wall seconds for which a router without NATS may forward by an answer that the manager gave it over HTTP."""


@dataclass
class Routers:
    """Present routers by instance, and their acknowledgements by seat."""

    present: dict[str, tuple[str, Wall]] = field(default_factory=dict)
    """Instance → (incarnation, when it counts as dead)."""
    acks: dict[str, dict[str, DrainAck]] = field(default_factory=dict)
    """Seat → instance → its last acknowledgement."""
    settled_at: Wall = Wall(0.0)
    """The list of routers may be incomplete until then."""
    permitted_until: Wall = Wall(0.0)
    """A router may forward by an HTTP answer until then."""

    def unsettle(self, now: Now) -> None:
        """Routers may be present that are not known yet: wait a moment before trusting the list."""
        self.settled_at = now.wall + SETTLE_SECONDS

    def settled(self, now: Now) -> bool:
        """True once every living router must have published its presence."""
        return now.wall >= self.settled_at

    def update(self, presence: Presence, now: Now) -> None:
        """A router is alive; a new incarnation replaces the old one, whose requests died with it."""
        self.present[presence.instance] = (presence.incarnation, now.wall + DEAD_AFTER_SECONDS)

    def remember(self, known: dict[str, str], now: Now) -> None:
        """Routers that the previous manager knew: present until their next presence or until they expire."""
        for instance, incarnation in known.items():
            self.present.setdefault(instance, (incarnation, now.wall + DEAD_AFTER_SECONDS))

    def permit(self, now: Now) -> None:
        """A router got the active seats over HTTP."""
        self.permitted_until = now.wall + PERMIT_SECONDS

    def expire(self, now: Now) -> None:
        """Drop routers that fell silent."""
        for instance in [name for name, (_, dead_at) in self.present.items() if dead_at <= now.wall]:
            del self.present[instance]

    def acknowledge(self, ack: DrainAck) -> None:
        """Keep a router's acknowledgement of a draining seat."""
        self.acks.setdefault(ack.seat, {})[ack.instance] = ack

    def forget(self, seat: str) -> None:
        """The seat does not drain any more."""
        self.acks.pop(seat, None)

    def quiet(self, seat: str, epoch: int, now: Now, *, frozen: bool = False) -> bool:
        """True when every present router has acknowledged (seat, epoch) with nothing in flight.

        ``frozen``: requests in flight are frozen with the seat, so only permissions to send must be over.
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
