"""A scenario cut into problems that are bounded alone, on a grid: what ``lagrangian`` computes with.

Groups that seats cannot leave are problems of their own; soft groups are one. What is left out makes the best schedule
only better, so a lower bound stays one: pins, gangs, memory of groups and of the host, the cost of moving, failures,
slower decoding of large batches. What must not happen in an outcome that is compared: freezing requests in flight.
"""

from dataclasses import dataclass

import numpy as np

from kybernate.lab.simulate.lagrangian import Floats, Ints
from kybernate.lab.simulate.model import Scenario


@dataclass(frozen=True, slots=True)
class Problem:
    """Seats that compete for the same slots."""

    seats: tuple[int, ...]
    """Indices into the scenario's seats; those without requests are left out."""
    requests: tuple[tuple[int, ...], ...]
    """Of each of these seats: indices into the scenario's requests, in order of time."""
    groups: tuple[int, ...]
    slots: int
    move_seconds: float | None


def split(scenario: Scenario) -> list[Problem]:
    """The problems of a scenario; requests of one never matter to another."""
    requests: list[list[int]] = [[] for _ in scenario.seats]
    for request, seat in enumerate(scenario.seat):
        requests[seat].append(request)
    soft = scenario.move_seconds is not None
    parts = [tuple(range(len(scenario.groups)))] if soft else [(group,) for group in range(len(scenario.groups))]
    problems = []
    for groups in parts:
        names = {scenario.groups[group].name for group in groups}
        seats = [i for i, seat in enumerate(scenario.seats) if seat.group in names and requests[i]]
        slots = sum(scenario.groups[group].slots for group in groups)
        if seats:
            wanted = tuple(tuple(requests[i]) for i in seats)
            problems.append(Problem(tuple(seats), wanted, groups, slots, scenario.move_seconds if soft else None))
    return problems


@dataclass(frozen=True, slots=True)
class SeatGrid:
    """One seat's requests and tables; the names are those of ``lagrangian``."""

    at: Floats
    service: Floats
    park: float
    restore: float
    slo: float
    reach: Ints
    greater: Ints
    until: Ints
    sums: Floats
    pending: Ints
    late: Ints
    opens: Floats
    first_row: Ints
    row_at: Ints
    row_low: Ints
    row_high: Ints
    open_at: Ints
    open_low: Ints
    open_high: Ints
    parked: Floats
    opened: Floats


def seat_grid(
    scenario: Scenario,
    seat: int,
    requests: tuple[int, ...],
    *,
    cell: float,
    cells: int,
    patience: float,
    reactive: bool,
) -> SeatGrid:
    """Tables for a grid of ``cells`` cells of ``cell`` seconds.

    ``patience``: requests older than so many seconds are bounded more coarsely. ``reactive``: a restore begins only
    when somebody waits for the seat.
    """
    spec = scenario.seats[seat]
    at = np.array([scenario.at[request] for request in requests])
    service = np.array([scenario.service[request] for request in requests])
    away = spec.activate_seconds + spec.park_seconds
    reach = np.floor((service + away) / cell).astype(np.int64)
    until = np.floor((at + service + spec.park_seconds) / cell).astype(np.int64)
    opens: Floats = np.arange(cells + 1, dtype=np.float64) * cell + spec.activate_seconds
    earliest = at if reactive else at - spec.activate_seconds
    row_low = np.clip(np.floor(earliest / cell), 0, cells).astype(np.int64)
    row_high = np.clip(np.floor((at + patience) / cell), row_low, cells).astype(np.int64)
    row_high = np.maximum.accumulate(row_high)
    row_at = np.concatenate([[0], np.cumsum(row_high - row_low + 1)]).astype(np.int64)
    before = np.concatenate([[0.0], at[:-1]])
    open_low = np.maximum(0, np.floor(before / cell) - 2).astype(np.int64)
    open_high = (np.floor(at / cell) + int(reach.max()) + 3).astype(np.int64)
    open_at = np.concatenate([[0], np.cumsum(open_high - open_low + 1)]).astype(np.int64)
    return SeatGrid(
        at=at,
        service=service,
        park=spec.park_seconds,
        restore=spec.activate_seconds,
        slo=spec.slo_seconds,
        reach=reach,
        greater=_next_greater(reach),
        until=until,
        sums=np.concatenate([[0.0], np.cumsum(at)]),
        pending=np.searchsorted(at, opens, side="left").astype(np.int64),
        late=np.searchsorted(at, opens - spec.slo_seconds, side="left").astype(np.int64),
        opens=opens,
        first_row=np.searchsorted(row_high, np.arange(cells + 1), side="left").astype(np.int64),
        row_at=row_at,
        row_low=row_low,
        row_high=row_high,
        open_at=open_at,
        open_low=open_low,
        open_high=open_high,
        parked=np.zeros(int(row_at[-1])),
        opened=np.zeros(int(open_at[-1])),
    )


def _next_greater(values: Ints) -> Ints:
    """Of each value: the next place with a higher one (the length when there is none)."""
    result = np.full(len(values), len(values), dtype=np.int64)
    open_places: list[int] = []
    for place, value in enumerate(values):
        while open_places and values[open_places[-1]] < value:
            result[open_places.pop()] = place
        open_places.append(place)
    return result
