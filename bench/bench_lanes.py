"""Transfers that share the host: 40 models on 8 groups of one pool, ``kyb-balanced``, two hours each; without a limit,
and with 2 or 1 transfers at full speed, side by side (the link is shared fairly) and in turn.

``python -m bench lanes``: about two minutes on one core. Figures do not depend on the machine.
"""

from dataclasses import replace
from random import Random
from statistics import fmean

from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.generate import mmpp, poisson, together, zipf
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.node import HARDWARE, Node, on_node, sized_seats
from kybernate.lab.simulate.scenarios import HOUR, numbered, services
from kybernate.lab.simulate.world import RunOptions
from kybernate.policy import POLICIES

MODELS, GROUPS, WINDOWS = 40, 8, 2
CASES = (("bursts", 1.0, "fast"), ("bursts", 1.0, "stock"), ("poisson", 0.15, "stock"))
"""Arrivals, requests per second, cost."""
MAKERS = {"bursts": mmpp, "poisson": poisson}


async def run() -> dict[str, float]:
    """Mean wait and p99 in seconds, and per cent within 20 s."""
    figures: dict[str, float] = {}
    for case in CASES:
        for lanes, side_by_side in ((0, True), (2, True), (2, False), (1, True), (1, False)):
            waits: list[float] = []
            for window in range(WINDOWS):
                played = replace(_hour(*case, window), lanes=lanes)
                policy = POLICIES["kyb-balanced"]()
                waits += play(played, policy, RunOptions(side_by_side=side_by_side)).wait
            waits.sort()
            how = f"{lanes} lanes, {'side by side' if side_by_side else 'in turn'}" if lanes else "no limit"
            name = f"{case[0]} {case[2]}, {how}"
            figures[f"{name}: mean s"] = fmean(waits)
            figures[f"{name}: p99 s"] = waits[int(0.99 * len(waits))]
            figures[f"{name}: within 20 s %"] = 100 * sum(wait <= 20 for wait in waits) / len(waits)
    return figures


def _hour(kind: str, rate: float, cost: str, window: int) -> Scenario:
    streams = [
        iter(MAKERS[kind](rate * share, HOUR, Random(f"{kind}/{window}/{index}")))
        for index, share in enumerate(zipf(MODELS))
    ]
    at, seat = together(streams)
    made = Scenario(
        name=kind,
        seats=sized_seats(numbered(MODELS), HARDWARE[cost]),
        groups=(SimGroup("G0"),),
        at=at,
        seat=seat,
        service=services(len(at), f"{kind}/{window}"),
        duration=HOUR,
    )
    return on_node(made, Node(groups=GROUPS, cost=HARDWARE[cost], move_seconds=3.0))
