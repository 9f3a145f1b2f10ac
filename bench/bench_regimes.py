"""The KYB policies against the rule that serves until idle (llama-swap's), over 24 regimes: {Poisson on 4 seats, bursts
on 6} x load {0.15, 0.5, 1, 1.5} x a whole switch of {2.5, 7, 18} s, ``WINDOWS`` hours each, the same for every policy.

``python -m bench regimes``: all cores, about three minutes of CPU. Figures do not depend on the machine.
"""

import itertools
import statistics
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from kybernate.dev.demo.report import percentile
from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.scenarios import regime

AGAINST = "exhaustive"
COMPARED = ("kyb-balanced", "kyb-bounded", "kyb-slo")
REGIMES = tuple(itertools.product(("poisson", "bursty"), (0.15, 0.5, 1.0, 1.5), (2.5, 7.0, 18.0)))
WINDOWS = 40
SLO_SECONDS = 20.0
P99_LIMIT = 1.15

Regime = tuple[str, float, float]
Measured = tuple[float, float, float]
"""Mean wait, p99, share within the SLO."""


async def run() -> dict[str, float]:
    """Prints the table of the regimes; returns what sums them up."""
    with get_context("spawn").Pool() as pool:
        found = dict(zip(REGIMES, pool.map(measured, REGIMES, chunksize=1), strict=True))
    table = Table(title=f"against {AGAINST}: change of the mean wait, ratio of p99, points within {SLO_SECONDS:g} s")
    for name in ("regime", f"{AGAINST}: mean s, p99 s", *COMPARED):
        table.add_column(name, justify="right")
    for (kind, load, switch), policies in found.items():
        base = policies[AGAINST]
        cells = [f"{change(one, base):+.1%}  {one[1] / base[1]:.2f}  {100 * (one[2] - base[2]):+.1f}" for one in
                 (policies[name] for name in COMPARED)]  # fmt: skip
        table.add_row(f"{kind}, load {load:g}, switch {switch:g} s", f"{base[0]:.1f}, {base[1]:.0f}", *cells)
    Console(width=150).print(table)
    figures: dict[str, float] = {}
    for name in COMPARED:
        figures |= summed_up(name, [(policies[name], policies[AGAINST]) for policies in found.values()])
    return figures


def measured(of: Regime) -> dict[str, Measured]:
    """Every policy on all windows of a regime."""
    scenarios = [regime(*of, window) for window in range(WINDOWS)]
    waits = {
        name: [wait for scenario in scenarios for wait in play(scenario, POLICIES[name]()).wait]
        for name in (AGAINST, *COMPARED)
    }
    return {
        name: (
            statistics.fmean(each),
            percentile(each, 0.99) or 0.0,
            sum(wait <= SLO_SECONDS for wait in each) / len(each),
        )
        for name, each in waits.items()
    }


def change(one: Measured, base: Measured) -> float:
    """Of the mean wait."""
    return one[0] / base[0] - 1


def summed_up(name: str, pairs: list[tuple[Measured, Measured]]) -> dict[str, float]:
    """Over the regimes."""
    changes = [100 * change(one, base) for one, base in pairs]
    tails = [one[1] / base[1] for one, base in pairs]
    return {
        f"{name}: regimes with a lower mean wait": sum(each < 0 for each in changes),
        f"{name}: change of the mean wait, median %": statistics.median(changes),
        f"{name}: the same, mean %": statistics.fmean(changes),
        f"{name}: the same, lowest %": min(changes),
        f"{name}: the same, highest %": max(changes),
        f"{name}: ratio of p99, median": statistics.median(tails),
        f"{name}: ratio of p99, highest": max(tails),
        f"{name}: regimes with a ratio of p99 above {P99_LIMIT}": sum(each > P99_LIMIT for each in tails),
        f"{name}: points within {SLO_SECONDS:g} s, mean": 100
        * statistics.fmean(one[2] - base[2] for one, base in pairs),
    }
