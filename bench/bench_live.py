"""Live against simulated: the mean wait of the demo's arrivals on a real stack, and in the simulator with its costs.

Each seed plays a part of the shipped workload against a private stack with fake GPUs; then the simulator plays the same
arrivals with the same policy on the same groups. From the live run it gets only what parking and activating cost on
average (the phases of all its switches, control included), and how much longer than the fake engine's constants the
routers saw requests in flight. At speed 10 a wall millisecond is 10 model milliseconds: a busy machine shows.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kybernate.config import load
from kybernate.dev.demo import workload
from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.replay import Player, client_session
from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.watch import ObservedSwitch, Watch
from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.stack import LAPTOP, Stack, StackOptions
from kybernate.lab.simulate.engine import run as simulate
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, SimSeat
from kybernate.lab.simulate.world import RunOptions
from kybernate.lab.traces import Arrival
from kybernate.policy.estimators import SERVICE_WEIGHT, Ewma

SPEED = 10.0
SEEDS = (1, 2, 3, 4, 5)
SECONDS = 400.0
"""Model seconds of the workload that each seed plays."""
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Played:
    """What one live run gave."""

    arrivals: tuple[Arrival, ...]
    waits: tuple[float, ...]
    errors: int
    late_seconds: float
    """95 % of the requests were sent later than they should have been by less than this, model seconds."""
    groups: dict[str, list[dict[str, Any]]]
    """By group, its seats as ``kyb why`` shows them at the end."""
    switches: tuple[ObservedSwitch, ...]


async def run() -> dict[str, float]:
    """The figures: by seed and over all, model seconds."""
    figures: dict[str, float] = {}
    live: list[float] = []
    simulated: list[float] = []
    for seed in SEEDS:
        played = await _live(seed)
        stretch = _stretch(played)
        outcome = _simulated(played, seed, stretch)
        live.append(sum(played.waits) / len(played.waits))
        simulated.append(sum(outcome.wait) / len(outcome.wait))
        figures |= {
            f"seed {seed}: requests": float(len(played.arrivals)),
            f"seed {seed}: errors": float(played.errors),
            f"seed {seed}: live mean wait s": live[-1],
            f"seed {seed}: simulated mean wait s": simulated[-1],
            f"seed {seed}: live / simulated": live[-1] / simulated[-1],
            f"seed {seed}: live p95 wait s": percentile(played.waits, 0.95) or 0.0,
            f"seed {seed}: simulated p95 wait s": percentile(outcome.wait, 0.95) or 0.0,
            f"seed {seed}: client late p95 s": played.late_seconds,
            f"seed {seed}: in flight longer than computed, times": stretch,
            f"seed {seed}: live switches": float(len(played.switches)),
            f"seed {seed}: simulated switches": float(outcome.counters["switches"]),
        }
    ratio = sum(live) / sum(simulated)
    return figures | {"mean live wait s": sum(live) / len(live), "live / simulated over all seeds": ratio}


async def _live(seed: int) -> Played:
    options = StackOptions(
        port=0, gpus=4, speed=SPEED, announce=False, settings={"router": {"KYB_HOLD_SECONDS": "1800"}}
    )
    stack = Stack(options)
    models = [pod.model for pod in stack.plan.pods]
    arrivals = tuple(one for one in workload.generate(models, seed=seed) if one.at_seconds < SECONDS)
    async with stack, client_session() as session:
        await stack.ready(READY_SECONDS)
        player, watch = Player([stack.url], SPEED, expected_text, session), Watch()
        ready = asyncio.Event()
        following = asyncio.create_task(watch.follow(session, stack.url, ready))
        await ready.wait()
        await player.play(arrivals)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        async with session.get(f"{stack.url}/v1/why") as answer:
            (node,) = (await answer.json())["nodes"]
    good = [sample for sample in player.tally.samples if sample.verdict is Verdict.OK]
    late = percentile([sample.late_seconds * SPEED for sample in good], 0.95) or 0.0
    waits = tuple(sample.wait_seconds or 0.0 for sample in good)
    groups = {group["group"]: group["seats"] for group in node["groups"] if group["seats"]}
    return Played(arrivals, waits, len(arrivals) - len(good), late, groups, tuple(watch.switches))


def _stretch(played: Played) -> float:
    """How much longer requests were in flight than the fake engine computes: connections, chunks, a busy machine."""
    seen = expected = 0.0
    for seat in (seat for members in played.groups.values() for seat in members):
        service = Ewma(SERVICE_WEIGHT)  # as the manager learned it, of what it would have been alone
        for one in played.arrivals:
            if one.model == seat["model"]:
                service.add(_service(one))
        seen, expected = seen + seat["service_seconds"], expected + service.value
    return seen / expected


def _simulated(played: Played, seed: int, stretch: float) -> Outcome:
    seats = [_seat(name, seat, played.switches) for name, members in played.groups.items() for seat in members]
    index = {seat.model: number for number, seat in enumerate(seats)}
    scenario = Scenario(
        name=f"demo {seed}",
        seats=tuple(seats),
        groups=tuple(SimGroup(name) for name in played.groups),
        at=tuple(one.at_seconds for one in played.arrivals),
        seat=tuple(index[one.model] for one in played.arrivals),
        service=tuple(_service(one) * stretch for one in played.arrivals),
        duration=SECONDS,
        cap=EngineOptions("").max_running,
    )
    policy = load(LAPTOP / "config.yaml").policy.build()
    return simulate(scenario, policy, RunOptions(seed=seed))


def _seat(group: str, seat: dict[str, Any], switches: Sequence[ObservedSwitch]) -> SimSeat:
    """A seat with the mean costs of this run: activating its own, parking its group's."""
    there = [one.seconds for one in switches if one.group == group]
    own = [one.seconds for one in switches if one.seat == seat["seat"]] or there
    return SimSeat(
        name=seat["seat"],
        group=group,
        park_seconds=SPEED * (_mean([one["total"] - one["drain"] - _back(one) for one in there]) + _closing(there)),
        activate_seconds=SPEED * _mean([_back(one) for one in own]),
        model=seat["model"],
        tier=seat["tier"],
        weight=seat["weight"],
        slo_seconds=seat["slo_seconds"],
    )


def _back(seconds: Mapping[str, float]) -> float:
    return seconds["activate"] + seconds["verify"] / 2 + seconds["release"]


def _closing(switches: Sequence[Mapping[str, float]]) -> float:
    """What closing a seat takes where nothing was in flight: the quickest tenth of all drains."""
    return percentile([one["drain"] for one in switches], 0.1) or 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 2.0 / SPEED


def _service(one: Arrival) -> float:
    engine = EngineOptions("")
    return one.prompt_tokens / engine.prefill_tokens_per_second + one.output_tokens / engine.tokens_per_second
