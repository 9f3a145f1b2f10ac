"""Both sides of one problem: prices that raise the lower bound, schedules that lower what is known to be feasible."""

import time
from dataclasses import dataclass

import numpy as np

from kybernate.lab.bounds.beam import Beam, Effort
from kybernate.lab.bounds.lagrangian import Relaxation
from kybernate.lab.bounds.problems import Planned, Problem, cost, replay
from kybernate.lab.compiled import Floats
from kybernate.lab.simulate.model import Scenario

CELLS = (0.4, 0.2, 0.1)
"""Seconds per grid cell, coarse to fine: each halving starts from the prices of the one before."""
_STEPS = (400, 160, 80)
_ROUGH = Effort(width=20)
_LONGEST_PATIENCE = 1200.0
"""Seconds; see ``lagrangian``. Nothing gets wrong by it, only looser for requests that wait longer."""
_LOOK = 50
"""Steps of the dual between two searches for a schedule."""


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem, bounded from both sides. Costs are sums over its requests."""

    lower: float
    plan: tuple[Planned, ...]
    """The best schedule found."""
    reactive_lower: float
    reactive_plan: tuple[Planned, ...]
    cell: float
    """The finest grid that was reached."""


class Solver:
    """Works on one problem until its time is used up or nothing improves any more."""

    def __init__(self, scenario: Scenario, problem: Problem, objective: str, seconds: float) -> None:
        self.scenario, self.problem, self.objective = scenario, problem, objective
        self.until = time.perf_counter() + seconds
        self.seconds = seconds
        self.requests = [request for own in problem.requests for request in own]
        self.horizon = scenario.duration
        self.patience = min(scenario.duration, _LONGEST_PATIENCE)
        self.best = {False: np.inf, True: np.inf}
        self.plans: dict[bool, list[Planned]] = {False: [], True: []}

    def solve(self) -> Solved:
        """Coarse to fine; a share of the time is kept for the reactive side and the last search."""
        first = self._relax(CELLS[0], reactive=False, rough=True)
        self._search(first, np.full(first.cells, CELLS[0]), _ROUGH, rough=True)
        prices, lower, reached = np.full(0, 0.0), -np.inf, CELLS[0]
        for stage, (size, steps) in enumerate(zip(CELLS, _STEPS, strict=True)):
            if stage and self._left() < 0.5:
                break
            relaxation = self._relax(size, reactive=False)
            start = np.full(relaxation.cells, size) if not stage else refined(prices, relaxation.cells)
            bound, prices = self._ascend(relaxation, start, steps, keep=0.5 if stage < 2 else 0.4)
            lower, reached = max(lower, bound), size
        self._search(self._relax(reached, reactive=False), prices, Effort(), rough=False)
        reactive_lower = self._react(prices, reached)
        return Solved(lower, tuple(self.plans[False]), max(lower, reactive_lower), tuple(self.plans[True]), reached)

    def _react(self, prices: Floats, cell: float) -> float:
        """The same for schedules that restore a seat only when a request waits for it."""
        relaxation = self._relax(cell, reactive=True)
        bound, prices = self._ascend(relaxation, prices, 120, keep=0.0)
        self._search(relaxation, prices, Effort(), rough=False)
        return bound

    def _left(self) -> float:
        """Share of the time that is left."""
        return (self.until - time.perf_counter()) / self.seconds

    def _relax(self, cell: float, *, reactive: bool, rough: bool = False) -> Relaxation:
        horizon = self.scenario.duration + 120.0 if rough else self.horizon
        return Relaxation(
            self.scenario, self.problem, cell=cell, horizon=horizon, patience=self.patience,
            objective=self.objective, reactive=reactive,
        )  # fmt: skip

    def _ascend(self, relaxation: Relaxation, prices: Floats, steps: int, keep: float) -> tuple[float, Floats]:
        """Subgradient steps of Polyak's length in a deflected direction (Camerini, Fratta, Maffioli 1975)."""
        reactive = relaxation.reactive
        best, best_prices, at_look = -np.inf, prices, -np.inf
        direction, scale, stalled = np.zeros_like(prices), 1.0, 0
        for step in range(steps):
            value, usage = relaxation.value(prices)
            stalled = 0 if value > best + 1e-3 * abs(best) else stalled + 1
            if value > best:
                best, best_prices = value, prices
            if stalled >= 20:
                scale, stalled = scale * 0.7, 0
            if self._left() < keep:
                break
            if step % _LOOK == _LOOK - 1:
                self._search(relaxation, best_prices, _ROUGH, rough=False, again=False)
                if best - at_look < 2e-4 * abs(best):
                    break
                at_look = best
            slope = usage - relaxation.slots
            slope[(prices <= 0) & (slope < 0)] = 0.0
            size = float(direction @ direction)
            deflect = max(0.0, -1.5 * float(slope @ direction) / size) if size else 0.0
            direction = slope + deflect * direction
            size = float(direction @ direction)
            gap = self.best[reactive] - value
            if not size or gap <= 1e-9 * abs(value):
                break
            prices = np.maximum(0.0, prices + scale * gap / size * direction)
        return best, best_prices

    def _search(
        self, relaxation: Relaxation, prices: Floats, effort: Effort, *, rough: bool, again: bool = True
    ) -> None:
        """Look for a better schedule; the rough first one also tells how long schedules and waits are."""
        beam = Beam(self.scenario, self.problem, relaxation, prices)
        horizon = 1.2 * max(self.horizon, self.scenario.duration) + 600.0
        for reactive in (False, True):
            if (reactive and not (rough or relaxation.reactive)) or (relaxation.reactive and not reactive):
                continue
            _, plan = beam.search(effort, horizon, np.inf if rough or again else self.best[reactive], reactive=reactive)
            if plan:
                self._keep(plan, reactive)
        if rough:
            played = replay(self.scenario, self.plans[False], seats=self.problem.seats)
            longest = max(played.wait[request] for request in self.requests)
            self.patience = min(max(120.0, 2.0 * longest), _LONGEST_PATIENCE)
            self.horizon = max(self.scenario.duration, max(visit.gone for visit in played.visits)) + 10.0

    def _keep(self, plan: list[Planned], reactive: bool) -> None:
        played = replay(self.scenario, plan, seats=self.problem.seats, reactive=reactive)
        costs = cost(self.scenario, played.wait, self.requests, self.objective)
        if costs < self.best[reactive]:
            self.best[reactive], self.plans[reactive] = costs, plan
            if self.best[False] > costs:  # what is reactive is a schedule, too
                self.best[False], self.plans[False] = costs, plan


def refined(prices: Floats, cells: int) -> Floats:
    """The same prices per second on cells half as long."""
    fine = np.repeat(prices / 2, 2)[:cells]
    return np.concatenate([fine, np.zeros(cells - len(fine))])
