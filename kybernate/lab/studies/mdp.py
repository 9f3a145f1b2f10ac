"""A small switching problem solved exactly: the mean wait of the best causal policy that can exist.

The model: one slot; seats with Poisson arrivals; a visit serves everybody who waits for the seat at once (continuous
batching), service times are exponential; parking and restoring take Erlang-2 times; parking needs an empty seat, so
admission is closed and what is in flight ends first. Queues are cut at ``Case.limit`` waiting requests per seat (who
comes then is turned away); choose it well above the mean number that wait. Solved by relative value iteration; the
gain is known between two bounds (Odoni), and the iteration ends when they are ``tolerance`` apart. By Little's law
the mean wait is the mean number of waiting requests over the arrival rate.

A live policy is evaluated on the same model by asking it once in every state (``evaluate``). The model has no memory
of time, so ages and dwell times in the views are expectations given the state; ``mdp_view`` says which. Policies that
count seconds are better judged by the simulator on ``played``: the same arrivals and costs, event by event.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.lab.studies import mdp_view
from kybernate.lab.studies.mdp_kernel import Floats, Ints, sweep
from kybernate.policy.view import Policy

_CHECK_EVERY = 20
_MOST_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. Seconds and requests per second."""

    rates: tuple[float, ...]
    """Arrivals of each seat."""
    service: float = 5.0
    """Mean time that a request is in flight."""
    park: float = 3.5
    """Mean."""
    restore: float = 3.5
    limit: int = 11
    """Waiting requests per seat from which on arrivals are turned away."""

    @property
    def seats(self) -> int:
        """How many."""
        return len(self.rates)

    @property
    def arrivals(self) -> float:
        """Of all seats."""
        return sum(self.rates)

    @property
    def in_flight(self) -> int:
        """Most in flight that are told apart: all who waited and a few more."""
        return self.limit + max(4, round(2 * max(self.rates) * self.service))


def zipf(total: float, seats: int = 3) -> tuple[float, ...]:
    """Rates of seats whose popularity falls as 1, 1/2, 1/3 …"""
    scale = sum(1 / rank for rank in range(1, seats + 1))
    return tuple(total / rank / scale for rank in range(1, seats + 1))


@dataclass(frozen=True)
class Solution:
    """What came of it: a mean wait and what is done in every state."""

    case: Case
    mean_wait: float
    """Seconds from arrival to admission; the middle of the two bounds."""
    error: float
    """Half of their distance, seconds."""
    go: Ints
    """By code of the queues, when nobody holds the slot: -1 wait, else the seat to restore."""
    leave: Ints
    """[seat, in flight, code]: 1 where it closes admission (parks, when nothing is in flight)."""

    @cached_property
    def _states(self) -> "States":
        return States(self.case)

    def restores(self, waiting: tuple[int, ...]) -> int | None:
        """Whom it restores when the slot is empty; None: it waits."""
        seat = int(self.go[self._states.code(waiting)])
        return None if seat < 0 else seat

    def leaves(self, seat: int, in_flight: int, waiting: tuple[int, ...]) -> bool:
        """Whether this active seat closes admission now."""
        return bool(self.leave[seat, in_flight, self._states.code(waiting)])


class States:
    """Numbers of the states of a case."""

    def __init__(self, case: Case) -> None:
        radix = case.limit + 1
        self.case = case
        self.count = radix**case.seats
        self.strides: Ints = radix ** np.arange(case.seats, dtype=np.int64)
        self.digits: Ints = np.arange(self.count, dtype=np.int64)[:, None] // self.strides[None, :] % radix

    def code(self, waiting: tuple[int, ...]) -> int:
        """Of these queue lengths."""
        return int(np.dot(np.asarray(waiting, dtype=np.int64), self.strides))


def solve(case: Case, tolerance: float = 1e-3) -> Solution:
    """The best that any causal policy can do. ``tolerance`` is relative."""
    states = States(case)
    go = np.full(states.count, -1, dtype=np.int64)
    leave = np.zeros((case.seats, case.in_flight + 1, states.count), dtype=np.int64)
    return _iterate(states, go, leave, choose=True, tolerance=tolerance)


def evaluate(
    case: Case, policy: Policy, tolerance: float = 1e-3, absence: float | None = None, slo_seconds: float = 20.0
) -> Solution:
    """The mean wait of a policy that is asked once per state. ``absence``: see ``mdp_view.Stationary``."""
    states = States(case)
    view = mdp_view.Stationary(case, 2 * (case.park + case.restore) if absence is None else absence, slo_seconds)
    go = np.full(states.count, -1, dtype=np.int64)
    leave = np.zeros((case.seats, case.in_flight + 1, states.count), dtype=np.int64)
    for code, digits in enumerate(states.digits):
        waiting = tuple(int(count) for count in digits)
        go[code] = view.restores(policy, waiting)
        for seat in range(case.seats):
            if waiting[seat] == 0:
                for in_flight in range(case.in_flight + 1):
                    leave[seat, in_flight, code] = view.leaves(policy, seat, in_flight, waiting)
    return _iterate(states, go, leave, choose=False, tolerance=tolerance)


def ratio(case: Case, policy: Policy, optimum: Solution | None = None, tolerance: float = 1e-3) -> float:
    """Mean wait of the policy over the best possible; views assume the optimum's absences."""
    best = optimum or solve(case, tolerance)
    return evaluate(case, policy, tolerance, absence=2 * best.mean_wait).mean_wait / best.mean_wait


def played(case: Case, requests: int, seed: int) -> Scenario:
    """Arrivals of a case for the simulator, without a limit of queues; with ``jitter`` 0.71 its costs vary as here."""
    chance = random.Random(seed)
    at, seat, service, now = list[float](), list[int](), list[float](), 0.0
    for _ in range(requests):
        now += chance.expovariate(case.arrivals)
        at.append(now)
        seat.append(chance.choices(range(case.seats), case.rates)[0])
        service.append(chance.expovariate(1 / case.service))
    seats = tuple(SimSeat(mdp_view.name(i), mdp_view.GROUP, case.park, case.restore) for i in range(case.seats))
    return Scenario(
        "mdp", seats, (SimGroup(mdp_view.GROUP),), tuple(at), tuple(seat), tuple(service), now, cap=requests
    )


def _iterate(states: States, go: Ints, leave: Ints, *, choose: bool, tolerance: float) -> Solution:
    case = states.case
    rates = np.asarray(case.rates)
    ends, parks, restores = (np.full(case.seats, rate) for rate in (1 / case.service, 2 / case.park, 2 / case.restore))
    fastest = max(case.in_flight / case.service, 2 / case.park, 2 / case.restore)
    uniform = case.arrivals + fastest * 1.01
    values, following = _values(states), _values(states)
    low, high = -np.inf, np.inf
    for step in range(_MOST_STEPS):
        growth = sweep(
            rates, ends, parks, restores, states.digits, states.strides, case.limit, uniform, choose, go, leave,
            *values, *following,
        )  # fmt: skip
        values, following = following, values
        low, high = growth[0] * uniform, growth[1] * uniform
        if high - low <= 2 * tolerance * max(low, 1e-9):
            break
        if step % _CHECK_EVERY == 0:  # keep the numbers small: only differences between states mean anything
            base = float(values[0][0])
            for part in values:
                part -= base
    return Solution(case, (low + high) / 2 / case.arrivals, (high - low) / 2 / case.arrivals, go, leave)


def _values(states: States) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    seats, most, codes = states.case.seats, states.case.in_flight + 1, states.count
    shapes: tuple[tuple[int, ...], ...] = ((codes,), (seats, most, codes), (seats, most, codes))
    stages = (seats, 2, codes)
    empty, active, drain = (np.zeros(shape) for shape in shapes)
    return empty, active, drain, np.zeros(stages), np.zeros(stages)
