"""The clairvoyant's schedule of one problem: ``beam`` fed with tables of the dual problem."""

from dataclasses import dataclass

import numpy as np

from kybernate.lab.simulate.beam import search
from kybernate.lab.simulate.bounds_dual import Relaxation
from kybernate.lab.simulate.bounds_grid import Problem
from kybernate.lab.simulate.bounds_replay import Planned
from kybernate.lab.simulate.lagrangian import Floats, Ints, rest_rows
from kybernate.lab.simulate.model import Scenario

_COARSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to look."""

    width: int = 200
    bucket: float = 4.0
    """Seconds."""
    closings: int = 60
    linger: float = 40.0


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
        """The best schedule found and its cost; no visits when none costs less than ``best``."""
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
