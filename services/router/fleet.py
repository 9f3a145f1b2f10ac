"""What the cluster looks like, for ``GET /v1/seats`` and ``GET /v1/models``, and which seat a name means. Pure."""

from collections.abc import Iterable
from typing import Any

from kybernate.inventory import GpuRecord
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.router.loads import Loads

_S = SeatState
_MODEL_STATES: tuple[tuple[str, frozenset[SeatState]], ...] = (
    ("active", frozenset({_S.ACTIVE, _S.DRAINING})),
    ("activating", frozenset({_S.ACTIVATING, _S.STARTING, _S.MIGRATING})),
    ("parked", frozenset({_S.PARKED, _S.PARKING, _S.WAITING, _S.BACKOFF})),
)


class UnclearNameError(Exception):
    """No seat, or more than one, has this name; ``candidates`` are those it could mean."""

    def __init__(self, text: str, candidates: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.candidates = candidates


def resolve(name: str, records: Iterable[SeatRecord]) -> SeatRecord:
    """The seat that ``seat/x``, ``model/x`` or a bare name means. Raises UnclearNameError."""
    rows = list(records)
    kind, _, rest = name.partition("/")
    seats = [row for row in rows if row.seat == (rest if kind == "seat" else name)]
    models = [row for row in rows if row.model == (rest if kind == "model" else name) and row.state is not _S.FREE]
    found = {row.key: row for row in (*seats, *models)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        known = sorted({row.seat for row in rows} | {f"model/{row.model}" for row in rows if row.model})
        raise UnclearNameError(f"no seat or model is called {name!r}; known: {', '.join(known) or 'none yet'}")
    candidates = tuple(sorted(f"seat/{row.seat}" for row in found.values()))
    raise UnclearNameError(f"{name!r} could mean {', '.join(candidates)}; say which", candidates)


def model_state(records: Iterable[SeatRecord]) -> str:
    """The best state of a model's seats: active, activating, parked or lost."""
    states = {record.state for record in records}
    return next((name for name, of in _MODEL_STATES if states & of), "lost")


def by_model(records: Iterable[SeatRecord]) -> dict[str, list[SeatRecord]]:
    """Seats that somebody owns, by model, both sorted."""
    models: dict[str, list[SeatRecord]] = {}
    for record in sorted(records, key=lambda record: record.seat):
        if record.model and record.state is not _S.FREE:
            models.setdefault(record.model, []).append(record)
    return dict(sorted(models.items()))


def overview(records: Iterable[SeatRecord], loads: Loads, now: float, gpus: Iterable[GpuRecord] = ()) -> dict[str, Any]:
    """Seats with their load over all sources, models, and node → group → seats; each node with its GPUs."""
    machines: dict[str, list[GpuRecord]] = {}
    for gpu in gpus:
        machines.setdefault(gpu.node, []).append(gpu)
    rows = sorted(records, key=lambda record: (record.node, record.group or record.home_group, record.seat))
    models = by_model(rows)
    seats = []
    for row in rows:
        load = loads.of_seat(row.model, row.seat, now)
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
    load = loads.of_model(name, now)
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
