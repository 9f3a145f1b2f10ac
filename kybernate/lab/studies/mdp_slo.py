"""How many requests the best causal policy can serve within their SLO, exactly, in a small model in steps of time.

The model: one slot; parking and restoring take a step each; in a step each seat gets a request or none (Bernoulli), and
each request in flight ends or does not (geometric). A request meets its SLO when it is admitted after at most
``Case.slo_steps`` steps. A visit serves everybody who waits for the seat; parking needs an empty seat, so admission is
closed and what is in flight ends first. Of each parked seat the model knows which of the last steps' requests wait, and
whether anybody waits who has missed the SLO; these count as one request that a visit has to serve as well. So the
optimum is never below what any policy can reach where each of the lost has to be served.

Solved by relative value iteration; the gain is known between two bounds (Odoni). ``mdp`` is the same for the mean wait.
Needs numpy (``kybernate[lab]``).
"""

import random
from dataclasses import dataclass

import numpy as np

from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.lab.studies import mdp_slo_view
from kybernate.lab.studies.mdp_slo_steps import Actions, Patterns, Values, improve, start
from kybernate.policy.view import Policy

_MOST_STEPS = 5_000


@dataclass(frozen=True, slots=True)
class Case:
    """One problem."""

    rates: tuple[float, ...]
    """Requests per second of each seat."""
    service: float = 5.4
    """Mean seconds in flight; not below ``step``."""
    step: float = 3.5
    """Seconds; what parking takes, and what restoring takes."""
    slo_steps: int = 6
    in_flight: int = 9
    """Most in flight that are told apart."""

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
class Solution:
    """What came of it: a share of requests and what is done in every state."""

    case: Case
    attained: float
    """Share of requests within their SLO; the middle of the two bounds."""
    error: float
    """Half of their distance."""
    actions: Actions

    def restores(self, waiting: tuple[int, ...]) -> int | None:
        """Whom it restores when the slot is empty and these patterns wait (see ``Patterns``); None: it waits."""
        seat = int(self.actions.go[waiting])
        return None if seat < 0 else seat

    def leaves(self, seat: int, in_flight: int, others: tuple[int, ...]) -> bool:
        """Whether this active seat closes admission while these patterns of the other seats wait, in their order."""
        return bool(self.actions.leave[seat][(in_flight, *others)])


def solve(case: Case, tolerance: float = 1e-4) -> Solution:
    """The best that any causal policy can do. ``tolerance`` is of the share of requests."""
    return _iterate(case, Actions.none(Patterns(case.slo_steps), len(case.rates), case.in_flight), True, tolerance)


def evaluate(case: Case, policy: Policy, tolerance: float = 1e-4) -> Solution:
    """What a policy reaches that is asked once in every state; ``mdp_slo_view`` says what it sees."""
    patterns = Patterns(case.slo_steps)
    actions = Actions.none(patterns, len(case.rates), case.in_flight)
    view = mdp_slo_view.Steps(case.rates, case.service, case.step, case.slo_steps)
    for waiting in np.ndindex(actions.go.shape):
        actions.go[waiting] = view.restores(policy, waiting)
    for seat, leave in enumerate(actions.leave):
        for in_flight, *others in np.ndindex(leave.shape):
            leave[(in_flight, *others)] = view.leaves(policy, seat, in_flight, tuple(others))
    return _iterate(case, actions, False, tolerance)


def played(case: Case, steps: int, seed: int) -> Scenario:
    """Requests of a case for the simulator and the clairvoyants. They come a moment before their step, so that whoever
    decides at the step has seen them.
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
    seats = tuple(
        SimSeat(mdp_slo_view.name(i), "G0", case.step, case.step, slo_seconds=slo) for i in range(len(case.rates))
    )
    return Scenario(
        "steps", seats, (SimGroup("G0"),), tuple(at), tuple(seat), tuple(service), steps * case.step, cap=len(at)
    )


def _iterate(case: Case, actions: Actions, choose: bool, tolerance: float) -> Solution:
    patterns = Patterns(case.slo_steps)
    values: Values = start(patterns, len(case.rates), case.in_flight)
    requests = sum(case.chances)
    low, high = -np.inf, np.inf
    for _ in range(_MOST_STEPS):
        values, low, high = improve(patterns, case.chances, case.ends, values, actions, choose)
        if high - low <= 2 * tolerance * requests:
            break
    return Solution(case, (low + high) / 2 / requests, (high - low) / 2 / requests, actions)
