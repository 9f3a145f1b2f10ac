"""Two groups as one pool: twelve pairs of windows, each as two groups of one node, seats bound to their group or free
to move for 3 s, one at a time or as many as 80 GB hold, against llama-swap's rule with ``ttl`` and bound seats.

``python -m bench pooling``: all cores, minutes of CPU. ``KYB_SERVEGEN`` is the path of the derived trace; without it
the hours of ``servegen`` are generated. Figures do not depend on the machine.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.measures import Figures, Pool, WindowSample, draws, interval, measures, sampled
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.node import GB
from kybernate.lab.simulate.scenarios import reference

SCENARIOS = ("poisson", "bursty", "servegen")
PAIRS = 12
MOVE_SECONDS = 3.0
MEMORY_BYTES = 80 * GB
SHARING = 0.3


class Case(NamedTuple):
    """One row of the table."""

    policy: str
    pooled: bool = False
    packed: bool = False
    """Seats of a group are active together while they fit into ``MEMORY_BYTES``."""
    sharing: float = 0.0

    def __str__(self) -> str:
        """As it is printed."""
        packed = f" + packed{f', {self.sharing:.0%} slower each' if self.sharing else ''}" if self.packed else ""
        return f"{self.policy}, {'pooled' if self.pooled else 'bound'}{packed}"


AGAINST = Case("exhaustive-ttl")
CASES = (
    AGAINST, Case("exhaustive"), Case("fifo-switch"), Case("kyb-balanced"),
    *(Case(name, pooled=True) for name in ("exhaustive-ttl", "fifo-switch", "kyb-balanced", "kyb-bounded")),
    Case("exhaustive-ttl", packed=True), Case("kyb-balanced", packed=True),
    Case("exhaustive-ttl", pooled=True, packed=True), Case("kyb-balanced", pooled=True, packed=True),
    Case("kyb-balanced", pooled=True, packed=True, sharing=SHARING),
)  # fmt: skip
Played = list[dict[Case, tuple[WindowSample, float]]]


async def run() -> dict[str, float]:
    """Prints a table of each scenario; returns the changes against ``AGAINST``."""
    figures: dict[str, float] = {}
    for scenario in SCENARIOS:
        with get_context("spawn").Pool() as pool:
            played = pool.starmap(one_pair, [(scenario, pair) for pair in range(PAIRS)])
        figures |= _shown(scenario, played)
    return figures


def one_pair(scenario: str, pair: int) -> dict[Case, tuple[WindowSample, float]]:
    """Every case on one pair: its sample and moves per hour."""
    trace = os.environ.get("KYB_SERVEGEN")
    path = Path(trace) if trace and scenario == "servegen" else None
    first, second = (reference(scenario, window, trace=path) for window in (pair, pair + PAIRS))
    found: dict[Case, tuple[WindowSample, float]] = {}
    for case in CASES:
        both = side_by_side(first, second, MOVE_SECONDS if case.pooled else None, packed=case.packed)
        outcome = play(both, POLICIES[case.policy](), RunOptions(sharing=case.sharing))
        found[case] = sampled(outcome, both), measures(outcome, both).moves_per_hour
    return found


def side_by_side(first: Scenario, second: Scenario, move_seconds: float | None, *, packed: bool = False) -> Scenario:
    """Two nodes of one group as one node of two groups."""
    parts = (first, second)
    rows = sorted(
        (at, place * len(first.seats) + seat, service)
        for place, one in enumerate(parts)
        for at, seat, service in zip(one.at, one.seat, one.service, strict=True)
    )
    seats = tuple(
        replace(seat, name=f"{place}-{seat.name}", group=f"G{place}")
        for place, one in enumerate(parts)
        for seat in one.seats
    )
    slots, memory = (len(seats), MEMORY_BYTES) if packed else (1, 0)
    at, seat, service = zip(*rows, strict=True)
    return replace(
        first, seats=seats, groups=tuple(SimGroup(name, slots, memory) for name in ("G0", "G1")), at=at, seat=seat,
        service=service, move_seconds=move_seconds,
    )  # fmt: skip


def _shown(scenario: str, played: Played) -> dict[str, float]:
    table = Table(title=f"{scenario}, {PAIRS} pairs, against {AGAINST}; [95 % intervals over pairs]")
    columns = ("policy", "mean s", "p99 s", "at once %", "in SLO %", "switches/h", "moves/h", "max s", "mean", "p99")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    drawn, figures = draws(PAIRS, 0), {}
    pools = {case: Pool([one[case][0] for one in played]) for case in CASES}
    base, spread = pools[AGAINST].figures(), pools[AGAINST].resampled(drawn)
    for case, pool in pools.items():
        own, again = pool.figures(), pool.resampled(drawn)
        moves = [one[case][1] for one in played]
        few, many = interval([sum(n * x for n, x in zip(weights, moves, strict=True)) / PAIRS for weights in drawn])
        both = list(zip(again, spread, strict=True))
        mean = interval([one.wait_mean_s / other.wait_mean_s - 1 for one, other in both])
        tail = interval([one.wait_p99_s / other.wait_p99_s for one, other in both])
        change, ratio = own.wait_mean_s / base.wait_mean_s - 1, own.wait_p99_s / base.wait_p99_s
        table.add_row(
            str(case), _cell(own, again, "wait_mean_s", 1), _cell(own, again, "wait_p99_s"),
            _cell(own, again, "immediate", 1, 100), _cell(own, again, "slo_attainment", 1, 100),
            _cell(own, again, "switches_per_hour"), f"{sum(moves) / PAIRS:.0f} [{few:.0f}, {many:.0f}]",
            f"{own.wait_max_s:.0f}", f"{change:+.1%} [{mean[0]:+.1%}, {mean[1]:+.1%}]",
            f"{ratio:.2f} [{tail[0]:.2f}, {tail[1]:.2f}]",
        )  # fmt: skip
        figures |= {f"{scenario}, {case}: mean wait %": 100 * change, f"{scenario}, {case}: ratio of p99": ratio}
    Console(width=210).print(table)
    return figures


def _cell(own: Figures, again: Sequence[Figures], name: str, digits: int = 0, scale: float = 1.0) -> str:
    """A figure with its interval."""
    low, high = interval([getattr(one, name) for one in again])
    return f"{scale * getattr(own, name):.{digits}f} [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"
