"""The certificate of a scenario: two numbers that enclose the result of the best possible schedule.

From below by the dual of "one seat per slot" (``lagrangian``), from above by a schedule that keeps all rules (``beam``,
replayed by ``problems``). ``docs/dev/bounds.md`` says what a certificate proves and what it does not.
numpy and numba are needed (``pip install 'kybernate[lab]'``); they are imported by the first call.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kybernate.lab.bounds.problems import Schedule, cost, replay
from kybernate.lab.simulate.model import Outcome, Scenario

_TOLERANCE = 1e-6
_LARGEST = 200_000_000
"""Requests times seconds: tables of about 2 GB. Six hours at 0.4 requests/s."""


@dataclass(frozen=True, slots=True)
class SeatShare:
    """What the best schedule found does for one seat."""

    seat: str
    requests: int
    visits: int
    wait_mean: float
    """Seconds."""
    held_seconds: float
    """Time that it holds a slot, parking and restoring included."""


@dataclass(frozen=True, slots=True)
class BoundCertificate:
    """Bounds of one scenario. With objective ``wait``: mean wait in seconds; with ``slo``: share of requests that wait
    longer than their SLO.
    """

    scenario: str
    objective: str
    requests: int
    lower_bound: float
    """No schedule is better, with or without knowledge of the future."""
    best_feasible: float
    """The best schedule found that knows the future."""
    bracket: float
    """How far apart the two are: best_feasible / lower_bound - 1; infinite when only the bound is 0."""
    reactive_lower_bound: float
    """No schedule is better that restores a seat only when a request waits for it."""
    reactive: float
    """The best of these that was found."""
    reactive_bracket: float
    """The same of the two."""
    cell: float
    """Grid of the bound, seconds; the bound holds for times that are on no grid."""
    seconds: float
    """Wall time of the computation."""
    seats: tuple[SeatShare, ...]
    schedule: Schedule
    """The one behind ``best_feasible``."""
    reactive_schedule: Schedule

    def value(self, outcome: Outcome) -> float:
        """The objective of an outcome of the same requests."""
        if len(outcome.wait) != self.requests:
            raise ValueError(f"the outcome has {len(outcome.wait)} requests, scenario {self.scenario} {self.requests}")
        if self.objective == "wait":
            return sum(outcome.wait) / max(1, self.requests)
        raise ValueError("shares of misses need the scenario; use bounds.measured(scenario, wait, 'slo')")

    def refutes(self, value: float) -> str | None:
        """Why a result cannot be true: it is better than the best schedule that exists. None: it can be."""
        if value >= self.lower_bound - _TOLERANCE * max(1.0, self.lower_bound):
            return None
        return (
            f"{value:.4g} is better than possible on {self.scenario} (no schedule is below {self.lower_bound:.4g}): "
            "it was not measured under these rules, e.g. requests frozen in flight, quicker switches than stated, or "
            "requests left out"
        )

    def distance(self, value: float) -> str:
        """One line: how far a policy with this result is from the best."""
        if refuted := self.refutes(value):
            return refuted
        most, known = _above(value, self.lower_bound), _above(value, self.reactive)
        return (
            f"{value:.4g}: at most {most:.1%} above the best schedule anyone could have made, "
            f"{known:+.1%} against the best found for a scheduler that knows the future and restores on demand"
        )

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The certificate as text, with a table of seats below."""
        unit = "s mean wait" if self.objective == "wait" else "of the requests later than their SLO"
        shown = "{:.2f} {}" if self.objective == "wait" else "{:.2%} {}"
        lines = [
            f"{self.scenario}: {self.requests} requests, bounded in {self.seconds:.0f} s",
            f"  no schedule is below     {shown.format(self.lower_bound, unit)}",
            f"  a schedule that reaches  {shown.format(self.best_feasible, unit)} (bracket {self.bracket:.1%})",
            f"  restoring on demand only {shown.format(self.reactive_lower_bound, unit)} at least, "
            f"{shown.format(self.reactive, 'reached')} (bracket {self.reactive_bracket:.1%})",
            "  in the schedule found:   seat, requests, visits, mean wait s, held s",
        ]
        lines += [
            f"    {share.seat}  {share.requests}  {share.visits}  {share.wait_mean:.2f}  {share.held_seconds:.0f}"
            for share in self.seats
        ]
        return "\n".join(lines)


def certificate(
    scenario: Scenario, *, seconds_budget: float = 300.0, objective: Literal["wait", "slo"] = "wait"
) -> BoundCertificate:
    """Bound a scenario from both sides in about ``seconds_budget`` seconds on one core (less when nothing improves).

    Raises ModuleNotFoundError without numpy and numba, ValueError for a scenario without requests or one too large.
    """
    from kybernate.lab.bounds.problems import split
    from kybernate.lab.bounds.solver import Solver

    began = time.perf_counter()
    count = len(scenario.at)
    if not count:
        raise ValueError(f"scenario {scenario.name} has no requests; there is nothing to bound")
    if count * scenario.duration > _LARGEST:
        raise ValueError(
            f"scenario {scenario.name} has {count} requests in {scenario.duration / 3600:.1f} h, too much for the "
            "tables of a certificate; cut out a window (--start, --duration), e.g. its busiest hour"
        )
    problems = split(scenario)
    sizes = [sum(len(own) for own in problem.requests) for problem in problems]
    solved = []
    for index, problem in enumerate(problems):
        left = max(1.0, seconds_budget - (time.perf_counter() - began))
        solved.append(Solver(scenario, problem, objective, left * sizes[index] / sum(sizes[index:])).solve())
    schedule = replay(scenario, [step for one in solved for step in one.plan])
    reactive = replay(scenario, [step for one in solved for step in one.reactive_plan], reactive=True)
    sides = (
        max(0.0, sum(one.lower for one in solved) / count),
        measured(scenario, schedule.wait, objective),
        max(0.0, sum(one.reactive_lower for one in solved) / count),
        measured(scenario, reactive.wait, objective),
    )
    return BoundCertificate(
        scenario=scenario.name,
        objective=objective,
        requests=count,
        lower_bound=sides[0],
        best_feasible=sides[1],
        bracket=_above(sides[1], sides[0]),
        reactive_lower_bound=sides[2],
        reactive=sides[3],
        reactive_bracket=_above(sides[3], sides[2]),
        cell=max(one.cell for one in solved),
        seconds=time.perf_counter() - began,
        seats=_shares(scenario, schedule),
        schedule=schedule,
        reactive_schedule=reactive,
    )


def measured(scenario: Scenario, wait: Sequence[float], objective: Literal["wait", "slo"] = "wait") -> float:
    """The objective per request of these waits."""
    return cost(scenario, wait, range(len(wait)), objective) / max(1, len(wait))


def _shares(scenario: Scenario, schedule: Schedule) -> tuple[SeatShare, ...]:
    shares = []
    for index, seat in enumerate(scenario.seats):
        waits = [wait for wait, of in zip(schedule.wait, scenario.seat, strict=True) if of == index]
        visits = [visit for visit in schedule.visits if visit.seat == index]
        held = sum(visit.gone - visit.begun for visit in visits)
        shares.append(SeatShare(seat.name, len(waits), len(visits), sum(waits) / max(1, len(waits)), held))
    return tuple(shares)


def _above(value: float, bound: float) -> float:
    if bound <= 0:
        return 0.0 if value <= 0 else float("inf")
    return value / bound - 1
