"""The node on which a trace is played: what parking and activating a seat costs, and which seats its groups have. Pure.

Costs come from a table of hardware, from measurements, or are given in seconds; seats follow from the models of a trace
and the few figures of a ``Node``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from kybernate.lab.simulate.generate import service_seconds
from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.lab.traces import Arrival

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to park and to activate one seat, by how much VRAM it holds."""

    name: str
    out_bytes_per_second: float
    in_bytes_per_second: float
    fixed_seconds: float
    """Part of each that does not depend on size."""
    source: str
    activate_fixed_seconds: float | None = None
    """Of activating, where it differs."""

    @property
    def apart_seconds(self) -> float:
        """What of each copies nothing; seconds that were given whole count as copied."""
        return 0.0 if self.out_bytes_per_second == float("inf") else self.fixed_seconds

    def park_seconds(self, vram_bytes: int) -> float:
        """VRAM out to host memory."""
        return self.fixed_seconds + vram_bytes / self.out_bytes_per_second

    def activate_seconds(self, vram_bytes: int) -> float:
        """And back."""
        fixed = self.fixed_seconds if self.activate_fixed_seconds is None else self.activate_fixed_seconds
        return fixed + vram_bytes / self.in_bytes_per_second


HARDWARE: dict[str, Cost] = {
    cost.name: cost
    for cost in (
        Cost("stock-slow", 2 * GB, 5 * GB, 1.0, "cuda-checkpoint as it comes, pessimistic: 2 GB/s out, 5 GB/s in"),
        Cost("stock", 4 * GB, 7 * GB, 1.0, "cuda-checkpoint as it comes: 4 GB/s out, 7 GB/s in"),
        Cost("fast", 12 * GB, 12 * GB, 0.5, "half of PCIe 4.0 x16, both ways"),
        Cost("pinned", 48 * GB, 48 * GB, 0.5, "pinned host memory over PCIe 5.0 x16"),
    )
}
"""By name, slowest first. Assumptions until measured on the machine in question: ``kyb doctor`` and the checkpointer's
learned seconds are the facts."""


def parse_cost(text: str) -> Cost:
    """A cost as people write it: a name of ``HARDWARE``, ``4/7`` (GB/s out/in, plus 1 s each), or ``2.5s/3s`` (seconds
    to park and to activate, whatever the size). Raises ValueError with what to write instead.
    """
    if text in HARDWARE:
        return HARDWARE[text]
    seconds = text.endswith("s") and "s/" in text
    parts = [part.removesuffix("s") if seconds else part for part in text.split("/")]
    try:
        first, second = (float(part) for part in parts)
    except ValueError:
        first = second = -1.0
    if first < 0 or second < 0 or (not seconds and min(first, second) == 0):
        raise ValueError(
            f"cost {text!r} is neither a name ({', '.join(HARDWARE)}) nor GB/s out/in like 4/7 nor seconds to "
            f"park/activate like 2.5s/3s"
        )
    if seconds:
        return Cost(text, float("inf"), float("inf"), first, "as given", activate_fixed_seconds=second)
    return Cost(text, first * GB, second * GB, 1.0, "as given")


def fitted_cost(rows: Sequence[tuple[int, float, float]], name: str = "measured") -> Cost:
    """The cost that fits (vram_bytes, park_seconds, activate_seconds) best, by least squares through a common fixed
    part. Needs at least one row; with one size alone all of it counts as proportional. Raises ValueError.
    """
    if not rows:
        raise ValueError("no measured seat with VRAM, park and activate seconds; park and activate one first")
    fixed = min(max(0.0, (_intercept(rows, 1) + _intercept(rows, 2)) / 2), min(min(row[1], row[2]) for row in rows))
    speeds = []
    for column in (1, 2):
        moved = sum(row[column] - fixed for row in rows)
        speeds.append(sum(row[0] for row in rows) / moved if moved > 0 else float("inf"))
    return Cost(name, speeds[0], speeds[1], fixed, f"fitted to {len(rows)} measured seats")


def measured_costs(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Rows for ``fitted_cost`` from seats of the GPU manager's ledger: what parking and activating them took there."""
    found = []
    for record in records:
        row = (record.get("vram_bytes"), record.get("park_seconds"), record.get("activate_seconds"))
        if all(isinstance(value, int | float) and value > 0 for value in row):
            found.append((int(row[0] or 0), float(row[1] or 0), float(row[2] or 0)))
    return found


def _intercept(rows: Sequence[tuple[int, float, float]], column: int) -> float:
    """Where the least-squares line meets no VRAM; 0 when all seats are equally large."""
    count = len(rows)
    mean_x = sum(row[0] for row in rows) / count
    mean_y = sum(row[column] for row in rows) / count
    spread = sum((row[0] - mean_x) ** 2 for row in rows)
    if spread == 0:
        return 0.0
    return mean_y - sum((row[0] - mean_x) * (row[column] - mean_y) for row in rows) / spread * mean_x


VRAM_GB = (36, 28, 20, 34, 60, 24, 20, 44, 28, 20)
"""Sizes of seats of which nothing is known, in order, again from the first after the last. The prototype study
(docs/dev/policy.md) had 20 to 60 GB and 6 to 7 s per switch; with these sizes its rows for S1 come out alike."""


@dataclass(frozen=True, slots=True)
class Node:
    """Where a trace is played."""

    groups: int = 1
    slots: int = 1
    memory_bytes: int = 0
    """Of a group: as many of its seats are active together as fit, at most ``slots`` where that is above 1. 0: only
    ``slots`` count."""
    seats: int = 64
    """At most; the models with most work get one, requests for others are left out (and counted)."""
    cost: Cost = HARDWARE["stock"]
    vram_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a model, or under ``""`` of all others; else ``VRAM_GB``."""
    kv_bytes: int = 0
    """KV cache of one request in flight: beside ``vram_bytes`` a seat has room for ``cap`` of them, which it holds and
    moves whether they are used or not."""
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(park, activate) seconds of a model, known from the machine: they go before ``cost``."""
    tiers: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)
    """(tier, weight, SLO seconds) of a model, or under ``""`` of all others."""
    pinned: frozenset[str] = frozenset()
    cap: int = 64
    move_seconds: float | None = None
    host_bytes: int = 0
    lanes: int = 0


def from_arrivals(
    arrivals: Iterable[Arrival],
    node: Node,
    *,
    models: Sequence[str] = (),
    speed_up: float = 1.0,
    name: str = "trace",
    duration: float | None = None,
    source: str = "",
) -> Scenario:
    """A trace on a node: one seat per model, the heaviest first, each on the group with least work so far.

    ``models``: of the trace only these, in this order. ``speed_up`` 2 makes the gaps half as long. ``duration`` of the
    trace, before it is sped up; default: up to its last request. A request's service time follows from its tokens.
    """
    only = frozenset(models)
    rows = [row for row in arrivals if not only or row.model in only]
    work: dict[str, float] = {}
    for row in rows:
        work[row.model] = work.get(row.model, 0.0) + service_seconds(row.prompt_tokens, row.output_tokens)
    wanted = tuple(models) or tuple(sorted(work, key=lambda model: (-work[model], model)))
    place = {model: index for index, model in enumerate(wanted[: node.seats])}
    kept = [row for row in rows if row.model in place]
    at = tuple(row.at_seconds / speed_up for row in kept)
    end = at[-1] if at else 0.0
    return Scenario(
        name=name,
        seats=node_seats(tuple(place), work, node),
        groups=node_groups(node, len(place)),
        at=at,
        seat=tuple(place[row.model] for row in kept),
        service=tuple(service_seconds(row.prompt_tokens, row.output_tokens) for row in kept),
        duration=end if duration is None else duration / speed_up,
        cap=node.cap,
        move_seconds=node.move_seconds,
        host_bytes=node.host_bytes,
        lanes=node.lanes,
        source=source
        + (f"; {len(rows) - len(kept)} requests of other models left out" if len(kept) < len(rows) else ""),
    )


def on_node(scenario: Scenario, node: Node) -> Scenario:
    """The same requests on another node: all seats are made anew from what the node says."""
    work = dict.fromkeys((seat.name for seat in scenario.seats), 0.0)
    for seat, service in zip(scenario.seat, scenario.service, strict=True):
        work[scenario.seats[seat].name] += service
    return replace(
        scenario,
        seats=node_seats(tuple(work), work, node),
        groups=node_groups(node, len(work)),
        cap=node.cap,
        move_seconds=node.move_seconds,
        host_bytes=node.host_bytes,
        lanes=node.lanes,
    )


def node_groups(node: Node, seats: int) -> tuple[SimGroup, ...]:
    """The node's groups for so many seats."""
    slots = max(1, seats) if node.memory_bytes and node.slots == 1 else node.slots
    return tuple(SimGroup(f"G{index}", slots, node.memory_bytes) for index in range(node.groups))


def node_seats(models: Sequence[str], work: Mapping[str, float], node: Node) -> tuple[SimSeat, ...]:
    """Seats for these models with what the node says of each, spread over its groups."""
    loads = [0.0] * node.groups
    group_of: dict[str, int] = {}
    for model in sorted(models, key=lambda model: -work.get(model, 0.0)):
        group_of[model] = min(range(node.groups), key=lambda index: (loads[index], index))
        loads[group_of[model]] += max(work.get(model, 0.0), 1e-9)
    made = []
    for seat in sized_seats(models, node.cost, node.vram_bytes, node.cap * node.kv_bytes):
        if seat.model in node.measured:
            park, activate = node.measured[seat.model]
            seat = replace(seat, park_seconds=park, activate_seconds=activate)
        tier = node.tiers.get(seat.model, node.tiers.get(""))
        if tier is not None:
            seat = replace(seat, tier=tier[0], weight=tier[1], slo_seconds=tier[2])
        made.append(replace(seat, group=f"G{group_of[seat.model]}", pinned=seat.model in node.pinned))
    return tuple(made)


def sized_seats(
    models: Sequence[str], cost: Cost, vram_bytes: Mapping[str, int] | None = None, kv_bytes: int = 0
) -> tuple[SimSeat, ...]:
    """One seat per model on group G0, of the size given for it or the next of ``VRAM_GB``, and its KV cache."""
    known = vram_bytes or {}
    made = []
    for model, usual in zip(models, cycle(VRAM_GB), strict=False):
        vram = known.get(model, known.get("", usual * GB)) + kv_bytes
        park, activate = cost.park_seconds(vram), cost.activate_seconds(vram)
        fixed = cost.apart_seconds
        made.append(SimSeat(model, "G0", park, activate, fixed, vram_bytes=vram, host_bytes=vram, model=model))
    return tuple(made)


def by_requests(arrivals: Iterable[Arrival]) -> tuple[str, ...]:
    """Models by number of requests, most first."""
    counts: dict[str, int] = {}
    for arrival in arrivals:
        counts[arrival.model] = counts.get(arrival.model, 0) + 1
    return tuple(sorted(counts, key=lambda model: (-counts[model], model)))
