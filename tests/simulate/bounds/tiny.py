"""Instances small enough to be solved by trying everything."""

import functools
import random

from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat

SLO = 6.0


def random_scenario(seed: int, *, requests: int = 6, seats: int = 3, cap: int = 64) -> Scenario:
    """A few requests within 40 s on one slot, at odd times."""
    chance = random.Random(seed)
    at = tuple(sorted(chance.uniform(0.0, 40.0) for _ in range(requests)))
    return Scenario(
        f"tiny-{seed}",
        tuple(
            SimSeat(f"s{i}", "A", chance.uniform(0.5, 4.0), chance.uniform(0.5, 4.0), slo_seconds=SLO)
            for i in range(seats)
        ),
        (SimGroup("A"),),
        at,
        tuple(chance.randrange(seats) for _ in at),
        tuple(chance.uniform(0.3, 6.0) for _ in at),
        40.0,
        cap=cap,
    )


def exact(scenario: Scenario, *, reactive: bool = False, objective: str = "wait") -> float:
    """The least total by trying all orders of visits and all ways to close them. One slot, cap never reached.

    In a given order with given requests per visit, beginning each visit as early as possible is best, but not before
    its first request comes, less the time to restore (reactive: not before that request).
    """
    own = [[r for r in range(len(scenario.at)) if scenario.seat[r] == i] for i in range(len(scenario.seats))]

    def costs(wait: float) -> float:
        return wait if objective == "wait" else float(wait > SLO + 1e-9)

    @functools.cache
    def least(free: float, served: tuple[int, ...]) -> float:
        best = 0.0 if all(k == len(o) for k, o in zip(served, own, strict=True)) else float("inf")
        for i, seat in enumerate(scenario.seats):
            for upto in range(served[i] + 1, len(own[i]) + 1):
                mine = own[i][served[i] : upto]
                first = scenario.at[mine[0]]
                begun = max(free, first if reactive else first - seat.activate_seconds)
                active = begun + seat.activate_seconds
                if upto < len(own[i]) and scenario.at[own[i][upto]] <= active:
                    continue  # it waits already, so it is admitted
                waits = [max(0.0, active - scenario.at[r]) for r in mine]
                gone = max(max(active, scenario.at[r]) + scenario.service[r] for r in mine) + seat.park_seconds
                after = (*served[:i], upto, *served[i + 1 :])
                best = min(best, sum(map(costs, waits)) + least(gone, after))
        return best

    return least(0.0, (0,) * len(own))
