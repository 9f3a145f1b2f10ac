"""Fairness under load: the longest wait, and the waits of tiers under overload. Pure but ``main``.

    python -m kybernate.lab.studies.fairness [--windows N] [--trace DERIVED_SERVEGEN]

The tables of ``docs/dev/policy.md``; ``tests/simulate/test_fairness.py`` holds the policy to them on fewer windows.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.model import Outcome, Scenario
from kybernate.lab.simulate.scenarios import reference, regime

TIERS = {"gold": (2.0, 12.0), "silver": (1.0, 30.0), "bronze": (0.5, 120.0)}
"""Weight and SLO seconds."""
POLICY = "kyb-bounded"
SWITCH_SECONDS = 7.0


@dataclass(frozen=True, slots=True)
class Share:
    """What the seats of one tier got, over several windows. Model seconds."""

    tier: str
    requests: int
    wait_mean_s: float
    wait_max_s: float
    slo_attainment: float


def too_much(kind: str, window: int, *, equal: bool = False) -> Scenario:
    """Half an hour at load 1.5. From window to window the tiers go round, so that each has every rate; ``equal``: with
    weight 1 and their own SLOs.
    """
    made, names = regime(kind, 1.5, SWITCH_SECONDS, window, duration=1800.0), tuple(TIERS)
    seats = []
    for index, seat in enumerate(made.seats):
        tier = names[(index + window) % len(names)]
        weight, slo = TIERS[tier]
        seats.append(replace(seat, tier=tier, weight=1.0 if equal else weight, slo_seconds=slo))
    return replace(made, seats=tuple(seats))


def shares(played: Iterable[tuple[Scenario, Outcome]]) -> dict[str, Share]:
    """By tier, the requests of all runs together."""
    waits: dict[str, list[float]] = {}
    met: dict[str, int] = {}
    for scenario, outcome in played:
        for index, wait in zip(scenario.seat, outcome.wait, strict=True):
            seat = scenario.seats[index]
            waits.setdefault(seat.tier, []).append(wait)
            met[seat.tier] = met.get(seat.tier, 0) + (wait <= seat.slo_seconds)
    return {
        tier: Share(tier, len(own), sum(own) / len(own), max(own), met[tier] / len(own)) for tier, own in waits.items()
    }


def tiers(kind: str, windows: int, *, equal: bool = False) -> dict[str, Share]:
    """What each tier gets at load 1.5."""
    made = [too_much(kind, window, equal=equal) for window in range(windows)]
    return shares((one, run(one, POLICIES[POLICY](), RunOptions(name=POLICY))) for one in made)


def longest(scenarios: Iterable[Scenario], policy: str = POLICY) -> tuple[float, float]:
    """(longest wait, longest without the drain of the last holder), seconds, of scenarios with one slot."""
    most = beyond = 0.0
    for scenario in scenarios:
        outcome = run(scenario, POLICIES[policy](), RunOptions(name=policy))
        most = max((most, *outcome.wait))
        beyond = max((beyond, *undrained(scenario, outcome)))
    return most, beyond


def undrained(scenario: Scenario, outcome: Outcome) -> list[float]:
    """Each wait less the part of it in which the last incumbent before it drained."""
    visits = sorted(outcome.visits, key=lambda visit: visit.begun)
    before = {(visits[place].seat, visits[place].begun): visits[place - 1] for place in range(1, len(visits))}
    own: dict[int, list[float]] = {}
    for visit in visits:
        own.setdefault(visit.seat, []).append(visit.begun)
    found = []
    for at, seat, wait in zip(scenario.at, scenario.seat, outcome.wait, strict=True):
        begun = max((one for one in own[seat] if one <= at + wait), default=0.0)
        left = before.get((seat, begun))
        drained = 0.0
        if left is not None and wait > 0:
            ended = left.gone - scenario.seats[left.seat].park_seconds
            drained = max(0.0, ended - max(at, left.closed))
        found.append(wait - drained)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m kybernate.lab.studies.fairness", description="Tables of fairness.")
    parser.add_argument("--windows", type=int, default=8, help="half hours at load 1.5, five times as many hours below")
    parser.add_argument("--trace", type=Path, help="derived ServeGen trace: its 24 hours, too")
    options = parser.parse_args(arguments)
    if options.windows < 1:
        parser.error(f"--windows {options.windows}: at least 1 is needed")
    say = sys.stdout.write
    for kind in ("poisson", "bursty"):
        for equal in (False, True):
            weights = "equal weights" if equal else "weights 2, 1, 1/2"
            say(f"{kind}, load 1.5, {weights}: tier, mean s, max s, in SLO %\n")
            got = tiers(kind, options.windows, equal=equal)
            for tier, share in ((tier, got[tier]) for tier in TIERS if tier in got):
                say(f"  {tier:7} {share.wait_mean_s:6.1f} {share.wait_max_s:5.0f} {100 * share.slo_attainment:6.1f}\n")
    say(f"{POLICY}: longest wait s, and without the incumbent's drain (6 SLO are 120 s)\n")
    for kind in ("poisson", "bursty"):
        for load in (0.5, 0.9):
            hours = (regime(kind, load, SWITCH_SECONDS, window) for window in range(5 * options.windows))
            say("  {} load {}: {:.0f} {:.0f}\n".format(kind, load, *longest(hours)))
    hours = (reference("servegen", window, trace=options.trace) for window in range(24))
    source = options.trace.name if options.trace else "generated like servegen"
    say("  {}, 24 hours: {:.0f} {:.0f}\n".format(source, *longest(hours)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
