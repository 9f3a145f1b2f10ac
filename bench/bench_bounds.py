"""How near the policies come to the best possible, and what it costs to know: the exact optimum of small cases (value
iteration, for the mean wait and for requests within their SLO) and certificates of reference windows (dual bound and
clairvoyant beam).

``python -m bench bounds``, or with the derived ServeGen trace: ``python -m bench.bench_bounds --trace FILE``.
Times depend on the machine; the first certificate after an installation compiles for about 10 s of CPU.
"""

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kybernate.lab.baselines import POLICIES
from kybernate.lab.bounds.certificate import certificate
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.model import Scenario
from kybernate.lab.simulate.scenarios import reference
from kybernate.lab.studies import mdp, mdp_slo
from kybernate.lab.studies.mdp import LongestFirst
from kybernate.policy import Policy

CASES = {
    "0.06/s": (mdp.WaitCase(mdp.zipf(0.06)), 6.87),
    "0.12/s": (mdp.WaitCase(mdp.zipf(0.12)), 10.46),
    "0.30/s": (mdp.WaitCase(mdp.zipf(0.30)), 17.05),
    "0.12/s, moves 10 s": (mdp.WaitCase(mdp.zipf(0.12), park=10.0, restore=10.0), 31.05),
    "0.12/s, decodes 30 s": (mdp.WaitCase(mdp.zipf(0.12), service=30.0), 83.0),
    "the same, limit 16": (mdp.WaitCase(mdp.zipf(0.12), service=30.0, limit=16), float("nan")),
}
"""The prototype study's cases (docs/dev/policy.md) with its optima; it cut queues at 11."""

RULES: dict[str, Policy] = {
    "exhaustive+LQ, parks": LongestFirst(idle="park", ties="hotter"),
    "same, keeps": LongestFirst(idle="keep", ties="hotter"),
    "gate: longer": LongestFirst("longer", "keep", "hotter"),
    "gate: first": LongestFirst("first", "keep", "hotter"),
    "LQ, colder, newsvendor": LongestFirst(),
    **{name: POLICIES[name]() for name in ("kyb-balanced", "kyb-bounded", "kyb-slo", "exhaustive", "cmu-setup")},
}
SLO_CASES = {
    "3 seats, moves 10 s, SLO 20 s": mdp_slo.SloCase(mdp.zipf(0.12), step=5.0, slo_steps=4),
    "4 seats, moves 10 s, SLO 20 s": mdp_slo.SloCase(mdp.zipf(0.12, 4), step=5.0, slo_steps=4),
}
SLO_POLICIES = ("kyb-slo", "kyb-balanced", "exhaustive")
SLO_HOURS, SLO_SECONDS, SLO_BUDGET = 8, 3600, 30.0
"""Of the same model, for those who know the future; seconds of model time and of search for each."""

WINDOWS = ("poisson", "bursty", "servegen")
HALF_HOUR_BUDGET, HOUR_BUDGET = 300.0, 120.0


async def run(trace: Path | None = None) -> dict[str, float]:
    """Prints three tables; returns their figures."""
    console = Console(width=170)
    return {**optima(console), **attainable(console), **windows(console, trace)}


def optima(console: Console) -> dict[str, float]:
    """Ratios to the exact optimum."""
    table = Table(title="mean wait over the exact optimum's, three seats, Zipf")
    for name in ("case", "published s", "optimum s", *RULES):
        table.add_column(name, justify="right")
    figures: dict[str, float] = {}
    for name, (case, published) in CASES.items():
        best = mdp.solve(case)
        figures[f"optimum_{name}"] = best.mean_wait
        ratios = {rule: mdp.ratio(case, policy, best) for rule, policy in RULES.items()}
        figures |= {f"ratio_{name}_{rule}": ratio for rule, ratio in ratios.items()}
        table.add_row(name, f"{published:.2f}", f"{best.mean_wait:.2f}", *(f"{ratio:.3f}" for ratio in ratios.values()))
    console.print(table)
    return figures


def attainable(console: Console) -> dict[str, float]:
    """Shares within the SLO: the best causal policy's, the policies' and the clairvoyant's that restores on demand."""
    table = Table(title="requests within their SLO, 0.12/s, Zipf")
    for name in (
        "case",
        "best causal",
        *SLO_POLICIES,
        "kyb-slo of the best",
        "on demand, future known",
        "best of that",
    ):
        table.add_column(name, justify="right")
    figures: dict[str, float] = {}
    for name, case in SLO_CASES.items():
        best = mdp_slo.solve(case).attained
        reached = {policy: mdp_slo.evaluate(case, POLICIES[policy]()).attained for policy in SLO_POLICIES}
        hours = [mdp_slo.played(case, round(SLO_SECONDS / case.step), seed) for seed in range(SLO_HOURS)]
        found = [(certificate(hour, seconds_budget=SLO_BUDGET, objective="slo"), len(hour.at)) for hour in hours]
        known = sum((1 - one.reactive) * count for one, count in found) / sum(count for _, count in found)
        figures |= {f"slo_{name}_optimum": best, f"slo_{name}_clairvoyant": known}
        figures |= {f"slo_{name}_{policy}": share for policy, share in reached.items()}
        row = (best, *reached.values(), reached["kyb-slo"] / best, known, best / known)
        table.add_row(name, *(f"{share:.1%}" for share in row))
    console.print(table)
    return figures


def windows(console: Console, trace: Path | None) -> dict[str, float]:
    """Certificates of half an hour and an hour of each reference, and where policies stand."""
    table = Table(title="certificates, mean wait s (seconds of wall and CPU)")
    for name in (
        "window", "requests", "no schedule below", "best found", "bracket %", "on demand: below", "found", "bracket %",
        "kyb-balanced", "exhaustive", "wall s", "CPU s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    figures: dict[str, float] = {}
    for name in WINDOWS:
        hour = reference(name, 0, trace=trace if name == "servegen" else None)
        for minutes, budget in ((30, HALF_HOUR_BUDGET), (60, HOUR_BUDGET)):
            window = first_minutes(hour, minutes)
            cpu = time.process_time()
            found = certificate(window, seconds_budget=budget)
            cpu = time.process_time() - cpu
            waits = [found.value(play(window, POLICIES[policy]())) for policy in ("kyb-balanced", "exhaustive")]
            figures |= {
                f"{name}_{minutes}_bracket": found.bracket,
                f"{name}_{minutes}_reactive_bracket": found.reactive_bracket,
                f"{name}_{minutes}_seconds": found.seconds,
                f"{name}_{minutes}_cpu_seconds": cpu,
            }
            table.add_row(
                f"{name} {minutes} min", str(found.requests), f"{found.lower_bound:.2f}",
                f"{found.best_feasible:.2f}", f"{found.bracket:.1%}", f"{found.reactive_lower_bound:.2f}",
                f"{found.reactive:.2f}", f"{found.reactive_bracket:.1%}", *(f"{wait:.2f}" for wait in waits),
                f"{found.seconds:.0f}", f"{cpu:.0f}",
            )  # fmt: skip
    console.print(table)
    return figures


def first_minutes(scenario: Scenario, minutes: int) -> Scenario:
    """The beginning of a window."""
    end = 60.0 * minutes
    count = sum(at < end for at in scenario.at)
    return replace(
        scenario, name=f"{scenario.name}, {minutes} min", at=scenario.at[:count], seat=scenario.seat[:count],
        service=scenario.service[:count], duration=min(end, scenario.duration),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="the derived ServeGen trace; without it: generated alike")
    asyncio.run(run(parser.parse_args().trace))
