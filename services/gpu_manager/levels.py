"""Traffic as levels: what each source says about each model, until it expires. Pure."""

from dataclasses import dataclass, field

from kybernate.messages import TrafficSignal
from services.gpu_manager.inputs import Now

POKE_SECONDS = 3.0
"""Wall seconds for which an ActivateSeat of a router counts as one waiting request, while its signal is on the way."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one source said last."""

    seq: int
    waiting: int
    in_flight: int
    oldest_since: float | None
    """Model time at which its oldest waiting request began to wait."""
    expires: float
    """Wall time."""
    cause: str
    poke: bool = False
    since: tuple[tuple[float, int], ...] = ()
    """Its waiting requests, oldest first: (model time since which they wait, how many); empty: not told."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The sum of all levels that concern one seat."""

    waiting: int = 0
    in_flight: int = 0
    oldest_since: float | None = None
    cause: str = ""
    since: tuple[tuple[float, int], ...] = ()
    """Those that wait, oldest first: (model time since which, how many); the counts add up to ``waiting``."""

    def ages(self, now: Now) -> tuple[tuple[float, int], ...]:
        """Those that wait, oldest first: (age in model seconds, how many)."""
        return tuple((max(0.0, now.model - since), count) for since, count in self.since)

    def oldest_wait(self, now: Now) -> float:
        """Age of the oldest waiting request, model seconds."""
        return 0.0 if self.oldest_since is None else max(0.0, now.model - self.oldest_since)


Place = tuple[str, str]
"""("seat", seat) for what is said about a seat, ("model", model) for what names no seat."""


@dataclass
class Levels:
    """All levels of a node: by place, then by (source, tier)."""

    places: dict[Place, dict[tuple[str, str], Level]] = field(default_factory=dict)

    def hear(self, signal: TrafficSignal, now: Now) -> bool:
        """Take a signal in; one that is older than what its source said last is dropped. True: it has other counts."""
        place = ("seat", signal.seat) if signal.seat is not None else ("model", signal.model)
        sources = self.places.setdefault(place, {})
        known = sources.get((signal.source, signal.tier))
        if known is not None and signal.seq < known.seq and known.expires > now.wall:
            return False
        oldest: float | None = None
        since: tuple[tuple[float, int], ...] = ()
        if signal.waiting:
            oldest = now.model - (signal.oldest_wait_seconds or 0.0)
            if known is not None and known.oldest_since is not None and signal.oldest_wait_seconds is None:
                oldest = known.oldest_since
            since = _since(signal, oldest, now)
        expires = now.wall + signal.ttl_seconds
        sources[signal.source, signal.tier] = Level(
            signal.seq, signal.waiting, signal.in_flight, oldest, expires, signal.cause, since=since
        )
        return known is None or (known.waiting, known.in_flight) != (signal.waiting, signal.in_flight)

    def poke(self, source: str, seat: str, cause: str, now: Now) -> None:
        """A router asked for a seat: one request waits there until its own signal says more, or a moment passes."""
        sources = self.places.setdefault(("seat", seat), {})
        key = (f"poke/{source}", "")
        known = sources.get(key)
        since = now.model if known is None or known.oldest_since is None else known.oldest_since
        sources[key] = Level(0, 1, 0, since, now.wall + POKE_SECONDS, cause, poke=True)

    def unpoke(self, seat: str) -> None:
        """The seat serves, or never will again: what was asked for is over."""
        sources = self.places.get(("seat", seat), {})
        for key in [key for key, level in sources.items() if level.poke]:
            del sources[key]

    def expire(self, now: Now) -> bool:
        """Forget what was not repeated in time; True when something was."""
        gone = False
        for place, sources in list(self.places.items()):
            for key in [key for key, level in sources.items() if level.expires <= now.wall]:
                del sources[key]
                gone = True
            if not sources:
                del self.places[place]
        return gone

    def next_expiry(self) -> float | None:
        """Wall time at which the next level expires."""
        return min((level.expires for sources in self.places.values() for level in sources.values()), default=None)

    def of(self, model: str, seat: str, *, takes_unassigned: bool) -> Traffic:
        """The traffic of one seat; ``takes_unassigned`` adds what sources said about the model without a seat."""
        waiting = in_flight = pokes = 0
        oldest: float | None = None
        cause = ""
        since: list[tuple[float, int]] = []
        places: list[Place] = [("seat", seat)]
        if takes_unassigned:
            places.append(("model", model))
        for place in places:
            for level in self.places.get(place, {}).values():
                if level.poke:
                    pokes = 1
                else:
                    waiting += level.waiting
                    since += level.since
                in_flight += level.in_flight
                if level.oldest_since is not None and (oldest is None or level.oldest_since < oldest):
                    oldest, cause = level.oldest_since, level.cause
        if pokes and not waiting and oldest is not None:
            since = [(oldest, 1)]
        return Traffic(max(waiting, pokes), in_flight, oldest, cause, tuple(sorted(since)))


def _since(signal: TrafficSignal, oldest: float, now: Now) -> tuple[tuple[float, int], ...]:
    """Since when the requests of a signal wait. Where it tells the oldest only, the others wait half as long."""
    told = signal.age_histogram
    sound = all(age >= 0 and count > 0 for age, count in told)
    if told and sound and sum(count for _, count in told) == signal.waiting:
        return tuple((now.model - age, count) for age, count in told)
    if signal.waiting == 1:
        return ((oldest, 1),)
    return ((oldest, 1), ((oldest + now.model) / 2, signal.waiting - 1))
