"""The dual problem: prices per second of slot time that make the lower bound as high as possible."""

import numpy as np

from kybernate.lab.simulate.bounds_grid import Problem, SeatGrid, seat_grid
from kybernate.lab.simulate.lagrangian import MISSES, Floats, solve_seat, trace_seat
from kybernate.lab.simulate.model import Scenario


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
        """Price of all cells before each cell."""
        return np.concatenate([[0.0], np.cumsum(prices)])

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """The lower bound for these prices per cell (none negative), and how many seats hold each cell then."""
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
