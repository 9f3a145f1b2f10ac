"""What a router reports: its own traffic levels, the load of all sources, and the state of the cluster. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kybernate.messages import TrafficSignal
from kybernate.roster import GpuRecord, SeatRecord
from kybernate.seat import SeatState
from services.router.core.upstreams import RoutedCall, UpstreamTable

_S = SeatState
_MODEL_STATES: tuple[tuple[str, frozenset[SeatState]], ...] = (
    ("active", frozenset({_S.ACTIVE, _S.DRAINING})),
    ("activating", frozenset({_S.ACTIVATING, _S.STARTING, _S.MIGRATING})),
    ("parked", frozenset({_S.PARKED, _S.PARKING, _S.WAITING, _S.BACKOFF})),
)
HISTOGRAM_STEPS = 16


# --- levels of this router --------------------------------------------------------------------------------------------


class RouterLevel(NamedTuple):
    """This router's calls for one (model, seat) now."""

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
    """Since the router started."""
    served_seconds: float = 0.0
    """Wall seconds in flight of the served calls."""
    ages: tuple[tuple[float, int], ...] = ()
    """Ages of the waiting calls, oldest first: (wall seconds, number of calls)."""


def level_of(table: UpstreamTable, model: str, key: str | None, now: float) -> RouterLevel:
    """Return the level of (model, seat); key None: the calls that wait at no seat, because none is usable."""
    if key is None:
        orphans = table.models[model].orphans if model in table.models else {}
        first = next(iter(orphans.values()), None)
        return RouterLevel(
            len(orphans),
            oldest_wait=now - first.arrived if first else None,
            cause=first.cause if first else model,
            ages=_ages(orphans, now),
        )
    upstream = table.upstreams.get(key)
    if upstream is None or upstream.model != model:
        return RouterLevel(seat=upstream.record.seat if upstream else None)
    oldest = min(upstream.waiting.values(), key=lambda call: call.request, default=None)
    counts = upstream.counts
    return RouterLevel(
        len(upstream.waiting),
        len(upstream.in_flight),
        counts.arrivals,
        now - oldest.arrived if oldest else None,
        upstream.record.seat,
        upstream.record.tier,
        oldest.cause if oldest else counts.last_cause,
        counts.served,
        counts.served_seconds,
        _ages(upstream.waiting, now),
    )


def _ages(calls: dict[int, RoutedCall], now: float) -> tuple[tuple[float, int], ...]:
    return age_histogram(now - call.arrived for call in calls.values())


def age_histogram(ages: Iterable[float], most: int = HISTOGRAM_STEPS) -> tuple[tuple[float, int], ...]:
    """Return ages, oldest first, in at most ``most`` steps: (mean age of the step, number of calls in it).

    Exact while there are no more calls than steps. Otherwise the oldest call has its own step and the others form steps
    of equal size, plus or minus one, so that the sum stays exact and no age is far from its step.
    """
    ordered = sorted(ages, reverse=True)
    if len(ordered) <= most:
        return tuple((age, 1) for age in ordered)
    found = [(ordered[0], 1)]
    rest = ordered[1:]
    for step in range(most - 1):
        part = rest[step * len(rest) // (most - 1) : (step + 1) * len(rest) // (most - 1)]
        found.append((sum(part) / len(part), len(part)))
    return tuple(found)


# --- load of all sources ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Requests waiting and in flight."""

    waiting: int = 0
    in_flight: int = 0


class Loads:
    """The sum of all levels that have not expired. Times are wall seconds of CLOCK_MONOTONIC, taken at receipt."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str, str | None, str], tuple[int, float, Load]] = {}

    def add(self, signal: TrafficSignal, now: float) -> None:
        """Store a level; one whose ``seq`` is lower than that of its source's valid level is out of date."""
        key = (signal.source, signal.model, signal.seat, signal.tier)
        known = self._levels.get(key)
        if known is not None and signal.seq < known[0] and now < known[1]:
            return
        self._levels[key] = (signal.seq, now + signal.ttl_seconds, Load(signal.waiting, signal.in_flight))

    def of(self, model: str, seat: str | None, now: float) -> Load:
        """Return the load of a seat of this model; seat None: of the model, including levels without a seat."""
        if len(self._levels) > 10_000:
            self._levels = {key: level for key, level in self._levels.items() if now < level[1]}
        loads = [
            load
            for (_, of, at, _), (_, until, load) in self._levels.items()
            if now < until and of == model and seat in (None, at)
        ]
        return Load(sum(load.waiting for load in loads), sum(load.in_flight for load in loads))


# --- the cluster ------------------------------------------------------------------------------------------------------


class SeatNameError(Exception):
    """No seat has this name, or more than one; ``candidates`` are the seats that it could mean."""

    def __init__(self, text: str, candidates: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.candidates = candidates


def resolve(name: str, records: Iterable[SeatRecord]) -> SeatRecord:
    """Return the seat that ``seat/x``, ``model/x`` or a bare name means. Raises SeatNameError."""
    rows = list(records)
    kind, _, rest = name.partition("/")
    seats = [row for row in rows if row.seat == (rest if kind == "seat" else name)]
    models = [row for row in rows if row.model == (rest if kind == "model" else name) and row.state is not _S.FREE]
    found = {row.key: row for row in (*seats, *models)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        known = sorted({row.seat for row in rows} | {f"model/{row.model}" for row in rows if row.model})
        raise SeatNameError(f"no seat or model is called {name!r}; known: {', '.join(known) or 'none yet'}")
    candidates = tuple(sorted(f"seat/{row.seat}" for row in found.values()))
    raise SeatNameError(f"{name!r} could mean {', '.join(candidates)}; say which", candidates)


def model_state(records: Iterable[SeatRecord]) -> str:
    """Return the best state among a model's seats: active, activating, parked or lost."""
    states = {record.state for record in records}
    return next((name for name, of in _MODEL_STATES if states & of), "lost")


def by_model(records: Iterable[SeatRecord]) -> dict[str, list[SeatRecord]]:
    """Return the allocated seats by model, both sorted."""
    models: dict[str, list[SeatRecord]] = {}
    for record in sorted(records, key=lambda record: record.seat):
        if record.model and record.state is not _S.FREE:
            models.setdefault(record.model, []).append(record)
    return dict(sorted(models.items()))


def overview(records: Iterable[SeatRecord], loads: Loads, now: float, gpus: Iterable[GpuRecord] = ()) -> dict[str, Any]:
    """Return the body of ``GET /v1/seats``: seats with their load, models, nodes with their GPUs, groups and seats."""
    machines: dict[str, list[GpuRecord]] = {}
    for gpu in gpus:
        machines.setdefault(gpu.node, []).append(gpu)
    rows = sorted(records, key=lambda record: (record.node, record.group or record.home_group, record.seat))
    models = by_model(rows)
    seats = []
    for row in rows:
        load = loads.of(row.model, row.seat, now)
        seats.append({**row.model_dump(mode="json"), "waiting": load.waiting, "in_flight": load.in_flight})
    return {
        "seats": seats,
        "models": [_model(name, of, loads, now) for name, of in models.items()],
        "nodes": [
            _node(name, [row for row in rows if row.node == name], machines.get(name, []))
            for name in sorted({row.node for row in rows} | machines.keys())
        ],
    }


def _model(name: str, records: list[SeatRecord], loads: Loads, now: float) -> dict[str, Any]:
    load = loads.of(name, None, now)
    return {
        "model": name,
        "state": model_state(records),
        "waiting": load.waiting,
        "in_flight": load.in_flight,
        "seats": [record.seat for record in records],
    }


def _node(name: str, records: list[SeatRecord], gpus: list[GpuRecord]) -> dict[str, Any]:
    groups: dict[str, list[SeatRecord]] = {}
    for record in records:
        groups.setdefault(record.group or record.home_group, []).append(record)
    return {
        "node": name,
        "gpus": [gpu.model_dump(mode="json") for gpu in gpus],
        "manager_url": next((record.manager_url for record in records if record.manager_url), ""),
        "groups": [
            {
                "group": group,
                "gpus": list(next((record.gpus for record in of if record.gpus), ())),
                "resource": of[0].resource,
                "active": [record.seat for record in of if record.state is _S.ACTIVE],
                "seats": [record.seat for record in of],
            }
            for group, of in sorted(groups.items())
        ],
    }
