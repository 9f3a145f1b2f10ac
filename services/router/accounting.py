"""How much a router has for each (model, seat), as its levels tell it. Pure."""

from typing import NamedTuple

from services.router.ages import steps
from services.router.seats import SeatTable


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


def level(seats: SeatTable, model: str, key: str | None, now: float) -> Level:
    """The present level of (model, seat); key None: calls that no seat can serve at present."""
    if key is None:
        return _without_seat(seats, model, now)
    lane = seats.lanes.get(key)
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


def _without_seat(seats: SeatTable, model: str, now: float) -> Level:
    orphans = seats.models[model].orphans if model in seats.models else {}
    first = next(iter(orphans.values()), None)
    return Level(
        len(orphans),
        oldest_wait=now - first.arrived if first else None,
        cause=first.cause if first else model,
        ages=steps([now - call.arrived for call in orphans.values()]),
    )
