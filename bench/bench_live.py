"""Live against simulated: the mean wait of the demo's arrivals on a real stack, and in the simulator with its costs.

Each seed plays a part of the shipped workload against a private stack with fake GPUs; then the simulator plays the same
arrivals with the same policy on the same groups. It gets two things from the live run, as the policy did: what parking
and activating each seat cost (the manager's learned values, control overhead included), and nothing else. Service
times are the fake engine's constants. At speed 10 a wall millisecond is 10 model milliseconds: a busy machine shows.
"""

from dataclasses import dataclass
from typing import Any

from kybernate.config import load
from kybernate.demo import workload
from kybernate.demo.replay import Player, client_session
from kybernate.demo.report import percentile
from kybernate.demo.verdict import Verdict
from kybernate.fakes.engine.answers import expected_text
from kybernate.fakes.engine.engine import EngineOptions
from kybernate.simulate.engine import run as simulate
from kybernate.simulate.engine_world import Options
from kybernate.simulate.model import Outcome, Scenario, SimGroup, SimSeat
from kybernate.stack import LAPTOP, Stack, StackOptions
from kybernate.traces import Arrival

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


async def run() -> dict[str, float]:
    """The figures: by seed and over all, model seconds."""
    figures: dict[str, float] = {}
    live: list[float] = []
    simulated: list[float] = []
    for seed in SEEDS:
        played = await _live(seed)
        outcome = _simulated(played, seed)
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
        player = Player(stack.url, SPEED, expected_text, session)
        await player.play(arrivals)
        async with session.get(f"{stack.url}/v1/why") as answer:
            (node,) = (await answer.json())["nodes"]
    good = [sample for sample in player.tally.samples if sample.verdict is Verdict.OK]
    late = percentile([sample.late_seconds * SPEED for sample in good], 0.95) or 0.0
    waits = tuple(sample.wait_seconds or 0.0 for sample in good)
    groups = {group["group"]: group["seats"] for group in node["groups"] if group["seats"]}
    return Played(arrivals, waits, len(arrivals) - len(good), late, groups)


def _simulated(played: Played, seed: int) -> Outcome:
    seats = [_seat(name, seat) for name, members in played.groups.items() for seat in members]
    index = {seat.model: number for number, seat in enumerate(seats)}
    scenario = Scenario(
        name=f"demo {seed}",
        seats=tuple(seats),
        groups=tuple(SimGroup(name) for name in played.groups),
        at=tuple(one.at_seconds for one in played.arrivals),
        seat=tuple(index[one.model] for one in played.arrivals),
        service=tuple(_service(one) for one in played.arrivals),
        duration=SECONDS,
        cap=EngineOptions("").max_running,
    )
    policy = load(LAPTOP / "config.yaml").policy.build()
    return simulate(scenario, policy, Options(seed=seed))


def _seat(group: str, seat: dict[str, Any]) -> SimSeat:
    return SimSeat(
        name=seat["seat"],
        group=group,
        park_seconds=seat["park_seconds"],
        activate_seconds=seat["activate_seconds"],
        model=seat["model"],
        tier=seat["tier"],
        weight=seat["weight"],
        slo_seconds=seat["slo_seconds"],
    )


def _service(one: Arrival) -> float:
    engine = EngineOptions("")
    return one.prompt_tokens / engine.prefill_tokens_per_second + one.output_tokens / engine.tokens_per_second
