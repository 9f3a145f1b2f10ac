"""A schedule found with knowledge of the future: beam search, compiled. It is feasible, not always the best.

A node is a set of planned visits: per slot when it is free again, per seat the first request that is not served yet and
when the seat can be restored again. It is ranked by its cost plus the least that the rest can cost according to the
prices of the dual problem (``lagrangian``), which is what makes a narrow beam good. The slot that is free first gets
the next visit; a visit may close before any later request of its seat, or stay for it. Nodes lie in buckets of time,
and only the best of a bucket are expanded.

``search`` is one long function with one parameter per array on purpose: split into functions of named tuples it found
the same schedules two to four times slower (numba counts references to each array of a tuple in each call).
"""

from dataclasses import dataclass

import numpy as np

from kybernate.lab.bounds.lagrangian import MISSES, Relaxation, rest_rows
from kybernate.lab.bounds.problems import Planned, Problem
from kybernate.lab.compiled import Counts, Floats, Ints, Table, compiled
from kybernate.lab.simulate.model import Scenario

_COARSE_SECONDS = 0.5


@compiled
def sort_by(rank: Floats, ids: Ints, count: int) -> None:
    """Sort the first ``count`` ids by rank, in place (Shell sort: short, and quick to compile)."""
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
    """Move the best nodes to the front of ``ids``, each with a state that no better one has; return how many."""
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
    free: Floats,
    back: Floats,
    following: Counts,
    rest: Table,
    rest_row: Ints,
    paid: Floats,
    coarse: float,
) -> tuple[float, float]:
    """Return the least cost of the rest after one more visit of a node, and when a slot is then free."""
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
    best: float,  # cost of a known schedule; nodes that are not better are dropped
    plan_seat: Ints,  # out: visits of the best schedule, last one first
    plan_slot: Ints,
    plan_begin: Floats,
    plan_upto: Ints,
) -> tuple[float, int]:
    """Return the cost of the best schedule and its number of visits; (``best``, 0) when none is better."""
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
    # Expanded nodes: their parents and visits (seat, slot, begin, upto), from which the schedule is read back.
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


@dataclass(frozen=True, slots=True)
class Effort:
    """The width of a search and its choices."""

    width: int = 200
    bucket: float = 4.0
    """Seconds."""
    closings: int = 60
    """Most ways to end one visit."""
    linger: float = 40.0
    """Longest idle wait for a next request, seconds."""


class Beam:
    """Searches schedules of one problem, guided by prices."""

    def __init__(self, scenario: Scenario, problem: Problem, relaxation: Relaxation, prices: Floats) -> None:
        self.problem = problem
        self.objective = relaxation.objective
        seats = relaxation.seats
        relaxation.value(prices)
        step = max(1, round(_COARSE_SECONDS / relaxation.cell))
        self.coarse = step * relaxation.cell
        columns = relaxation.cells // step + 1
        self.counts: Ints = np.array([len(seat.at) for seat in seats], dtype=np.int64)
        self.rest_row: Ints = np.concatenate([[0], np.cumsum(self.counts + 1)[:-1]]).astype(np.int64)
        self.rest = np.zeros((int((self.counts + 1).sum()), columns), dtype=np.float32)
        for seat, row, count in zip(seats, self.rest_row, self.counts, strict=True):
            rest_rows(
                int(count), seat.sums, seat.late, seat.opens, seat.first_row, seat.row_at, seat.row_low, seat.parked,
                self.objective, step, self.rest[row : row + count],
            )  # fmt: skip
        self.paid: Floats = relaxation.paid(prices)[::step][:columns].copy()
        self.at = np.concatenate([seat.at for seat in seats])
        self.service = np.concatenate([seat.service for seat in seats])
        self.sums = np.concatenate([seat.sums for seat in seats])
        self.first: Ints = np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(np.int64)
        self.park, self.restore, self.slo = (
            np.array([getattr(seat, name) for seat in seats]) for name in ("park", "restore", "slo")
        )
        places = {scenario.groups[group].name: group for group in problem.groups}
        self.home: Ints = np.array([places[scenario.seats[i].group] for i in problem.seats], dtype=np.int64)
        self.slot_group: Ints = np.array(
            [group for group in problem.groups for _ in range(scenario.groups[group].slots)], dtype=np.int64
        )

    def search(self, effort: Effort, horizon: float, best: float, *, reactive: bool) -> tuple[float, list[Planned]]:
        """Return the cost of the best schedule found and its visits; no visits when none costs less than ``best``."""
        total = int(self.counts.sum())
        plan_seat, plan_slot, plan_upto = (np.zeros(total + 1, dtype=np.int64) for _ in range(3))
        plan_begin = np.zeros(total + 1)
        cost, visits = search(
            self.at, self.service, self.sums, self.first, self.counts, self.park, self.restore, self.slo,
            self.home, self.slot_group, self.problem.move_seconds or 0.0, self.rest, self.rest_row, self.paid,
            self.coarse, self.objective, reactive, effort.width, effort.bucket, int(horizon / effort.bucket) + 2,
            effort.closings, effort.linger, best, plan_seat, plan_slot, plan_begin, plan_upto,
        )  # fmt: skip
        plan = [
            Planned(
                self.problem.seats[plan_seat[v]], int(self.slot_group[plan_slot[v]]), float(plan_begin[v]),
                int(plan_upto[v]),
            )
            for v in range(visits - 1, -1, -1)
        ]  # fmt: skip
        return cost, plan
