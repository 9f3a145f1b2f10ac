"""What ``GET /v1/seats`` shows of the cluster, and which seat or group a name means. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kybernate.levels import Loads
from kybernate.roster import GpuRecord, SeatRecord, model_state, some
from kybernate.seat import SeatState
from services.console.core.cluster import Cluster


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
    models = [
        row for row in rows if row.model == (rest if kind == "model" else name) and row.state is not SeatState.FREE
    ]
    found = {row.key: row for row in (*seats, *models)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        known = sorted({row.model for row in rows if row.model})
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


def _by_model(records: Iterable[SeatRecord]) -> dict[str, list[SeatRecord]]:
    """Return the allocated seats by model, both sorted."""
    models: dict[str, list[SeatRecord]] = {}
    for record in sorted(records, key=lambda record: record.seat):
        if record.model and record.state is not SeatState.FREE:
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


def overview(cluster: Cluster, now: float, query: SeatQuery | None = None) -> dict[str, Any]:
    """Return the body of ``GET /v1/seats``: seats with their load, models, nodes with their GPUs, groups and seats.

    ``next``, if there is more: the ``after`` of the next page.
    """
    query = query or SeatQuery()
    seats, loads = cluster.seats, cluster.loads
    machines = {} if query.model or query.state else cluster.gpus.nodes
    known = {record.node for record in seats.of_model(query.model)} if query.model else seats.nodes.keys()
    names = sorted(name for name in {*known, *machines} if name > query.after and query.node in ("", name))
    shown: dict[str, list[SeatRecord]] = {}
    rows: list[SeatRecord] = []
    more = False
    for name in names:
        of = [record for record in seats.nodes.get(name, {}).values() if query.selects(record)]
        if not of and name not in machines:
            continue
        if more := len(rows) >= query.limit:
            break
        shown[name] = of
        rows += sorted(of, key=lambda record: (record.group or record.home_group, record.seat))
    body = {
        "seats": [_seat(row, cluster, now) for row in rows],
        "models": [_model(name, found, loads, now) for name, found in _by_model(rows).items()],
        "nodes": [_node(name, of, machines.get(name, {}).values()) for name, of in shown.items()],
    }
    return body | ({"next": max(shown)} if more else {})


def _seat(row: SeatRecord, cluster: Cluster, now: float) -> dict[str, Any]:
    alone = len(cluster.seats.models.get(row.model, ())) == 1
    load = cluster.loads.of(row.model, row.seat, now, unassigned=alone)
    return row.model_dump(mode="json") | {"waiting": load.waiting, "in_flight": load.in_flight}


def _model(name: str, records: list[SeatRecord], loads: Loads, now: float) -> dict[str, Any]:
    load = loads.of(name, None, now)
    return {
        "model": name,
        "state": model_state(records),
        "waiting": load.waiting,
        "in_flight": load.in_flight,
        "seats": [record.seat for record in records],
    }


def _node(name: str, records: list[SeatRecord], gpus: Iterable[GpuRecord]) -> dict[str, Any]:
    groups: dict[str, list[SeatRecord]] = {}
    for record in sorted(records, key=lambda record: record.seat):
        groups.setdefault(record.group or record.home_group, []).append(record)
    return {
        "node": name,
        "gpus": [gpu.model_dump(mode="json") for gpu in sorted(gpus, key=attrgetter("index", "gpu"))],
        "groups": [
            {
                "group": group,
                "gpus": list(next((record.gpus for record in of if record.gpus), ())),
                "resource": of[0].resource,
                "active": [record.seat for record in of if record.state is SeatState.ACTIVE],
                "seats": [record.seat for record in of],
            }
            for group, of in sorted(groups.items())
        ],
    }
