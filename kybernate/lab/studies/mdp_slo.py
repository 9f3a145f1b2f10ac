"""The share of requests that the best causal policy can serve within their SLO, exactly, in a small model in steps.

The model: one slot; parking and restoring take a step each; in a step each seat gets a request or none (Bernoulli), and
each request in flight ends or does not (geometric). A request meets its SLO when it is admitted after at most
``SloCase.slo_steps`` steps. A visit serves all requests that wait for the seat; parking needs an empty seat, so
admission is closed and the requests in flight end first. Of each parked seat the model knows which of the last steps'
requests wait, and whether any request waits that has missed the SLO; these count as one request that a visit has to
serve as well. So the optimum is never below what any policy can reach where each of the late requests has to be served.

Solved by relative value iteration; the gain is known between two bounds (Odoni). ``mdp`` is the same for the mean wait.
Seats are independent but for the slot, so the expectation over a step's arrivals is taken seat by seat, along its axis
of the arrays. Needs numpy (the extra ``lab``).
"""

import random
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.policy.view import GroupView, Park, Policy, SeatView, Switch
from kybernate.seat import SeatState

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Array = TypeVar("Array", bound=NDArray[Any])


@dataclass(frozen=True)
class Patterns:
    """Who waits for a parked seat, as bits: bit k for a request that has waited k steps, the highest for any request
    that has missed the SLO. *Aged* is a pattern a step later, before that step's arrival: one bit less.
    """

    slo_steps: int

    @property
    def count(self) -> int:
        """Of patterns."""
        return 2 << self.slo_steps

    @property
    def lost(self) -> int:
        """The bit of requests that have missed it; also how many aged patterns there are."""
        return 1 << self.slo_steps

    @cached_property
    def aged(self) -> Ints:
        """By pattern."""
        every = np.arange(self.count)
        missed = (every & self.lost > 0) | (every & self.lost >> 1 > 0)
        return (every & (self.lost >> 1) - 1) | np.where(missed, self.lost >> 1, 0)

    @cached_property
    def follows(self) -> Ints:
        """The pattern by aged pattern, without an arrival; with bit 0 set, after an arrival."""
        aged = np.arange(self.lost)
        return ((aged & (self.lost >> 1) - 1) << 1) | np.where(aged & self.lost >> 1 > 0, self.lost, 0)

    @cached_property
    def saved(self) -> Ints:
        """By pattern: requests that meet their SLO if the seat is restored now."""
        return np.array([(pattern & self.lost - 1).bit_count() for pattern in range(self.count)])

    @cached_property
    def served(self) -> Ints:
        """By pattern: requests that are in flight when it is restored."""
        return self.saved + (np.arange(self.count) & self.lost > 0)

    def expected(self, values: Floats, axis: int, chance: float) -> Floats:
        """By aged pattern along this axis: the mean of values by pattern, over an arrival with this chance."""
        quiet = np.take(values, self.follows, axis)
        return quiet + np.float32(chance) * (np.take(values, self.follows | 1, axis) - quiet)

    def by_pattern(self, values: Array, axes: range) -> Array:
        """Values by aged pattern along these axes, as values by pattern."""
        for axis in axes:
            values = cast(Array, np.take(values, self.aged, axis))
        return values


@dataclass(frozen=True)
class Actions:
    """What is done in every state."""

    go: NDArray[np.int8]
    """[pattern of each seat], with the slot empty: -1 wait, else the seat to restore."""
    leave: tuple[NDArray[np.bool_], ...]
    """By seat that is active, [in flight, pattern of each other seat]: close admission (park, when nothing is)."""

    @classmethod
    def none(cls, patterns: Patterns, seats: int, in_flight: int) -> "Actions":
        """Wait in every state."""
        shape = (in_flight + 1,) + (patterns.count,) * (seats - 1)
        go = np.full((patterns.count,) * seats, -1, dtype=np.int8)
        return cls(go, tuple(np.zeros(shape, dtype=np.bool_) for _ in range(seats)))


@dataclass(frozen=True)
class Values:
    """Of every state; only differences mean anything."""

    empty: Floats
    """[pattern of each seat]: the slot is empty."""
    active: tuple[Floats, ...]
    """By seat, [in flight, pattern of each other seat]."""
    parks: Floats
    """[aged pattern of each seat]: some seat begins to park."""
    drains: tuple[Floats, ...]
    """By requests in flight, [aged pattern of each seat]: some seat has closed admission; of 0: as ``parks``."""


def start(patterns: Patterns, seats: int, in_flight: int) -> Values:
    """All zero."""
    active = (in_flight + 1,) + (patterns.count,) * (seats - 1)
    aged = np.zeros((patterns.lost,) * seats, dtype=np.float32)
    return Values(
        np.zeros((patterns.count,) * seats, dtype=np.float32),
        tuple(np.zeros(active, dtype=np.float32) for _ in range(seats)),
        aged,
        (aged,) * (in_flight + 1),
    )


def improve(
    patterns: Patterns, chances: tuple[float, ...], ends: float, old: Values, actions: Actions, choose: bool
) -> tuple[Values, float, float]:
    """Values with one more step to go, and the least and the largest growth. With ``choose`` the best action is taken
    and written into ``actions``, else they are obeyed.
    """
    seats, most = range(len(chances)), len(old.drains) - 1
    empty = old.empty
    for seat in seats:
        empty = patterns.expected(empty, seat, chances[seat])
    parks = empty  # parking takes a step, after which the slot is empty: as waiting with an empty slot
    drains = _drains(patterns, chances, ends, old)
    active, entered = [], []
    for seat in seats:
        after = old.active[seat]
        others = [other for other in seats if other != seat]
        for axis, other in enumerate(others, 1):
            after = patterns.expected(after, axis, chances[other])
        entered.append(_admits(after, chances[seat]))
        stays = np.stack([_thinned(entered[seat], count, ends) for count in range(most + 1)])
        own = tuple(0 if other == seat else slice(None) for other in seats)
        closes = np.stack([parks[own], *(drain[own] for drain in drains[1:])])
        if choose:
            actions.leave[seat][:] = patterns.by_pattern(closes > stays, range(1, len(chances)))
        stays, closes = (patterns.by_pattern(each, range(1, len(chances))) for each in (stays, closes))
        active.append(np.where(actions.leave[seat], closes, stays))
    best = _empty(patterns, empty, entered, actions, choose)
    return _settled(old, best, active, parks, drains)


def _admits(after: Floats, chance: float) -> Floats:
    """[in flight before a step's arrival, …]: values after it; who arrives is admitted and meets the SLO."""
    more: Floats = np.concatenate([after[1:], after[-1:]])
    return np.float32(chance) + after + np.float32(chance) * (more - after)


def _thinned(values: Floats, count: int, ends: float) -> Floats:
    """The mean of values by how many are in flight, when each of ``count`` ends with this chance."""
    shares = [comb(count, stay) * (1 - ends) ** stay * ends ** (count - stay) for stay in range(count + 1)]
    total: Floats = np.zeros_like(values[0])
    for share, value in zip(shares, values, strict=False):
        total += np.float32(share) * value
    return total


def _drains(patterns: Patterns, chances: tuple[float, ...], ends: float, old: Values) -> list[Floats]:
    """Values of draining seats, by requests in flight: a step later there are fewer, and of none the seat is parked."""
    later = []
    for values in (old.parks, *old.drains[1:]):
        for seat, chance in enumerate(chances):
            values = patterns.expected(np.take(values, patterns.aged, seat), seat, chance)
        later.append(values)
    stacked = np.stack(later)
    return [_thinned(stacked, count, ends) for count in range(len(later))]


def _empty(patterns: Patterns, waits: Floats, entered: list[Floats], actions: Actions, choose: bool) -> Floats:
    """Values of an empty slot: wait, or restore a seat, which serves all requests that wait for it."""
    seats = range(len(entered))
    best = patterns.by_pattern(waits, range(len(entered)))
    if choose:
        actions.go[...] = -1
    most = len(entered[0]) - 1
    for seat in seats:
        gained = entered[seat][np.minimum(patterns.served, most)]
        gained += patterns.saved.astype(np.float32).reshape((-1,) + (1,) * (len(entered) - 1))
        value = np.moveaxis(patterns.by_pattern(gained, range(1, len(entered))), 0, seat)
        taken = value > best if choose else actions.go == seat
        if choose:
            actions.go[taken] = seat
        best = np.where(taken, value, best)
    return best


def _settled(
    old: Values, empty: Floats, active: list[Floats], parks: Floats, drains: list[Floats]
) -> tuple[Values, float, float]:
    """The new values, kept small, and how much they have grown."""
    growth = [empty - old.empty, *(new - former for new, former in zip(active, old.active, strict=True))]
    low, high = min(float(each.min()) for each in growth), max(float(each.max()) for each in growth)
    base = empty.flat[0]
    return (
        Values(
            empty - base, tuple(each - base for each in active), parks - base, tuple(each - base for each in drains)
        ),
        low,
        high,
    )


_MOST_STEPS = 5_000


@dataclass(frozen=True, slots=True)
class SloCase:
    """One problem."""

    rates: tuple[float, ...]
    """Requests per second of each seat."""
    service: float = 5.4
    """Mean seconds in flight; not below ``step``."""
    step: float = 3.5
    """Seconds; what parking takes, and what restoring takes."""
    slo_steps: int = 6
    in_flight: int = 9
    """Most requests in flight in a state."""

    def __post_init__(self) -> None:
        if len(self.rates) < 2 or min(self.rates) <= 0:
            raise ValueError(f"rates {self.rates}: at least two seats, and each with a rate above 0, are needed")
        if not 0 < self.step <= self.service:
            raise ValueError(
                f"a step of {self.step:g} s: it must be above 0 and at most the service of {self.service:g} s"
            )
        if self.slo_steps < 2 or self.in_flight <= self.slo_steps:
            raise ValueError(
                f"slo_steps {self.slo_steps}, in_flight {self.in_flight}: at least 2, and more in flight than steps"
            )

    @property
    def chances(self) -> tuple[float, ...]:
        """Of a request in a step, by seat."""
        return tuple(1.0 - float(np.exp(-rate * self.step)) for rate in self.rates)

    @property
    def ends(self) -> float:
        """The chance that a request in flight ends in a step."""
        return self.step / self.service


@dataclass(frozen=True)
class SloSolution:
    """What came of it: a share of requests and what is done in every state."""

    case: SloCase
    attained: float
    """Share of requests within their SLO; the middle of the two bounds."""
    error: float
    """Half of their distance."""
    actions: Actions

    def restores(self, waiting: tuple[int, ...]) -> int | None:
        """The seat it restores when the slot is empty and these patterns wait (see ``Patterns``); None: it waits."""
        seat = int(self.actions.go[waiting])
        return None if seat < 0 else seat

    def leaves(self, seat: int, in_flight: int, others: tuple[int, ...]) -> bool:
        """Whether this active seat closes admission while these patterns of the other seats wait, in their order."""
        return bool(self.actions.leave[seat][(in_flight, *others)])


def solve(case: SloCase, tolerance: float = 1e-4) -> SloSolution:
    """The best that any causal policy can do. ``tolerance`` is of the share of requests."""
    return _iterate(case, Actions.none(Patterns(case.slo_steps), len(case.rates), case.in_flight), True, tolerance)


def evaluate(case: SloCase, policy: Policy, tolerance: float = 1e-4) -> SloSolution:
    """What a policy reaches that is asked once in every state; ``mdp_slo_view`` says what it sees."""
    patterns = Patterns(case.slo_steps)
    actions = Actions.none(patterns, len(case.rates), case.in_flight)
    view = Steps(case.rates, case.service, case.step, case.slo_steps)
    for waiting in np.ndindex(actions.go.shape):
        actions.go[waiting] = view.restores(policy, waiting)
    for seat, leave in enumerate(actions.leave):
        for in_flight, *others in np.ndindex(leave.shape):
            leave[(in_flight, *others)] = view.leaves(policy, seat, in_flight, tuple(others))
    return _iterate(case, actions, False, tolerance)


def played(case: SloCase, steps: int, seed: int) -> Scenario:
    """Requests of a case for the simulator and the clairvoyants. They arrive a moment before their step, so that
    a decision at the step has seen them.
    """
    chance = random.Random(seed)
    at, seat, service, moment = list[float](), list[int](), list[float](), 1e-6
    for step in range(1, steps + 1):
        for index, arrives in enumerate(case.chances):
            if chance.random() < arrives:
                at.append(step * case.step - moment)
                seat.append(index)
                lasts = 1
                while chance.random() >= case.ends:
                    lasts += 1
                service.append(lasts * case.step + moment)
    slo = case.slo_steps * case.step + 0.1
    seats = tuple(SimSeat(seat_name(i), "G0", case.step, case.step, slo_seconds=slo) for i in range(len(case.rates)))
    return Scenario(
        "steps", seats, (SimGroup("G0"),), tuple(at), tuple(seat), tuple(service), steps * case.step, cap=len(at)
    )


def _iterate(case: SloCase, actions: Actions, choose: bool, tolerance: float) -> SloSolution:
    patterns = Patterns(case.slo_steps)
    values: Values = start(patterns, len(case.rates), case.in_flight)
    requests = sum(case.chances)
    low, high = -np.inf, np.inf
    for _ in range(_MOST_STEPS):
        values, low, high = improve(patterns, case.chances, case.ends, values, actions, choose)
        if high - low <= 2 * tolerance * requests:
            break
    return SloSolution(case, (low + high) / 2 / requests, (high - low) / 2 / requests, actions)


GROUP = "G0"
_ROUNDING = 1e-6
"""So that who is admitted at the last step is seen as within the SLO."""


def seat_name(seat: int) -> str:
    """Of a seat of the model."""
    return f"s{seat}"


class Steps:
    """Asks a policy what it does in a state. ``rates`` per second, ``service`` and ``step`` in seconds."""

    def __init__(self, rates: tuple[float, ...], service: float, step: float, slo_steps: int) -> None:
        self._rates, self._service, self._step, self._slo_steps = rates, service, step, slo_steps
        self._ages = [self._waiting(pattern) for pattern in range(2 << slo_steps)]

    def restores(self, policy: Policy, waiting: tuple[int, ...]) -> int:
        """The seat the policy restores while the slot is empty; -1: none."""
        decision = policy.decide(self._view(waiting, None, 0))
        return int(decision.activate[1:]) if isinstance(decision, Switch) else -1

    def leaves(self, policy: Policy, seat: int, in_flight: int, others: tuple[int, ...]) -> bool:
        """Whether the active seat closes admission (parks, when nothing is in flight)."""
        waiting = (*others[:seat], 0, *others[seat:])
        return isinstance(policy.decide(self._view(waiting, seat, in_flight)), Switch | Park)

    def _waiting(self, pattern: int) -> tuple[tuple[float, int], ...]:
        """(age, count), oldest first."""
        ages = [(age * self._step, 1) for age in range(self._slo_steps) if pattern >> age & 1]
        if pattern >> self._slo_steps & 1:
            ages.append((2 * self._slo_steps * self._step, 1))
        return tuple(reversed(ages))

    def _view(self, waiting: tuple[int, ...], active: int | None, in_flight: int) -> GroupView:
        seats = tuple(
            self._seat(seat, pattern, in_flight if seat == active else None) for seat, pattern in enumerate(waiting)
        )
        return GroupView(GROUP, 1, seats, now=1e6)

    def _seat(self, seat: int, pattern: int, in_flight: int | None) -> SeatView:
        ages = self._ages[pattern]
        running, idle = in_flight is not None, 0.0 if in_flight else self._step
        return SeatView(
            seat_name(seat),
            SeatState.ACTIVE if running else SeatState.PARKED,
            GROUP,
            waiting=len(ages),
            ages=ages,
            oldest_wait_seconds=ages[0][0] if ages else 0.0,
            in_flight=in_flight or 0,
            active_seconds=self._service + idle if running else 0.0,
            idle_seconds=idle if running else 0.0,
            park_seconds=self._step,
            activate_seconds=self._step,
            slo_seconds=self._slo_steps * self._step * (1 + _ROUNDING),
            service_seconds=self._service,
            rate_fast=self._rates[seat],
            rate_slow=self._rates[seat],
        )
