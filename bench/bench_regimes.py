"""The KYB policies against llama-swap's rule, with ``ttl`` and without, over 24 regimes: {Poisson on 4 seats, bursts
on 6} x load {0.15, 0.5, 1, 1.5} x a whole switch of {2.5, 7, 18} s, ``WINDOWS`` hours each, the same for every policy.

``python -m bench regimes``: all cores, about four minutes of CPU. Figures do not depend on the machine.
"""

import itertools
import statistics
from multiprocessing import get_context
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.measures import Figures, Pool, sampled
from kybernate.lab.simulate.scenarios import regime

AGAINST = ("exhaustive-ttl", "exhaustive")
COMPARED = ("kyb-balanced", "kyb-bounded", "kyb-slo", "fifo-switch")
REGIMES = tuple(itertools.product(("poisson", "bursty"), (0.15, 0.5, 1.0, 1.5), (2.5, 7.0, 18.0)))
WINDOWS = 40
SLO_SECONDS = 20.0
P99_LIMIT = 1.15

Regime = tuple[str, float, float]


class Against(NamedTuple):
    """One policy's figures in a regime beside those of a rule."""

    own: Figures
    rule: Figures

    @property
    def change(self) -> float:
        """Of the mean wait."""
        return self.own.wait_mean_s / self.rule.wait_mean_s - 1

    @property
    def tail(self) -> float:
        """Ratio of p99."""
        return self.own.wait_p99_s / self.rule.wait_p99_s

    @property
    def attained(self) -> float:
        """Points within the SLO."""
        return 100 * (self.own.slo_attainment - self.rule.slo_attainment)

    @property
    def at_once(self) -> float:
        """Points of requests without any wait."""
        return 100 * (self.own.immediate - self.rule.immediate)


async def run() -> dict[str, float]:
    """Prints a table of the regimes for each rule; returns what sums them up."""
    with get_context("spawn").Pool() as pool:
        found = dict(zip(REGIMES, pool.map(measured, REGIMES, chunksize=1), strict=True))
    figures: dict[str, float] = {}
    for rule in AGAINST:
        others = [name for name in (*COMPARED, *AGAINST) if name != rule]
        _print(rule, others, found)
        for name in others:
            figures |= summed_up(f"{name} against {rule}", [Against(of[name], of[rule]) for of in found.values()])
    return figures


def _print(rule: str, others: list[str], found: dict[Regime, dict[str, Figures]]) -> None:
    table = Table(
        title=f"against {rule}: change of the mean wait, ratio of p99, points within {SLO_SECONDS:g} s, points at once"
    )
    for name in ("regime", f"{rule}: mean s, p99 s, at once %", *others):
        table.add_column(name, justify="right")
    for (kind, load, switch), policies in found.items():
        base = policies[rule]
        pairs = [Against(policies[name], base) for name in others]
        cells = [f"{of.change:+.1%}  {of.tail:.2f}  {of.attained:+.1f}  {of.at_once:+.1f}" for of in pairs]
        bases = f"{base.wait_mean_s:.1f}, {base.wait_p99_s:.0f}, {100 * base.immediate:.0f}"
        table.add_row(f"{kind}, load {load:g}, switch {switch:g} s", bases, *cells)
    Console(width=190).print(table)


def measured(of: Regime) -> dict[str, Figures]:
    """Every policy on all windows of a regime, pooled."""
    scenarios = [regime(*of, window) for window in range(WINDOWS)]
    return {
        name: Pool([sampled(play(each, POLICIES[name]()), each) for each in scenarios]).figures()
        for name in (*AGAINST, *COMPARED)
    }


def summed_up(name: str, pairs: list[Against]) -> dict[str, float]:
    """Over the regimes."""
    changes, tails = [100 * of.change for of in pairs], [of.tail for of in pairs]
    return {
        f"{name}: regimes with a lower mean wait": sum(each < 0 for each in changes),
        f"{name}: change of the mean wait, median %": statistics.median(changes),
        f"{name}: the same, mean %": statistics.fmean(changes),
        f"{name}: the same, lowest %": min(changes),
        f"{name}: the same, highest %": max(changes),
        f"{name}: ratio of p99, median": statistics.median(tails),
        f"{name}: ratio of p99, highest": max(tails),
        f"{name}: regimes with a ratio of p99 above {P99_LIMIT}": sum(each > P99_LIMIT for each in tails),
        f"{name}: points within {SLO_SECONDS:g} s, mean": statistics.fmean(of.attained for of in pairs),
        f"{name}: points at once, mean": statistics.fmean(of.at_once for of in pairs),
    }
