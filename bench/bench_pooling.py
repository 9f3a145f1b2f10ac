"""Two groups as one pool: twelve pairs of windows, each as two groups of one node, seats bound to their group or free
to move for 3 s, against llama-swap's rule with ``ttl`` and bound seats.

``python -m bench pooling``: all cores, about a minute of CPU. ``KYB_SERVEGEN`` is the path of the derived trace;
without it the hours of ``servegen`` are generated. Figures do not depend on the machine.
"""

import os
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.measures import Pool, WindowSample, draws, interval, measures, sampled
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.scenarios import reference

SCENARIOS = ("bursty", "servegen")
PAIRS = 12
MOVE_SECONDS = 3.0
BOUND = ("exhaustive-ttl", "exhaustive", "fifo-switch", "kyb-balanced")
POOLED = ("exhaustive-ttl", "fifo-switch", "kyb-balanced", "kyb-bounded")
CASES = (*((name, None) for name in BOUND), *((name, MOVE_SECONDS) for name in POOLED))
AGAINST = CASES[0]

Case = tuple[str, float | None]


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
    for name, move in CASES:
        both = side_by_side(first, second, move)
        outcome = play(both, POLICIES[name]())
        found[name, move] = sampled(outcome, both), measures(outcome, both).moves_per_hour
    return found


def side_by_side(first: Scenario, second: Scenario, move_seconds: float | None) -> Scenario:
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
    at, seat, service = zip(*rows, strict=True)
    return replace(
        first, seats=seats, groups=(SimGroup("G0"), SimGroup("G1")), at=at, seat=seat, service=service,
        move_seconds=move_seconds,
    )  # fmt: skip


def _shown(scenario: str, played: list[dict[Case, tuple[WindowSample, float]]]) -> dict[str, float]:
    table = Table(title=f"{scenario}, {PAIRS} pairs, against {AGAINST[0]} with bound seats")
    columns = ("policy", "mean s", "p99 s", "max s", "at once %", "in SLO %", "switches/h", "moves/h", "mean", "p99")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    drawn, figures = draws(PAIRS, 0), {}
    pools = {case: Pool([one[case][0] for one in played]) for case in CASES}
    base, spread = pools[AGAINST].figures(), pools[AGAINST].resampled(drawn)
    for case, pool in pools.items():
        own, name = pool.figures(), f"{case[0]}, {'bound' if case[1] is None else 'pooled'}"
        both = list(zip(pool.resampled(drawn), spread, strict=True))
        mean = interval([one.wait_mean_s / other.wait_mean_s - 1 for one, other in both])
        tail = interval([one.wait_p99_s / other.wait_p99_s for one, other in both])
        change, ratio = own.wait_mean_s / base.wait_mean_s - 1, own.wait_p99_s / base.wait_p99_s
        table.add_row(
            name, f"{own.wait_mean_s:.1f}", f"{own.wait_p99_s:.0f}", f"{own.wait_max_s:.0f}",
            f"{100 * own.immediate:.1f}", f"{100 * own.slo_attainment:.1f}", f"{own.switches_per_hour:.0f}",
            f"{sum(one[case][1] for one in played) / PAIRS:.0f}", f"{change:+.1%} [{mean[0]:+.1%}, {mean[1]:+.1%}]",
            f"{ratio:.2f} [{tail[0]:.2f}, {tail[1]:.2f}]",
        )  # fmt: skip
        figures |= {f"{scenario}, {name}: mean wait %": 100 * change, f"{scenario}, {name}: ratio of p99": ratio}
    Console(width=150).print(table)
    return figures
