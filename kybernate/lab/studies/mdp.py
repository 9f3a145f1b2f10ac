"""A small switching problem solved exactly: the mean wait of the best causal policy that can exist.

The model: one slot; seats with Poisson arrivals; a visit serves all requests that wait for the seat at once (continuous
batching), service times are exponential; parking and restoring take Erlang-2 times; parking needs an empty seat, so
admission is closed and the requests in flight end first. Queues are cut at ``WaitCase.limit`` waiting requests per seat
(further arrivals are rejected); choose it well above the mean number of waiting requests. Solved by relative value
iteration; the gain is known between two bounds (Odoni), and the iteration ends when they are ``tolerance`` apart. By
Little's law the mean wait is the mean number of waiting requests over the arrival rate.

A live policy is evaluated on the same model by one decision per state (``evaluate``). The model has no memory of time,
so ages and dwell times in the views are expectations given the state (``Stationary``). Policies that count seconds are
better judged by the simulator on ``played``: the same arrivals and costs, event by event.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kybernate.lab.compiled import Floats, Ints, compiled
from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.policy.view import Decision, GroupView, Park, Policy, SeatView, Stay, Switch
from kybernate.seat import SeatState


@compiled
def sweep(
    rates: Floats,  # per seat: arrivals per second
    ends: Floats,  # per seat: ends per second and request in flight
    parks: Floats,  # per seat: stages of parking per second
    restores: Floats,
    digits: Ints,  # [x, seat]: waiting
    strides: Ints,
    limit: int,  # most that wait per seat
    uniform: float,  # steps per second, at least the fastest state's
    choose: bool,  # take the best action and write it down; else obey
    go: Ints,  # [x]: -1 leave the slot empty, j restore it
    leave: Ints,  # [i, n, x]: 1 close admission (park when nothing is in flight)
    empty: Floats,
    active: Floats,
    drain: Floats,
    park: Floats,
    restore: Floats,
    empty_next: Floats,
    active_next: Floats,
    drain_next: Floats,
    park_next: Floats,
    restore_next: Floats,
) -> tuple[float, float]:
    """Fill ``*_next``; returns the lowest and highest growth of a value, per step."""
    seats = rates.shape[0]
    most = active.shape[1] - 1
    low, high = np.inf, -np.inf
    for x in range(digits.shape[0]):
        cost = 0.0
        arrivals = 0.0
        for j in range(seats):
            cost += digits[x, j]
            arrivals += rates[j]
        cost /= uniform
        for i in range(seats):
            for stage in range(2):
                # parking: no request is served
                value = cost + (1.0 - (arrivals + parks[i]) / uniform) * park[i, stage, x]
                after = park[i, 1, x] if stage == 0 else empty[x]
                value += parks[i] / uniform * after
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * park[i, stage, to]
                park_next[i, stage, x] = value
                low, high = min(low, value - park[i, stage, x]), max(high, value - park[i, stage, x])
                # restoring: ends with all waiting requests of the seat in flight
                value = cost + (1.0 - (arrivals + restores[i]) / uniform) * restore[i, stage, x]
                served = x - digits[x, i] * strides[i]
                after = restore[i, 1, x] if stage == 0 else active[i, digits[x, i], served]
                value += restores[i] / uniform * after
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * restore[i, stage, to]
                restore_next[i, stage, x] = value
                low, high = min(low, value - restore[i, stage, x]), max(high, value - restore[i, stage, x])
            for n in range(1, most + 1):
                ending = n * ends[i]
                value = cost + (1.0 - (arrivals + ending) / uniform) * drain[i, n, x]
                value += ending / uniform * (drain[i, n - 1, x] if n > 1 else park[i, 0, x])
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * drain[i, n, to]
                drain_next[i, n, x] = value
                low, high = min(low, value - drain[i, n, x]), max(high, value - drain[i, n, x])
            if digits[x, i] > 0:
                continue
            for n in range(most + 1):
                ending = n * ends[i]
                value = cost + (1.0 - (arrivals + ending) / uniform) * active[i, n, x]
                if n > 0:
                    value += ending / uniform * active[i, n - 1, x]
                for j in range(seats):
                    if j == i:
                        value += rates[j] / uniform * active[i, min(n + 1, most), x]
                    else:
                        to = x + strides[j] if digits[x, j] < limit else x
                        value += rates[j] / uniform * active[i, n, to]
                gone = drain_next[i, n, x] if n > 0 else park_next[i, 0, x]
                if choose:
                    leave[i, n, x] = 1 if gone < value else 0
                if leave[i, n, x] == 1:
                    value = gone
                active_next[i, n, x] = value
                low, high = min(low, value - active[i, n, x]), max(high, value - active[i, n, x])
        value = cost + (1.0 - arrivals / uniform) * empty[x]
        for j in range(seats):
            to = x + strides[j] if digits[x, j] < limit else x
            value += rates[j] / uniform * empty[to]
        if choose:
            go[x] = -1
            for j in range(seats):
                if restore_next[j, 0, x] < value:
                    value = restore_next[j, 0, x]
                    go[x] = j
        elif go[x] >= 0:
            value = restore_next[go[x], 0, x]
        empty_next[x] = value
        low, high = min(low, value - empty[x]), max(high, value - empty[x])
    return low, high


_CHECK_EVERY = 20
_MOST_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class WaitCase:
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
        """Most requests in flight in a state: all that waited and a few more."""
        return self.limit + max(4, round(2 * max(self.rates) * self.service))


def zipf(total: float, seats: int = 3) -> tuple[float, ...]:
    """Rates of seats whose popularity falls as 1, 1/2, 1/3 …"""
    scale = sum(1 / rank for rank in range(1, seats + 1))
    return tuple(total / rank / scale for rank in range(1, seats + 1))


@dataclass(frozen=True)
class WaitSolution:
    """What came of it: a mean wait and what is done in every state."""

    case: WaitCase
    mean_wait: float
    """Seconds from arrival to admission; the middle of the two bounds."""
    error: float
    """Half of their distance, seconds."""
    go: Ints
    """By code of the queues, with the slot empty: -1 wait, else the seat to restore."""
    leave: Ints
    """[seat, in flight, code]: 1 where it closes admission (parks, when nothing is in flight)."""

    @cached_property
    def _states(self) -> "States":
        return States(self.case)

    def restores(self, waiting: tuple[int, ...]) -> int | None:
        """The seat it restores when the slot is empty; None: it waits."""
        seat = int(self.go[self._states.code(waiting)])
        return None if seat < 0 else seat

    def leaves(self, seat: int, in_flight: int, waiting: tuple[int, ...]) -> bool:
        """Whether this active seat closes admission now."""
        return bool(self.leave[seat, in_flight, self._states.code(waiting)])


class States:
    """Numbers of the states of a case."""

    def __init__(self, case: WaitCase) -> None:
        radix = case.limit + 1
        self.case = case
        self.count = radix**case.seats
        self.strides: Ints = radix ** np.arange(case.seats, dtype=np.int64)
        self.digits: Ints = np.arange(self.count, dtype=np.int64)[:, None] // self.strides[None, :] % radix

    def code(self, waiting: tuple[int, ...]) -> int:
        """Of these queue lengths."""
        return int(np.dot(np.asarray(waiting, dtype=np.int64), self.strides))


def solve(case: WaitCase, tolerance: float = 1e-3) -> WaitSolution:
    """The best that any causal policy can do. ``tolerance`` is relative."""
    states = States(case)
    go = np.full(states.count, -1, dtype=np.int64)
    leave = np.zeros((case.seats, case.in_flight + 1, states.count), dtype=np.int64)
    return _iterate(states, go, leave, choose=True, tolerance=tolerance)


def evaluate(
    case: WaitCase, policy: Policy, tolerance: float = 1e-3, absence: float | None = None, slo_seconds: float = 20.0
) -> WaitSolution:
    """The mean wait of a policy that is asked once per state. ``absence``: see ``Stationary``."""
    states = States(case)
    view = Stationary(case, 2 * (case.park + case.restore) if absence is None else absence, slo_seconds)
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


def ratio(case: WaitCase, policy: Policy, optimum: WaitSolution | None = None, tolerance: float = 1e-3) -> float:
    """Mean wait of the policy over the best possible; views assume the optimum's absences."""
    best = optimum or solve(case, tolerance)
    return evaluate(case, policy, tolerance, absence=2 * best.mean_wait).mean_wait / best.mean_wait


def played(case: WaitCase, requests: int, seed: int) -> Scenario:
    """Arrivals of a case for the simulator, without a limit of queues; with ``jitter`` 0.71 its costs vary as here."""
    chance = random.Random(seed)
    at, seat, service, now = list[float](), list[int](), list[float](), 0.0
    for _ in range(requests):
        now += chance.expovariate(case.arrivals)
        at.append(now)
        seat.append(chance.choices(range(case.seats), case.rates)[0])
        service.append(chance.expovariate(1 / case.service))
    seats = tuple(SimSeat(seat_name(i), GROUP, case.park, case.restore) for i in range(case.seats))
    return Scenario("mdp", seats, (SimGroup(GROUP),), tuple(at), tuple(seat), tuple(service), now, cap=requests)


def _iterate(states: States, go: Ints, leave: Ints, *, choose: bool, tolerance: float) -> WaitSolution:
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
    return WaitSolution(case, (low + high) / 2 / case.arrivals, (high - low) / 2 / case.arrivals, go, leave)


def _values(states: States) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    seats, most, codes = states.case.seats, states.case.in_flight + 1, states.count
    shapes: tuple[tuple[int, ...], ...] = ((codes,), (seats, most, codes), (seats, most, codes))
    stages = (seats, 2, codes)
    empty, active, drain = (np.zeros(shape) for shape in shapes)
    return empty, active, drain, np.zeros(stages), np.zeros(stages)


GROUP = "G0"


def seat_name(seat: int) -> str:
    """Of a seat of the model."""
    return f"s{seat}"


class Stationary:
    """Asks a policy what it does in a state."""

    def __init__(self, case: WaitCase, absence: float, slo_seconds: float = 20.0) -> None:
        self._case = case
        self._slo = slo_seconds
        most = case.limit
        self._ages = [[k / (rate + 1 / absence) for k in range(most, 0, -1)] for rate in case.rates]
        """Oldest first, of the longest queue; shorter ones are their ends."""

    def restores(self, policy: Policy, waiting: tuple[int, ...]) -> int:
        """The seat the policy restores while the slot is empty; -1: none."""
        decision = policy.decide(self._view(waiting, None, 0))
        return int(decision.activate[1:]) if isinstance(decision, Switch) else -1

    def leaves(self, policy: Policy, seat: int, in_flight: int, waiting: tuple[int, ...]) -> bool:
        """Whether the active seat closes admission (parks, when nothing is in flight)."""
        decision = policy.decide(self._view(waiting, seat, in_flight))
        return isinstance(decision, Park) or (isinstance(decision, Switch) and decision.evict == seat_name(seat))

    def _view(self, waiting: tuple[int, ...], active: int | None, in_flight: int) -> GroupView:
        seats = tuple(
            self._seat(seat, count, in_flight if seat == active else None) for seat, count in enumerate(waiting)
        )
        return GroupView(GROUP, 1, seats, now=1e6)

    def _seat(self, seat: int, waiting: int, in_flight: int | None) -> SeatView:
        case = self._case
        ages = tuple((age, 1) for age in self._ages[seat][case.limit - waiting :])
        running = in_flight is not None
        unused = 1 / case.arrivals if waiting == 0 and not in_flight else 0.0
        return SeatView(
            seat_name(seat),
            SeatState.ACTIVE if running else SeatState.PARKED,
            GROUP,
            waiting=waiting,
            ages=ages,
            oldest_wait_seconds=ages[0][0] if ages else 0.0,
            in_flight=in_flight or 0,
            active_seconds=case.service * (1 + math.log(max(in_flight or 0, 1))) + unused if running else 0.0,
            idle_seconds=unused,
            park_seconds=case.park,
            activate_seconds=case.restore,
            slo_seconds=self._slo,
            service_seconds=case.service,
            rate_fast=case.rates[seat],
            rate_slow=case.rates[seat],
        )


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """The longest queue goes next; ``gate`` says when a busy seat closes admission."""

    gate: Literal["never", "longer", "first"] = "never"
    """``never``: exhaustive; ``longer``: a queue is longer than what is in flight; ``first``: there is any demand."""
    idle: Literal["keep", "park", "newsvendor"] = "newsvendor"
    """What an idle seat does without demand; newsvendor: park it if it is unlikely to be the next one in demand."""
    ties: Literal["colder", "hotter"] = "colder"
    """Which of equally long queues; the colder seat's visit is shorter."""

    def decide(self, view: GroupView) -> Decision:
        """One rule, no time in it."""
        holder = next(iter(view.holders()), None)
        others = [seat for seat in view.seats if seat.waiting and seat.state is SeatState.PARKED]
        sign = 1 if self.ties == "hotter" else -1
        incoming = max(others, key=lambda seat: (seat.waiting, sign * seat.rate_slow), default=None)
        if holder is None:
            return Switch(incoming.seat, None, "longest queue") if incoming else Stay(None, "no demand")
        if incoming is None:
            return self._alone(view, holder)
        if holder.in_flight == 0 or self._closes(holder, incoming):
            return Switch(incoming.seat, holder.seat, "longest queue")
        return Stay(None, "still serving")

    def _closes(self, holder: SeatView, incoming: SeatView) -> bool:
        return self.gate == "first" or (self.gate == "longer" and incoming.waiting > holder.in_flight)

    def _alone(self, view: GroupView, holder: SeatView) -> Decision:
        share = holder.rate_slow / sum(seat.rate_slow for seat in view.seats)
        unlikely = share < holder.park_seconds / (holder.park_seconds + holder.activate_seconds)
        if holder.in_flight == 0 and (self.idle == "park" or (self.idle == "newsvendor" and unlikely)):
            return Park(holder.seat, "idle")
        return Stay(None, "no demand")


@dataclass(frozen=True, slots=True)
class Optimal:
    """The best causal policy of a case; queues beyond its limit count as the limit."""

    solution: WaitSolution

    def decide(self, view: GroupView) -> Decision:
        """What the solution does in this state."""
        case = self.solution.case
        seats = [next(seat for seat in view.seats if seat.seat == seat_name(i)) for i in range(case.seats)]
        waiting = tuple(0 if seat.state is SeatState.ACTIVE else min(seat.waiting, case.limit) for seat in seats)
        active = next((i for i, seat in enumerate(seats) if seat.state is SeatState.ACTIVE), None)
        if active is None:
            restored = self.solution.restores(waiting)
            return Stay(None, "optimal") if restored is None else Switch(seat_name(restored), None, "optimal")
        if self.solution.leaves(active, min(seats[active].in_flight, case.in_flight), waiting):
            return Park(seat_name(active), "optimal")
        return Stay(None, "optimal")
