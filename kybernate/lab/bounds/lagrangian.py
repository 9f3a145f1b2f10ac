"""The Lagrangian relaxation of a problem: each seat alone, with a price on slot time, solved exactly and compiled.

Relax "at most K seats at a time" with a price per second and grid cell. Then every seat is independent: it chooses its
visits so that the waiting of its requests plus the price of the time it holds the slot is least. For any prices (none
negative), the sum over seats minus K times the sum of prices is at most the cost of any schedule: a lower bound (weak
duality).

Rounding keeps it one. A real visit that begins at b is mapped to the cell of b, so its cells are

    begin = floor(b / cell)       and       gone >= max(begin + reach_r, until_r) over the requests r that it serves
    reach_r = floor((restore + service_r + park) / cell)        until_r = floor((arrival_r + service_r + park) / cell)

both of which the real visit's end fulfils after rounding down; a later visit begins no earlier than the earlier one
was gone, also after rounding down; and since the cell begins no later than b, a request waits at least as long as
begin * cell + restore - arrival, in real seconds. So every real schedule has an image here that costs no more.

Tables of a seat, k being the first request that is not served yet:

    parked[k, t]   least cost from cell t on, parked; one row per k. A request older than ``patience`` is bounded from
                   below instead: it waits at least until t, and the younger ones are counted without it
    opened[k, g]   the same while active, all before k admitted, gone at cell g if admission closes now; either close,
                   or admit k at its arrival (which costs no waiting)

The compiled functions take arrays as single parameters, named as the fields of ``SeatGrid``: as named tuples of arrays
they gave the same results two to five times slower: numba counts references to each array of a tuple in each call.
"""

from dataclasses import dataclass

import numpy as np

from kybernate.lab.bounds.problems import Problem
from kybernate.lab.compiled import Floats, Ints, Table, compiled
from kybernate.lab.simulate.model import Scenario

MISSES = 1
"""Objective: requests that wait longer than their seat's SLO. 0: seconds of waiting."""


@compiled
def served_cost(k: int, upto: int, t: int, opens: Floats, late: Ints, sums: Floats, objective: int) -> float:
    """Cost of serving the waiting requests from k to before ``upto`` with a visit that begins in cell t."""
    if objective == MISSES:
        return float(max(0, min(late[t], upto) - k))
    return float((upto - k) * opens[t] - (sums[upto] - sums[k]))


@compiled
def parked_cost(
    k: int,
    t: int,
    count: int,
    end: int,
    first_row: Ints,  # [t]: first k whose row reaches t
    row_at: Ints,  # [k]: where its row begins in ``parked``
    row_low: Ints,
    parked: Floats,
    opens: Floats,  # [t]: when a visit that begins in cell t is active, seconds
    late: Ints,  # [t]: requests that such a visit serves too late
    sums: Floats,
    objective: int,
) -> float:
    """``parked[k, t]`` for any k and t."""
    at = min(t, end)
    to = count if t >= end else max(k, first_row[at])
    cost = 0.0
    if to > k:
        cost = served_cost(k, to, at, opens, late, sums, objective)
    if t >= end and objective != MISSES:
        cost += (count - k) * (opens[1] - opens[0]) * (t - end)
    if to < count and t < end:
        cost += parked[row_at[to] + max(t, row_low[to]) - row_low[to]]
    return cost


@compiled
def open_cost(k: int, gone: int, count: int, row_at: Ints, row_low: Ints, opened: Floats, paid: Floats) -> float:
    """``opened[k, gone]`` for any k and gone."""
    if k == count:
        return float(paid[min(gone, paid.shape[0] - 1)])
    return float(opened[row_at[k] + max(gone, row_low[k]) - row_low[k]])


@compiled
def solve_seat(
    at: Floats,
    reach: Ints,
    greater: Ints,  # [r]: the next request whose reach is longer
    until: Ints,
    sums: Floats,  # of arrival times, sums[0] = 0
    pending: Ints,  # [t]: requests that wait when a visit that begins in cell t becomes active
    late: Ints,
    opens: Floats,
    paid: Floats,  # [t]: price of all cells before t
    first_row: Ints,
    row_at: Ints,
    row_low: Ints,
    row_high: Ints,
    open_at: Ints,
    open_low: Ints,
    open_high: Ints,
    parked: Floats,
    opened: Floats,
    objective: int,
    cap: int,
) -> float:
    """Fill the tables of one seat for these prices; return its least cost."""
    count, end = at.shape[0], pending.shape[0] - 1
    for k in range(count - 1, -1, -1):
        base, low = row_at[k], row_low[k]
        longest, upto, holder = 0, k, k
        for r in range(k, min(k + cap, count)):
            if reach[r] > reach[holder]:
                holder = r
        for t in range(low, row_high[k] + 1):
            waits = pending[t]
            if waits <= k:  # active before the request arrives
                gone = max(until[k], t + reach[k])
                parked[base + t - low] = open_cost(k + 1, gone, count, open_at, open_low, opened, paid) - paid[t]
                continue
            while upto < waits:
                longest = max(longest, reach[upto])
                upto += 1
            cost = open_cost(waits, t + longest, count, open_at, open_low, opened, paid)
            cost += served_cost(k, waits, t, opens, late, sums, objective)
            if waits - k > cap:
                # Some may be left for the next visit: the first of these would keep the seat longer than all before
                # it, since any other one is served without holding the slot longer.
                longer = holder
                j = greater[longer]
                while j < waits:
                    gone = t + reach[longer]
                    some = paid[min(gone, end)] + parked_cost(
                        j, gone, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
                    )
                    some += served_cost(k, j, t, opens, late, sums, objective)
                    cost = min(cost, some)
                    longer = j
                    j = greater[longer]
            parked[base + t - low] = cost - paid[t]
        last = base + row_high[k] - low
        parked[last] = min(parked[last], parked_cost(
            k, row_high[k] + 1, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
        ))  # fmt: skip
        for t in range(row_high[k] - 1, low - 1, -1):
            here = base + t - low
            parked[here] = min(parked[here], parked[here + 1])
        for gone in range(open_low[k], open_high[k] + 1):
            close = paid[min(gone, end)] + parked_cost(
                k, gone, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
            )
            admit = open_cost(k + 1, max(gone, until[k]), count, open_at, open_low, opened, paid)
            opened[open_at[k] + gone - open_low[k]] = min(close, admit)
    return parked_cost(0, 0, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective)


@compiled
def _left_behind(
    k: int,
    begin: int,
    waits: int,
    gone: int,
    cap: int,
    reach: Ints,
    greater: Ints,
    sums: Floats,
    late: Ints,
    opens: Floats,
    paid: Floats,
    first_row: Ints,
    row_at: Ints,
    row_low: Ints,
    open_at: Ints,
    open_low: Ints,
    parked: Floats,
    opened: Floats,
    objective: int,
    end: int,
) -> tuple[int, int]:
    """Which of more requests than fit a visit serves: (the first one left for the next visit, cell of its end)."""
    count = reach.shape[0]
    best = open_cost(waits, gone, count, open_at, open_low, opened, paid)
    best += served_cost(k, waits, begin, opens, late, sums, objective)
    upto, longer = waits, k
    for r in range(k, k + cap):
        if reach[r] > reach[longer]:
            longer = r
    j = greater[longer]
    while j < waits:
        leaves = begin + reach[longer]
        some = paid[min(leaves, end)] + parked_cost(
            j, leaves, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
        )
        some += served_cost(k, j, begin, opens, late, sums, objective)
        if some < best:
            best, upto, gone = some, j, leaves
        longer = j
        j = greater[longer]
    return upto, gone


@compiled
def trace_seat(
    reach: Ints,
    greater: Ints,  # [r]: the next request whose reach is longer
    until: Ints,
    sums: Floats,
    pending: Ints,
    late: Ints,
    opens: Floats,
    paid: Floats,
    first_row: Ints,
    row_at: Ints,
    row_low: Ints,
    row_high: Ints,
    open_at: Ints,
    open_low: Ints,
    parked: Floats,
    opened: Floats,
    usage: Floats,  # [t]: 1 is added in the cells that the best visits hold
    objective: int,
    cap: int,
) -> int:
    """Find the visits behind ``solve_seat``'s cost, add them to ``usage``; return their number."""
    count, end = reach.shape[0], pending.shape[0] - 1
    k, t, visits = 0, 0, 0
    while t < end:
        k = max(k, first_row[t])
        if k >= count:
            break
        base, begin = row_at[k] - row_low[k], max(t, row_low[k])
        while begin < row_high[k] and parked[base + begin + 1] <= parked[base + begin]:
            begin += 1
        if begin == row_high[k] and begin < end:
            beyond = parked_cost(
                k, begin + 1, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
            )
            if beyond <= parked[base + begin]:
                t = begin + 1
                continue
        upto = max(k + 1, pending[begin])
        gone = begin
        for r in range(k, upto):
            gone = max(gone, begin + reach[r])
        if pending[begin] <= k:
            gone = max(gone, until[k])
        elif upto - k > cap:
            upto, gone = _left_behind(
                k, begin, upto, gone, cap, reach, greater, sums, late, opens, paid, first_row, row_at, row_low, open_at,
                open_low, parked, opened, objective, end,
            )  # fmt: skip
        while upto < count:
            close = paid[min(gone, end)] + parked_cost(
                upto, gone, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
            )
            after = max(gone, until[upto])
            if close <= open_cost(upto + 1, after, count, open_at, open_low, opened, paid):
                break
            gone = after
            upto += 1
        for cell in range(begin, min(gone, end)):
            usage[cell] += 1.0
        visits += 1
        k, t = upto, max(gone, t + 1)
    return visits


@compiled
def rest_rows(
    count: int,
    sums: Floats,
    late: Ints,
    opens: Floats,
    first_row: Ints,
    row_at: Ints,
    row_low: Ints,
    parked: Floats,
    objective: int,
    step: int,
    table: Table,  # [k, coarse cell]: filled
) -> None:
    """Fill ``table`` with ``parked`` in every ``step``-th cell, for all k."""
    end = opens.shape[0] - 1
    for k in range(count):
        for column in range(table.shape[1]):
            t = min(column * step, end)
            table[k, column] = parked_cost(
                k, t, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
            )


@dataclass(frozen=True, slots=True)
class SeatGrid:
    """One seat's requests and tables on a grid of cells, the arguments of the compiled functions.

    Tables with rows of different lengths lie in one array: the row of k begins at ``*_at[k]`` and covers the cells from
    ``*_low[k]`` to ``*_high[k]``.
    """

    at: Floats
    """[request]: arrival, seconds."""
    service: Floats
    sums: Floats
    """Cumulated arrival times; ``sums[0]`` is 0."""
    park: float
    restore: float
    slo: float
    reach: Ints
    """[request]: cells from the beginning of a visit to its earliest end, if it serves this request."""
    greater: Ints
    """[request]: the next request with a longer reach; the number of requests if there is none."""
    until: Ints
    """[request]: the earliest cell in which a visit that serves this request can end."""
    opens: Floats
    """[cell]: when a visit that begins in this cell is active, seconds."""
    pending: Ints
    """[cell]: requests that have arrived when such a visit becomes active."""
    late: Ints
    """[cell]: requests that such a visit would serve later than their SLO."""
    first_row: Ints
    """[cell]: the first k whose row reaches this cell."""
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
    """Return the tables for a grid of ``cells`` cells of ``cell`` seconds, not filled yet.

    ``patience``: requests older than this many seconds are bounded more coarsely. ``reactive``: a restore begins only
    when a request waits for the seat.
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
    """For each value: the next place with a higher one (the length when there is none)."""
    result = np.full(len(values), len(values), dtype=np.int64)
    open_places: list[int] = []
    for place, value in enumerate(values):
        while open_places and values[open_places[-1]] < value:
            result[open_places.pop()] = place
        open_places.append(place)
    return result


class Relaxation:
    """A problem with prices instead of slots."""

    def __init__(
        self,
        scenario: Scenario,
        problem: Problem,
        *,
        cell: float,
        horizon: float,
        patience: float,
        objective: str = "wait",
        reactive: bool = False,
    ) -> None:
        self.cell = cell
        self.cells = max(2, int(np.ceil(horizon / cell)))
        self.slots = problem.slots
        self.reactive = reactive
        self.objective = MISSES if objective == "slo" else 0
        self.cap = scenario.cap
        self.seats: list[SeatGrid] = [
            seat_grid(
                scenario, seat, requests, cell=cell, cells=self.cells, patience=patience, reactive=reactive
            )
            for seat, requests in zip(problem.seats, problem.requests, strict=True)
        ]  # fmt: skip
        self.costs = [0.0] * len(self.seats)
        self.visits = [0] * len(self.seats)

    def paid(self, prices: Floats) -> Floats:
        """Return the price of all cells before each cell."""
        return np.concatenate([[0.0], np.cumsum(prices)])

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """Return the lower bound for these prices per cell (none negative), and how many seats then hold each cell."""
        paid = self.paid(prices)
        usage = np.zeros(self.cells)
        for index, s in enumerate(self.seats):
            self.costs[index] = solve_seat(
                s.at, s.reach, s.greater, s.until, s.sums, s.pending, s.late, s.opens, paid, s.first_row, s.row_at,
                s.row_low, s.row_high, s.open_at, s.open_low, s.open_high, s.parked, s.opened, self.objective, self.cap,
            )  # fmt: skip
            self.visits[index] = trace_seat(
                s.reach, s.greater, s.until, s.sums, s.pending, s.late, s.opens, paid, s.first_row, s.row_at, s.row_low,
                s.row_high, s.open_at, s.open_low, s.parked, s.opened, usage, self.objective, self.cap,
            )  # fmt: skip
        return sum(self.costs) - self.slots * float(paid[-1]), usage
