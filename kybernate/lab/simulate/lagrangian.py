"""The price of the slot: what one seat would do if time on the slot had a price, solved exactly and compiled.

Relax "at most K seats at a time" with a price per second and grid cell. Then every seat is alone: it chooses its
visits so that the waiting of its requests and the price of the time it holds the slot are least. Whatever the prices
(none below zero), the sum over seats minus K times the sum of prices is at most what any schedule can reach: a lower
bound (weak duality).

Rounding keeps it one. A real visit that begins at b is mapped to the cell of b, so its cells are

    begin = floor(b / cell)       and       gone >= max(begin + reach_r, until_r) over the requests r that it serves
    reach_r = floor((restore + service_r + park) / cell)        until_r = floor((arrival_r + service_r + park) / cell)

both of which the real visit's end fulfils after rounding down; a later visit begins no earlier than the earlier one
was gone, also after rounding down; and since the cell begins no later than b, a request waits at least as long as
begin * cell + restore - arrival, in real seconds. So every real schedule has an image here that costs no more.

Tables of a seat, k being the first request that was not served yet:

    parked[k, t]   least cost from cell t on, parked; one row per k, a request that is older than ``patience`` is
                   bounded from below instead: it waits at least until t, the younger ones go on without it
    open[k, g]     the same while running, all before k admitted, gone at cell g if admission closes now; close, or
                   admit k when it comes (that costs no waiting)
"""

import numpy as np
from numpy.typing import NDArray

from kybernate.lab.simulate.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MISSES = 1
"""Objective: requests that wait longer than their seat's SLO. 0: seconds of waiting."""


@compiled
def served_cost(k: int, upto: int, t: int, opens: Floats, late: Ints, sums: Floats, objective: int) -> float:
    """What serving the waiting requests from k to before ``upto`` with a visit that begins in cell t costs."""
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
    """``open[k, gone]``."""
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
    """Fill the tables of one seat for these prices; its least cost."""
    count, end = at.shape[0], pending.shape[0] - 1
    for k in range(count - 1, -1, -1):
        base, low = row_at[k], row_low[k]
        longest, upto, holder = 0, k, k
        for r in range(k, min(k + cap, count)):
            if reach[r] > reach[holder]:
                holder = r
        for t in range(low, row_high[k] + 1):
            waits = pending[t]
            if waits <= k:  # it is active before the request comes
                gone = max(until[k], t + reach[k])
                parked[base + t - low] = open_cost(k + 1, gone, count, open_at, open_low, opened, paid) - paid[t]
                continue
            while upto < waits:
                longest = max(longest, reach[upto])
                upto += 1
            cost = open_cost(waits, t + longest, count, open_at, open_low, opened, paid)
            cost += served_cost(k, waits, t, opens, late, sums, objective)
            if waits - k > cap:
                # Some may be left behind: before one that would keep the seat longer than all before it does, since
                # others are served without holding the slot longer.
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
    """Which of more requests than fit a visit takes: (first one that it leaves behind, gone)."""
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
    """The visits behind ``solve_seat``'s cost; gives their number."""
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
    table: NDArray[np.float32],  # [k, coarse cell]: filled
) -> None:
    """``parked`` in every ``step``-th cell, for all k, as a dense table."""
    end = opens.shape[0] - 1
    for k in range(count):
        for column in range(table.shape[1]):
            t = min(column * step, end)
            table[k, column] = parked_cost(
                k, t, count, end, first_row, row_at, row_low, parked, opens, late, sums, objective
            )
