"""How much traffic all sources report for each model and seat: the sum of levels that have not expired. Pure."""

from dataclasses import dataclass

from kybernate.messages import TrafficSignal


@dataclass(frozen=True, slots=True)
class Load:
    """Requests waiting and in flight."""

    waiting: int = 0
    in_flight: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.waiting + other.waiting, self.in_flight + other.in_flight)


class Loads:
    """Times are wall seconds of this process's monotonic clock, taken at receipt."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str, str | None, str], tuple[int, float, Load]] = {}

    def hear(self, signal: TrafficSignal, now: float) -> None:
        """Take a level; one with a lower ``seq`` than its source's last one is late and dropped."""
        key = (signal.source, signal.model, signal.seat, signal.tier)
        known = self._levels.get(key)
        if known is not None and signal.seq < known[0] and now < known[1]:
            return
        load = Load(signal.waiting, signal.in_flight)
        self._levels[key] = (signal.seq, now + signal.ttl_seconds, load)

    def of_seat(self, model: str, seat: str, now: float) -> Load:
        """What is reported for this seat."""
        return self._sum(now, model, seat)

    def of_model(self, model: str, now: float) -> Load:
        """What is reported for this model, with or without a seat."""
        return self._sum(now, model)

    def _sum(self, now: float, model: str, seat: str | None = None) -> Load:
        total = Load()
        for (_, of, at, _), (_, until, load) in list(self._levels.items()):
            if now >= until:
                continue
            if of == model and (seat is None or at == seat):
                total += load
        self._forget(now)
        return total

    def _forget(self, now: float) -> None:
        if len(self._levels) > 10_000:
            self._levels = {key: level for key, level in self._levels.items() if now < level[1]}
