"""What a router reports: its own traffic levels, the load of all sources, and the state of the cluster. Pure."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from kybernate.messages import NodeTrafficSignal, RouterLoad, TrafficSignal
from kybernate.roster import GpuRecord, SeatRecord
from kybernate.seat import SeatState
from services.router.core.upstreams import RoutedCall, UpstreamTable, some

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
    waiting, in_flight = upstream.waiting, len(upstream.in_flight)
    if upstream.full:  # they wait for a place in the engine, not for the seat
        waiting, in_flight = {}, in_flight + len(waiting)
    oldest = min(waiting.values(), key=lambda call: call.request, default=None)
    counts = upstream.counts
    return RouterLevel(
        len(waiting),
        in_flight,
        counts.arrivals,
        now - oldest.arrived if oldest else None,
        upstream.record.seat,
        upstream.record.tier,
        oldest.cause if oldest else counts.last_cause,
        counts.served,
        counts.served_seconds,
        _ages(waiting, now),
    )


def _ages(calls: dict[int, RoutedCall], now: float) -> tuple[tuple[float, int], ...]:
    return age_histogram(now - call.arrived for call in calls.values())


def addressed(signal: TrafficSignal, records: Sequence[SeatRecord]) -> list[TrafficSignal]:
    """Return a level as it is published: once for each node with a seat that it concerns.

    ``records``: rows of these seats. Without any, or with a manager of an earlier version, all nodes receive it.
    """
    if not records or not all(record.node_signals for record in records):
        return [signal]
    nodes = dict.fromkeys(record.node for record in records)
    return [NodeTrafficSignal.model_construct(**dict(signal), node=node) for node in nodes]


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
    oldest: float = 0.0
    """Model seconds that the oldest waiting request had waited when its source reported it."""


MOST_LEVELS = 50_000
"""Levels that are kept at a time; those of further sources do not count until some have expired."""
MOST_PARTS = 1000
"""Parts of the loads of other routers that are kept at a time, likewise."""


class Loads:
    """The sum of all levels that have not expired. Times are wall seconds of CLOCK_MONOTONIC, taken at receipt.

    Another router's levels come together, and are kept as they come: nothing is done for each of them until it is read.
    """

    def __init__(self, own: str = "") -> None:
        """``own``: name of this router, whose levels are added one by one as they change."""
        self._own = own
        self._levels: dict[str, dict[tuple[str, str | None, str], tuple[int, float, Load]]] = {}
        """By model, then by (source, seat, tier)."""
        self._routers: dict[tuple[str, int], tuple[float, RouterLoad]] = {}
        """By source and part: the load and when it expires."""
        self.count = 0

    def replace(self, load: RouterLoad, now: float) -> None:
        """Store what another router has, in place of what it had before."""
        if load.source == self._own:
            return
        key = load.source, load.part
        if key in self._routers or len(self._routers) < MOST_PARTS:
            if not self._reported(load.source, now):
                self.forget(now, load.source)  # its levels for any node: they are part of its load from now on
            self._routers[key] = now + load.ttl_seconds, load
        for signal in load.relayed:
            self.add(signal, now)

    def add(self, signal: TrafficSignal, now: float) -> None:
        """Store a level; one whose ``seq`` is lower than that of its source's valid level is out of date."""
        if self._reported(signal.source, now):
            return  # a level for any node, of a router that has reported it already
        levels, key = self._levels.get(signal.model, {}), (signal.source, signal.seat, signal.tier)
        known = levels.get(key)
        if known is not None and signal.seq < known[0] and now < known[1]:
            return
        if known is None:
            if self.count >= MOST_LEVELS:
                return
            self.count += 1
            levels = self._levels.setdefault(signal.model, {})
        load = Load(signal.waiting, signal.in_flight, signal.oldest_wait_seconds or 0.0)
        levels[key] = (signal.seq, now + signal.ttl_seconds, load)

    def _reported(self, source: str, now: float) -> bool:
        """Whether this source is a router whose load is known."""
        until, _ = self._routers.get((source, 0), (now, None))
        return now < until

    def forget(self, now: float, source: str = "") -> None:
        """Drop the expired levels, and those that ``source`` sent one by one."""
        for part in [part for part, (until, _) in self._routers.items() if until <= now]:
            del self._routers[part]
        for model, levels in list(self._levels.items()):
            for key in [key for key, (_, until, _) in levels.items() if until <= now or key[0] == source]:
                del levels[key]
                self.count -= 1
            if not levels:
                del self._levels[model]

    def waiting(self, now: float) -> Iterator[tuple[str, str, int, float]]:
        """Yield (model, seat or "", how many, age of the oldest as in Load) of each valid level with waiting requests;
        levels may be stored meanwhile."""
        for model, levels in list(self._levels.items()):
            for (_, seat, _), (_, until, load) in list(levels.items()):
                if now < until and load.waiting:
                    yield model, seat or "", load.waiting, load.oldest
        for other in self._of_routers(now):
            for model, seats in other.waiting.items():
                for seat, (count, oldest) in seats.items():
                    yield model, seat, count, oldest

    def in_flight(self, now: float) -> Iterator[tuple[str, int]]:
        """Yield (model, requests in flight) of each valid level with some; a model may come more than once."""
        for model, levels in list(self._levels.items()):
            yield model, sum(load.in_flight for _, until, load in levels.values() if now < until)
        for other in self._of_routers(now):
            for model, of in other.in_flight.items():
                yield model, sum(of.values())

    def _of_routers(self, now: float) -> list[RouterLoad]:
        return [load for until, load in self._routers.values() if now < until]

    def sources(self, model: str, seat: str, now: float, *, besides: Collection[str]) -> set[str]:
        """Return who has requests in flight at this seat, ``besides`` these sources."""
        levels = self._levels.get(model, {}).items()
        busy = {source for (source, at, _), (_, until, load) in levels if at == seat and now < until and load.in_flight}
        return busy.difference(besides)

    def of(
        self, model: str, seat: str | None, now: float, *, unassigned: bool = False, besides: Collection[str] = ()
    ) -> Load:
        """Return the load of a seat of this model; seat None: of the model; ``besides`` that of these sources.

        ``unassigned`` adds the levels that name no seat, as the manager does for the seat that would serve them.
        """
        loads = [
            load
            for (source, at, _), (_, until, load) in self._levels.get(model, {}).items()
            if now < until and source not in besides and (seat in (None, at) or (unassigned and at is None))
        ]
        waiting, in_flight = sum(load.waiting for load in loads), sum(load.in_flight for load in loads)
        for until, other in self._routers.values():
            if now < until and (of := other.waiting.get(model)):
                waiting += sum(count for at, (count, _) in of.items() if seat in (None, at) or (unassigned and not at))
            if now < until and (flying := other.in_flight.get(model)):
                in_flight += sum(n for at, n in flying.items() if seat in (None, at) or (unassigned and not at))
        return Load(waiting, in_flight)


MOST_CALLERS = 10_000
"""Known callers beyond which those that were silent for a while are forgotten."""


class SignalQuota:
    """How many signals each caller may send, and for how many sources at a time. Times as in Loads."""

    def __init__(self, per_second: float, burst: int, most_sources: int) -> None:
        self._per_second, self._burst, self._most_sources = per_second, max(burst, math.ceil(per_second)), most_sources
        self._left: dict[str, tuple[float, float]] = {}
        """By caller: signals that it may send, and when that was computed."""
        self._sources: dict[str, dict[str, float]] = {}
        """By caller, then by source: when its last signal expires."""
        self._forget_at = 0.0

    def take(self, caller: str, count: int, now: float) -> int | None:
        """Count signals; None if they may be sent, else the seconds until they may."""
        if len(self._left) >= MOST_CALLERS and now >= self._forget_at:
            self._forget(now)
        left, at = self._left.get(caller, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._per_second)
        if count > left:
            return math.ceil((count - left) / self._per_second)
        self._left[caller] = left - count, now
        return None

    def admits(self, caller: str, source: str, now: float, ttl_seconds: float) -> bool:
        """Remember a source of the caller; False if it has too many."""
        sources = self._sources.setdefault(caller, {})
        if source not in sources and len(sources) >= self._most_sources:
            for known in [known for known, until in sources.items() if until <= now]:
                del sources[known]
            if len(sources) >= self._most_sources:
                return False
        sources[source] = now + ttl_seconds
        return True

    def _forget(self, now: float) -> None:
        """Drop the callers that may send all again, and have no source any more; at most once a second."""
        self._forget_at = now + 1.0
        for caller, (left, at) in list(self._left.items()):
            expired = all(until <= now for until in self._sources.get(caller, {}).values())
            if expired and left + (now - at) * self._per_second >= self._burst:
                del self._left[caller]
                self._sources.pop(caller, None)


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
        raise SeatNameError(f"no seat or model is called {name!r}; known: {some(known)}")
    candidates = tuple(sorted(f"seat/{row.seat}" for row in found.values()))
    raise SeatNameError(f"{name!r} could mean {some(candidates)}; say which", candidates)


def resolve_group(name: str, records: Iterable[SeatRecord]) -> tuple[str, str]:
    """Return (node, group) of ``node/group``, ``group/x`` or a bare name. Raises SeatNameError.

    Rows of the roster name the groups that have seats; a manager knows all groups of its node.
    """
    rows, plain = list(records), name.removeprefix("group/")
    node, slash, group = plain.rpartition("/")
    if slash:
        return node, group
    nodes = sorted({row.node for row in rows if plain in (row.group, row.home_group)} or {row.node for row in rows})
    if len(nodes) == 1:
        return nodes[0], plain
    if not nodes:
        raise SeatNameError(f"no node is known yet; name the group as NODE/{plain}")
    candidates = tuple(f"{node}/{plain}" for node in nodes)
    raise SeatNameError(f"group {plain!r} could be {some(candidates)}; say which", candidates)


def node_of(name: str) -> str:
    """Return the node that ``node/x`` or a bare name means."""
    return name.removeprefix("node/")


def model_state(records: Iterable[SeatRecord]) -> str:
    """Return the best state among a model's seats: active, activating, parked or lost."""
    states = {record.state for record in records}
    return next((name for name, of in _MODEL_STATES if states & of), "lost")


def _by_model(records: Iterable[SeatRecord]) -> dict[str, list[SeatRecord]]:
    """Return the allocated seats by model, both sorted."""
    models: dict[str, list[SeatRecord]] = {}
    for record in sorted(records, key=lambda record: record.seat):
        if record.model and record.state is not _S.FREE:
            models.setdefault(record.model, []).append(record)
    return dict(sorted(models.items()))


@dataclass(frozen=True, slots=True)
class SeatQuery:
    """Which seats ``GET /v1/seats`` returns. Empty texts select all."""

    node: str = ""
    model: str = ""
    state: str = ""
    after: str = ""
    """Nodes up to this one were returned before."""
    limit: int = 1000
    """Whole nodes, until there are so many seats."""

    def selects(self, record: SeatRecord) -> bool:
        """Whether the query asks for this seat, on whatever page."""
        model, state = self.model or record.model, self.state or record.state
        return record.model == model and record.state == state


def overview(
    table: UpstreamTable,
    loads: Loads,
    now: float,
    machines: Mapping[str, Iterable[GpuRecord]] = MappingProxyType({}),
    query: SeatQuery | None = None,
) -> Iterator[bytes]:
    """Yield the JSON of ``GET /v1/seats`` but for its last brace, a seat, model or node at a time, so that other work
    may come between: seats with their load, models, nodes with their GPUs, groups and seats.

    ``machines``: GPUs by node. ``next``, if there is more: the ``after`` of the next page. Only nodes of the page are
    looked at, with ``state`` also all before them that have no such seat.
    """
    query = query or SeatQuery()
    if query.model or query.state:
        machines = {}
    known = {record.node for record in table.records_of(query.model)} if query.model else table.nodes.keys()
    names = sorted(name for name in {*known, *machines} if name > query.after and query.node in ("", name))
    shown: dict[str, list[SeatRecord]] = {}
    rows: list[SeatRecord] = []
    more = False
    for name in names:
        of = [seat.record for seat in table.nodes.get(name, {}).values() if query.selects(seat.record)]
        yield b""
        if not of and name not in machines:
            continue
        if more := len(rows) >= query.limit:
            break
        shown[name] = of
        rows += sorted(of, key=lambda record: (record.group or record.home_group, record.seat))
    yield from _array(b'{"seats":[', (_seat(row, table, loads, now) for row in rows))
    models = _by_model(rows).items()
    yield from _array(b',"models":[', (_json(_model(name, found, loads, now)) for name, found in models))
    nodes = (_json(_node(name, of, sorted(machines.get(name, ()), key=_place))) for name, of in shown.items())
    yield from _array(b',"nodes":[', nodes)
    if more:
        yield b',"next":' + _json(max(shown))


def _array(head: bytes, items: Iterable[bytes]) -> Iterator[bytes]:
    for item in items:
        yield head + item
        head = b","
    yield (b"" if head == b"," else head) + b"]"


def _seat(row: SeatRecord, table: UpstreamTable, loads: Loads, now: float) -> bytes:
    replicas = table.models[row.model].upstreams if row.model in table.models else ()
    load = loads.of(row.model, row.seat, now, unassigned=len(replicas) == 1)
    return b'%s,"waiting":%d,"in_flight":%d}' % (row.model_dump_json().encode()[:-1], load.waiting, load.in_flight)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _place(gpu: GpuRecord) -> tuple[int, str]:
    return gpu.index, gpu.gpu


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
    for record in sorted(records, key=lambda record: record.seat):
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
