"""A schedule by somebody who knows the future: beam search, compiled. What it finds is feasible, not always the best.

A node is a set of visits that are planned already: per slot when it is free again, per seat the first request that is
not served yet and when it can come back. It is ranked by its cost plus the least that the rest can cost according to
the prices of the dual problem (``lagrangian``), which is what makes a narrow beam good. The slot that is free first
gets the next visit; a visit may close before any later request of its seat, or stay for it. Nodes lie in buckets of
time and only the best of a bucket go on.
"""

import numpy as np
from numpy.typing import NDArray

from kybernate.lab.simulate.compiled import compiled
from kybernate.lab.simulate.lagrangian import MISSES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Floats2 = NDArray[np.float64]
Counts = NDArray[np.int32]
Table = NDArray[np.float32]


@compiled
def sort_by(rank: Floats, ids: Ints, count: int) -> None:
    """The first ``count`` ids in order of their rank, in place (Shell sort: short, and compiled in no time)."""
    gap = count // 2
    while gap > 0:
        for place in range(gap, count):
            moved = ids[place]
            hole = place
            while hole >= gap and rank[ids[hole - gap]] > rank[moved]:
                ids[hole] = ids[hole - gap]
                hole -= gap
            ids[hole] = moved
        gap //= 2


@compiled
def best_distinct(rank: Floats, following: Counts, ids: Ints, count: int, width: int, limit: float) -> int:
    """Move the best nodes to the front of ``ids``, each with requests served that no better one has; gives how many."""
    sort_by(rank, ids, count)
    taken = 0
    for place in range(count):
        node = ids[place]
        if taken == width or rank[node] >= limit:
            break
        distinct = True
        for other in range(taken):
            same = True
            for i in range(following.shape[1]):
                if following[ids[other], i] != following[node, i]:
                    same = False
                    break
            if same:
                distinct = False
                break
        if distinct:
            ids[place], ids[taken] = ids[taken], node
            taken += 1
    return taken


@compiled
def least_to_come(
    node: int,
    i: int,  # the seat of the new visit; -1: none
    upto: int,
    ends: float,
    slot: int,
    free: Floats2,
    back: Floats2,
    following: Counts,
    rest: Table,
    rest_row: Ints,
    paid: Floats,
    coarse: float,
) -> tuple[float, float]:
    """What the rest costs at least after one more visit of a node, and when a slot is free then."""
    last = paid.shape[0] - 1
    soonest, rank = ends, 0.0
    for other in range(free.shape[1]):
        at = ends if other == slot else free[node, other]
        soonest = min(soonest, at)
        rank -= paid[last] - paid[min(last, int(at / coarse))]
    for j in range(following.shape[1]):
        if j == i:
            rank += rest[rest_row[j] + upto, min(last, int(max(soonest, ends) / coarse))]
        else:
            rank += rest[rest_row[j] + following[node, j], min(last, int(max(soonest, back[node, j]) / coarse))]
    return rank, soonest


@compiled
def search(
    at: Floats,  # arrivals, seat after seat
    service: Floats,
    sums: Floats,  # of arrival times before each request, seat after seat, one more than requests per seat
    first: Ints,  # [seat]: where its requests begin
    counts: Ints,
    park: Floats,
    restore: Floats,
    slo: Floats,
    home: Ints,  # [seat]: its group
    slot_group: Ints,  # [slot]
    move: float,
    rest: Table,  # [row of (seat, k), coarse cell]: least cost to go of one seat
    rest_row: Ints,  # [seat]
    paid: Floats,  # [coarse cell]: prices before it
    coarse: float,  # seconds
    objective: int,
    reactive: bool,
    width: int,
    bucket: float,  # seconds
    buckets: int,
    closings: int,  # most ways to end one visit
    linger: float,  # longest idle wait for a next request, seconds
    best: float,  # cost of a known schedule; what is not better is dropped
    plan_seat: Ints,  # out: visits of the best schedule, last one first
    plan_slot: Ints,
    plan_begin: Floats,
    plan_upto: Ints,
) -> tuple[float, int]:
    """Cost of the best schedule and its number of visits; (``best``, 0) when none is better."""
    seats, slots = counts.shape[0], slot_group.shape[0]
    room = 2 * width
    pool = buckets * room // 4 + 8 * room
    rank, cost_so_far, parent = np.zeros(pool), np.zeros(pool), np.full(pool, -1)
    free, back = np.zeros((pool, slots)), np.zeros((pool, seats))
    following, where = np.zeros((pool, seats), dtype=np.int32), np.zeros((pool, seats), dtype=np.int32)
    visit = np.zeros((pool, 4))
    spare, spares = np.arange(pool), pool
    held, worst = np.zeros(buckets, dtype=np.int64), np.full(buckets, np.inf)
    lists = np.zeros((buckets, room), dtype=np.int64)
    # Expanded nodes: how they came about.
    kept, capacity = 0, (buckets + 50) * width
    kept_parent, kept_visit = np.zeros(capacity, dtype=np.int64), np.zeros((capacity, 4))
    last_parent, last_visit = -1, np.zeros(4)
    ids = np.zeros(width + room, dtype=np.int64)

    spares -= 1
    root = spare[spares]
    for i in range(seats):
        where[root, i] = home[i]
    visit[root, 0] = -1.0
    lists[0, 0] = root
    held[0] = 1
    b = 0
    while b < buckets:
        number = held[b]
        if number == 0:
            b += 1
            continue
        for place in range(number):
            ids[place] = lists[b, place]
        held[b] = 0
        worst[b] = np.inf
        taken = best_distinct(rank, following, ids, number, width, best)
        if kept + taken > capacity:
            break
        for place in range(taken, number):
            spare[spares] = ids[place]
            spares += 1
        for place in range(taken):
            node = ids[place]
            kept_parent[kept] = parent[node]
            for part in range(4):
                kept_visit[kept, part] = visit[node, part]
            slot, later, unserved = 0, np.inf, 0
            for other in range(1, slots):
                if free[node, other] < free[node, slot]:
                    slot = other
            now, group = free[node, slot], slot_group[slot]
            for other in range(slots):
                if free[node, other] > now:
                    later = min(later, free[node, other])
            for i in range(seats):
                unserved += counts[i] - following[node, i]
            for i in range(-1, seats):
                k, upto, begin, gone, cost = 0, 0, now, later, cost_so_far[node]
                if i < 0:
                    if later == np.inf:
                        continue  # else: the slot stays empty until another is free
                else:
                    k = following[node, i]
                    if k == counts[i]:
                        continue
                    base, sum_base = first[i], first[i] + i
                    takes = restore[i] + (move if where[node, i] != group else 0.0)
                    begin = max(now, back[node, i], at[base + k] - (0.0 if reactive else takes))
                    opens = begin + takes
                    upto, gone = k, opens
                    while upto < counts[i] and at[base + upto] <= opens + 1e-9:
                        gone = max(gone, opens + service[base + upto])
                        if objective == MISSES and opens - at[base + upto] > slo[i] + 1e-6:
                            cost += 1.0
                        upto += 1
                    if objective != MISSES:
                        cost += max(0.0, (upto - k) * opens - (sums[sum_base + upto] - sums[sum_base + k]))
                for _ in range(closings):
                    if cost >= best:
                        break
                    ends = gone + (park[i] if i >= 0 else 0.0)
                    come, soonest = least_to_come(
                        node, i, upto, ends, slot, free, back, following, rest, rest_row, paid, coarse
                    )
                    to = max(b, min(buckets - 1, int(soonest / bucket)))
                    if i >= 0 and upto - k == unserved:
                        best, last_parent = cost, kept
                        last_visit[0], last_visit[1], last_visit[2], last_visit[3] = i, slot, begin, upto
                    elif cost + come < best and cost + come < worst[to]:
                        if held[to] == room:
                            for p in range(room):
                                ids[p + taken] = lists[to, p]
                            sort_by(rank, ids[taken : taken + room], room)
                            for p in range(room):
                                if p < width:
                                    lists[to, p] = ids[taken + p]
                                else:
                                    spare[spares] = ids[taken + p]
                                    spares += 1
                            held[to] = width
                            worst[to] = rank[lists[to, width - 1]]
                        if spares == 0 or cost + come >= worst[to]:
                            break
                        spares -= 1
                        child = spare[spares]
                        lists[to, held[to]] = child
                        held[to] += 1
                        rank[child], cost_so_far[child], parent[child] = cost + come, cost, kept
                        for other in range(slots):
                            free[child, other] = ends if other == slot else free[node, other]
                        for j in range(seats):
                            back[child, j] = ends if j == i else back[node, j]
                            following[child, j] = upto if j == i else following[node, j]
                            where[child, j] = group if j == i else where[node, j]
                        visit[child, 0], visit[child, 1] = i, slot
                        visit[child, 2], visit[child, 3] = begin, upto
                    if i < 0 or upto == counts[i] or at[first[i] + upto] > gone + linger:
                        break
                    gone = max(gone, at[first[i] + upto] + service[first[i] + upto])
                    upto += 1
            kept += 1
        for place in range(taken):
            spare[spares] = ids[place]
            spares += 1
    if last_parent < 0:
        return best, 0
    visits = 0
    node = -2  # the last visit, which is no node
    while True:
        v = last_visit if node == -2 else kept_visit[node]
        if v[0] >= 0:
            plan_seat[visits], plan_slot[visits] = int(v[0]), int(v[1])
            plan_begin[visits], plan_upto[visits] = v[2], int(v[3])
            visits += 1
        node = last_parent if node == -2 else kept_parent[node]
        if node < 0:
            break
    return best, visits
