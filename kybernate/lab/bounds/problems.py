"""A scenario cut into problems that are bounded separately, and the exact cost of a schedule that a search has planned.

Pure.

Groups that seats cannot leave are separate problems; groups between which seats move are one. What is left out makes
the best schedule only better, so a lower bound stays one: pins, memory of groups and of the host, the cost of
moving, failures, slower decoding of large batches. Outcomes with frozen requests must not be compared with the bounds.

``replay`` is independent of the search that made the plan: slots, drains, moves, the cap and the order of requests are
checked here again, request by request in plain Python; a plan that cannot be kept to the second is kept as early as the
rules allow.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kybernate.lab.simulate.model import Scenario, Visit


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
class Planned:
    """One visit of a schedule."""

    seat: int
    """Index into the scenario's seats."""
    group: int
    begun: float
    upto: int
    """It serves the seat's requests that were not served yet, before this one (counted per seat)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A feasible schedule and the wait of every request, seconds (columns as in the scenario)."""

    wait: tuple[float, ...]
    visits: tuple[Visit, ...]


def cost(scenario: Scenario, wait: Sequence[float], requests: Iterable[int], objective: str) -> float:
    """Seconds of waiting of these requests, or how many of them wait longer than their seat's SLO."""
    if objective == "wait":
        return sum(wait[request] for request in requests)
    slos = [seat.slo_seconds + 1e-6 for seat in scenario.seats]
    return float(sum(wait[request] > slos[scenario.seat[request]] for request in requests))


def replay(
    scenario: Scenario, plan: Sequence[Planned], *, seats: Sequence[int] | None = None, reactive: bool = False
) -> Schedule:
    """What happens when these visits are made in order of their beginnings.

    ``seats``: only these have a plan (None: all); the others' requests wait 0 s. Raises ValueError when the plan leaves
    requests unserved.
    """
    requests: list[list[int]] = [[] for _ in scenario.seats]
    for request, index in enumerate(scenario.seat):
        requests[index].append(request)
    names = [group.name for group in scenario.groups]
    free = [[0.0] * group.slots for group in scenario.groups]
    back = [0.0] * len(scenario.seats)
    place = [names.index(seat.group) for seat in scenario.seats]
    served = [0] * len(scenario.seats)
    wait = [0.0] * len(scenario.at)
    visits: list[Visit] = []
    for step in sorted(plan, key=lambda planned: planned.begun):
        seat, own, k = scenario.seats[step.seat], requests[step.seat], served[step.seat]
        if k == len(own):
            continue
        begun = max(step.begun, free[step.group][0], back[step.seat])
        if reactive:
            begun = max(begun, scenario.at[own[k]])
        moved = place[step.seat] != step.group
        active = begun + seat.activate_seconds + ((scenario.move_seconds or 0.0) if moved else 0.0)
        ends: list[float] = []
        gone, upto = active, max(k, step.upto)
        while upto < len(own) and scenario.at[own[upto]] <= active:
            upto += 1  # admitted on activation, planned or not
        for request in own[k:upto]:
            admitted = max(active, scenario.at[request])
            while ends and (len(ends) >= scenario.cap or ends[0] <= admitted):
                admitted = max(admitted, heapq.heappop(ends))
            heapq.heappush(ends, admitted + scenario.service[request])
            wait[request] = max(0.0, admitted - scenario.at[request])
            gone = max(gone, admitted + scenario.service[request])
        closed = gone if upto == len(own) else max(active, min(gone, scenario.at[own[upto]]))
        visits.append(
            Visit(step.seat, names[step.group], begun, active, closed, gone + seat.park_seconds, upto - k, moved)
        )
        heapq.heapreplace(free[step.group], gone + seat.park_seconds)
        back[step.seat], place[step.seat], served[step.seat] = gone + seat.park_seconds, step.group, upto
    left = sum(len(requests[i]) - served[i] for i in (range(len(served)) if seats is None else seats))
    if left:
        raise ValueError(f"scenario {scenario.name}: the plan leaves {left} requests unserved")
    return Schedule(tuple(wait), tuple(visits))
