"""Transfers that share the host, side by side (the link is shared fairly) and in turn.

Simulated: 40 models on 8 groups of one pool, ``kyb-balanced``, two hours each; without a limit, and with 2 or 1
transfers at full speed. Live: 24 models on 8 groups of a real stack whose fake GPUs share a link of 2 transfers, and
the simulator with the same arrivals, seats and costs. The costs are those of the live run; side by side those of a run
without a limit, since its own contain what transfers wait for each other.

``python -m bench lanes``: the first part takes two minutes of one core, and its figures do not depend on the machine;
the second takes half an hour, and a busy machine shows.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from bench.bench_live import Live, measured
from kybernate.dev.demo import workload
from kybernate.dev.demo.simulated import simulated
from kybernate.dev.stack import Stack
from kybernate.lab.simulate.engine import run as play
from kybernate.lab.simulate.generate import mmpp, poisson, together, zipf
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.node import HARDWARE, Node, on_node, sized_seats
from kybernate.lab.simulate.scenarios import HOUR, numbered, services
from kybernate.lab.simulate.world import RunOptions
from kybernate.lab.traces import Arrival
from kybernate.policy import POLICIES
from tests.stack.pods import pod, small_node

POLICY = "kyb-balanced"
MODELS, GROUPS, WINDOWS = 40, 8, 2
CASES = (("bursts", 1.0, "fast"), ("bursts", 1.0, "stock"), ("poisson", 0.15, "stock"))
"""Arrivals, requests per second, cost."""
MAKERS = {"bursts": mmpp, "poisson": poisson}

SEATS, LANES = 3, 2
"""Of each group; of the link."""
SEEDS, SECONDS, REQUESTS = (1, 2, 3), 350.0, 140
SPEED = 4.0
VRAM_GIB, GIB_PER_SECOND = 72, 12
"""Copies of 6 s fill the link. Of 36 GiB they do not, and in turn gains nothing."""
SIMULATIONS = 20
WAYS = {"no limit": (0, True), "side by side": (LANES, True), "in turn": (LANES, False)}
"""Lanes of the link, and whether the node disregards them."""


async def run() -> dict[str, float]:
    """Mean wait and p99 in seconds, and per cent within 20 s; live over simulated."""
    return _simulated() | await _live()


def _simulated() -> dict[str, float]:
    figures: dict[str, float] = {}
    for case in CASES:
        for lanes, side_by_side in ((0, True), (2, True), (2, False), (1, True), (1, False)):
            waits: list[float] = []
            for window in range(WINDOWS):
                played = replace(_hour(*case, window), lanes=lanes)
                waits += play(played, POLICIES[POLICY](), RunOptions(side_by_side=side_by_side)).wait
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


async def _live() -> dict[str, float]:
    models = [f"m{number:02}" for number in range(GROUPS * SEATS)]
    figures: dict[str, float] = {}
    both: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        arrivals = tuple(workload.generate(models, seed=seed, requests=REQUESTS, duration=SECONDS))
        free: Live | None = None
        for way, (lanes, side_by_side) in WAYS.items():
            found = await _on_stack(models, arrivals, lanes, side_by_side)
            free = free or found
            played = replace(found.played, steps=free.played.steps) if side_by_side else found.played
            link = {"lanes": lanes, "side_by_side": side_by_side, "copy_seconds": VRAM_GIB / GIB_PER_SECOND}
            outcomes = simulated(played, POLICIES[POLICY](), SIMULATIONS, **link)
            live, expected = fmean(found.waits), fmean(fmean(one.wait) for one in outcomes)
            both[way].append((live, expected))
            name = f"seed {seed}, {way}"
            figures |= {
                f"{name}: errors": float(found.errors),
                f"{name}: live mean wait s": live,
                f"{name}: simulated mean wait s": expected,
                f"{name}: live switches": float(found.switches),
                f"{name}: simulated switches": fmean(one.counters["switches"] for one in outcomes),
                f"{name}: client late p95 s": found.late_seconds,
            }
    means = {way: tuple(map(fmean, zip(*found, strict=True))) for way, found in both.items()}
    for way, (live, expected) in means.items():
        figures |= {f"{way}: live mean wait s": live, f"{way}: live / simulated": live / expected}
    for kind, name in enumerate(("live", "simulated")):
        figures[f"in turn / side by side, {name}"] = means["in turn"][kind] / means["side by side"][kind]
    return figures


async def _on_stack(models: Sequence[str], arrivals: tuple[Arrival, ...], lanes: int, side_by_side: bool) -> Live:
    config = f"""
profiles: [{{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: {SEATS}, rebalance: false}}]
policy: {{name: {POLICY}}}
lanes: {[] if side_by_side else [{"transfers": lanes}]}
"""
    with tempfile.TemporaryDirectory() as folder:
        options = small_node(
            Path(folder),
            config,
            (pod(model, vram=f"{VRAM_GIB}GiB") for model in models),
            gpus=GROUPS,
            speed=SPEED,
            settings={"router": {"KYB_HOLD_SECONDS": "1800"}},
            arguments={"driver": ("--lanes", str(lanes), "--bandwidth", f"{GIB_PER_SECOND}GiB")},
        )
        return await measured(Stack(options), arrivals)
