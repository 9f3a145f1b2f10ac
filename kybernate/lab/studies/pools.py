"""One pool, ten regimes: KYB beside plain rules in the same pool, and beside bound seats.

    python -m kybernate.lab.studies.pools [--windows N] [--regime TEXT]

The table of pools of ``docs/dev/policy.md``. A window is an hour with its own draw, the same for every policy;
intervals are 95 %, bootstrap over windows. Figures do not depend on the machine.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from kybernate.lab.baselines import POLICIES, ExhaustiveTtl
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.generate import (
    SERVEGEN_TENANTS,
    SERVICE_MEAN,
    mmpp,
    poisson,
    tenant,
    together,
    zipf,
)
from kybernate.lab.simulate.measures import Pool, WindowSample, draws, interval, sampled
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup
from kybernate.lab.simulate.node import HARDWARE, Cost, parse_cost, sized_seats
from kybernate.lab.simulate.scenarios import HOUR, numbered, services
from kybernate.policy import Policy

MOVE_SECONDS = 3.0
BASE = "exhaustive-ttl"
OWN = "kyb-balanced"
KEEP = ExhaustiveTtl(60.0)
"""A cache: a model stays for a minute after its last request, and the idle holder of the group leaves for a new one."""
FEWEST = 10
"""Requests of a model in a window, below which it is not taken for the worst."""

Streams = Callable[[int, float, Random], list[Iterator[float]]]
"""(models, requests per second, chance) to the arrivals of each model."""


def _poisson(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    return [poisson(rate * share, HOUR, Random(chance.random())) for share in zipf(models)]


def _bursts(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    return [mmpp(rate * share, HOUR, Random(chance.random())) for share in zipf(models)]


def _one_hot(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    """The first has 70 % of the requests."""
    shares = (0.7, *(0.3 / (models - 1) for _ in range(models - 1)))
    return [poisson(rate * share, HOUR, Random(chance.random())) for share in shares]


def _correlated(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    """Bursts that four models have at the same time."""
    clocks = [Random(chance.random()) for _ in range(math.ceil(models / 4))]
    bursts = [list(_on_times(clock)) for clock in clocks]
    return [
        _within(bursts[index // 4], poisson(rate * share * 6, HOUR, Random(chance.random())))
        for index, share in enumerate(zipf(models))
    ]


def _diurnal(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    """Bursts below a day's curve that passes in this hour; each model has its own noon."""
    return [
        _shaded(mmpp(2 * rate * share, HOUR, Random(chance.random())), index / models, Random(chance.random()))
        for index, share in enumerate(zipf(models))
    ]


def _shaded(stream: Iterator[float], noon: float, light: Random) -> Iterator[float]:
    """Keep all at noon, a share of the hour, and none half an hour from it."""
    return (at for at in stream if light.random() < 0.5 + 0.5 * math.cos(2 * math.pi * (at / HOUR - noon)))


def _clients(models: int, rate: float, chance: Random) -> list[Iterator[float]]:
    """Intermittent clients of a hosted service."""
    kinds = [SERVEGEN_TENANTS[index % len(SERVEGEN_TENANTS)] for index in range(models)]
    total = sum(kind.share for kind in kinds)
    return [tenant(kind, rate * kind.share / total, HOUR, Random(chance.random())) for kind in kinds]


def _on_times(chance: Random, on: float = 60.0, off: float = 300.0) -> Iterator[tuple[float, float]]:
    at = 0.0 if chance.random() < on / (on + off) else chance.expovariate(1 / off)
    while at < HOUR:
        end = at + chance.expovariate(1 / on)
        yield at, end
        at = end + chance.expovariate(1 / off)


def _within(bursts: Sequence[tuple[float, float]], stream: Iterator[float]) -> Iterator[float]:
    return (at for at in stream if any(begin <= at < end for begin, end in bursts))


@dataclass(frozen=True, slots=True)
class Regime:
    """One row of the table."""

    name: str
    streams: Streams
    models: int
    groups: int
    load: float
    """Requests in flight per group, if nothing had to be switched."""
    cost: Cost

    def window(self, number: int) -> Scenario:
        """One hour; models are spread over the groups in turn."""
        chance = Random(f"{self.name}/{number}")
        rate = self.load * self.groups / SERVICE_MEAN
        at, seat = together(self.streams(self.models, rate, chance))
        names = numbered(self.models)
        seats = tuple(
            replace(one, group=f"G{index % self.groups}") for index, one in enumerate(sized_seats(names, self.cost))
        )
        return Scenario(
            name=f"{self.name}, window {number}", seats=seats,
            groups=tuple(SimGroup(f"G{index}") for index in range(self.groups)), at=at, seat=seat,
            service=services(len(at), f"{self.name}/{number}"), duration=HOUR, move_seconds=MOVE_SECONDS,
        )  # fmt: skip


FAST, STOCK, SLOW, CHEAP = HARDWARE["fast"], HARDWARE["stock"], HARDWARE["stock-slow"], parse_cost("1s/3.5s")
REGIMES = {
    one.name: one
    for one in (
        Regime("bursts 3/1", _bursts, 3, 1, 0.8, FAST),
        Regime("bursts 40/8", _bursts, 40, 8, 0.35, FAST),
        Regime("correlated 12/3", _correlated, 12, 3, 0.6, FAST),
        Regime("diurnal 12/3", _diurnal, 12, 3, 0.35, FAST),
        Regime("one hot 8/2", _one_hot, 8, 2, 0.9, FAST),
        Regime("poisson full 8/2", _poisson, 8, 2, 0.7, FAST),
        Regime("poisson light 40/8, stock", _poisson, 40, 8, 0.28, STOCK),
        Regime("poisson light 24/4, cheap", _poisson, 24, 4, 0.12, CHEAP),
        Regime("clients 10/3", _clients, 10, 3, 0.6, FAST),
        Regime("clients 20/4, slow", _clients, 20, 4, 0.2, SLOW),
    )
}

PLAYED: dict[str, tuple[Policy, bool]] = {
    BASE: (POLICIES[BASE](), True),
    OWN: (POLICIES[OWN](), True),
    "kyb-bounded": (POLICIES["kyb-bounded"](), True),
    "fifo-switch": (POLICIES["fifo-switch"](), True),
    "kept for 60 s": (KEEP, True),
    f"{OWN}, bound": (POLICIES[OWN](), False),
}
"""By row: the policy, and whether seats move."""


@dataclass(frozen=True, slots=True)
class Played:
    """One window under one policy."""

    sample: WindowSample
    worst: float
    """Share within the SLO of the model that has the lowest, of those with ``FEWEST`` requests."""


def played(scenario: Scenario, policy: Policy, *, pooled: bool) -> Played:
    """Play a window."""
    outcome = run(scenario if pooled else replace(scenario, move_seconds=None), policy, RunOptions())
    return Played(sampled(outcome, scenario), _worst(scenario, outcome))


def _worst(scenario: Scenario, outcome: Outcome) -> float:
    met: dict[int, list[bool]] = {}
    for seat, wait in zip(scenario.seat, outcome.wait, strict=True):
        met.setdefault(seat, []).append(wait <= scenario.seats[seat].slo_seconds)
    return min((fmean(own) for own in met.values() if len(own) >= FEWEST), default=1.0)


def row(own: Sequence[Played], base: Sequence[Played]) -> str:
    """Mean and p99 of a policy, both over those of the base, and points of the worst model; with intervals."""
    drawn = draws(len(own), 0)
    ours, theirs = (Pool([one.sample for one in part]) for part in (own, base))
    figures, over = ours.figures(), theirs.figures()
    again = list(zip(ours.resampled(drawn), theirs.resampled(drawn), strict=True))
    means = interval([one.wait_mean_s / other.wait_mean_s for one, other in again])
    tails = interval([one.wait_p99_s / other.wait_p99_s for one, other in again])
    gaps = [100 * (one.worst - other.worst) for one, other in zip(own, base, strict=True)]
    points = interval([sum(n * gap for n, gap in zip(weights, gaps, strict=True)) / len(gaps) for weights in drawn])
    return (
        f"{figures.wait_mean_s:6.2f} {figures.wait_p99_s:6.1f} {100 * fmean(one.worst for one in own):5.1f} "
        f"{figures.switches_per_hour:5.0f}  "
        f"{figures.wait_mean_s / over.wait_mean_s:5.2f} [{means[0]:.2f}, {means[1]:.2f}]  "
        f"{figures.wait_p99_s / over.wait_p99_s:5.2f} [{tails[0]:.2f}, {tails[1]:.2f}]  "
        f"{fmean(gaps):+5.1f} [{points[0]:+.1f}, {points[1]:+.1f}]"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of each regime."""
    parser = argparse.ArgumentParser(prog="python -m kybernate.lab.studies.pools", description="Pools in ten regimes.")
    parser.add_argument("--windows", type=int, default=8, help="hours of each regime, each with its own draw")
    parser.add_argument("--regime", default="", help="only those whose name contains this")
    options = parser.parse_args(arguments)
    if options.windows < 1:
        parser.error(f"--windows {options.windows}: at least 1 is needed")
    chosen = [one for name, one in REGIMES.items() if options.regime in name]
    if not chosen:
        parser.error(f"no regime contains {options.regime!r}; there are {', '.join(REGIMES)}")
    say = sys.stdout.write
    say(f"mean s, p99 s, worst model within the SLO %, switches/h; over {BASE}: mean, p99, points of the worst model\n")
    for regime in chosen:
        windows = [regime.window(number) for number in range(options.windows)]
        say(f"{regime.name} (models/groups), {sum(len(one.at) for one in windows)} requests\n")
        base: list[Played] = []
        for name, (policy, pooled) in PLAYED.items():
            own = [played(one, policy, pooled=pooled) for one in windows]
            base = base or own
            say(f"  {name:20} {row(own, base)}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
