"""Live against simulated: the mean wait of the demo's arrivals on a real stack, and in the simulator with its costs.

Each seed plays a part of the shipped workload against a private stack with fake GPUs; then the simulator plays the same
arrivals with the same policy on the same groups, with the costs of the live run. Seats stay on their groups. At speed
10 a wall millisecond is 10 model milliseconds: a busy machine shows.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kybernate.config import load
from kybernate.dev.demo import workload
from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.replay import Player, client_session
from kybernate.dev.demo.report import control_seconds, percentile
from kybernate.dev.demo.session import seats_by_group, with_profiles
from kybernate.dev.demo.simulated import Played, simulated, stretch
from kybernate.dev.demo.watch import Watch
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.stack import LAPTOP, Stack, StackOptions
from kybernate.lab.traces import Arrival

SPEED = 10.0
SEEDS = (1, 2, 3, 4, 5)
SECONDS = 400.0
"""Model seconds of the workload that each seed plays."""
READY_SECONDS = 180.0


@dataclass(frozen=True)
class Live:
    """What one live run gave."""

    played: Played
    waits: tuple[float, ...]
    errors: int
    late_seconds: float
    """95 % of the requests were sent later than they should have been by less than this, model seconds."""
    switches: int


async def run() -> dict[str, float]:
    """The figures: by seed and over all, model seconds."""
    figures: dict[str, float] = {}
    live: list[float] = []
    expected: list[float] = []
    for seed in SEEDS:
        found = await _live(seed)
        played, waits = found.played, found.waits
        policy = load(LAPTOP / "config.yaml").policy.build()
        (outcome,) = simulated(played, policy)
        live.append(sum(waits) / len(waits))
        expected.append(sum(outcome.wait) / len(outcome.wait))
        figures |= {
            f"seed {seed}: requests": float(len(played.arrivals)),
            f"seed {seed}: errors": float(found.errors),
            f"seed {seed}: live mean wait s": live[-1],
            f"seed {seed}: simulated mean wait s": expected[-1],
            f"seed {seed}: live / simulated": live[-1] / expected[-1],
            f"seed {seed}: live p95 wait s": percentile(waits, 0.95) or 0.0,
            f"seed {seed}: simulated p95 wait s": percentile(outcome.wait, 0.95) or 0.0,
            f"seed {seed}: client late p95 s": found.late_seconds,
            f"seed {seed}: in flight longer than computed, times": stretch(played),
            f"seed {seed}: live switches": float(found.switches),
            f"seed {seed}: simulated switches": float(outcome.counters["switches"]),
        }
    ratio = sum(live) / sum(expected)
    return figures | {"mean live wait s": sum(live) / len(live), "live / simulated over all seeds": ratio}


async def _live(seed: int) -> Live:
    options = StackOptions(
        port=0, gpus=4, speed=SPEED, announce=False, settings={"router": {"KYB_HOLD_SECONDS": "1800"}}
    )
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(with_profiles(options, Path(folder), rebalance=False))
        models = [pod.model for pod in stack.plan.pods]
        generated = workload.generate(models, seed=seed)
        return await measured(stack, tuple(one for one in generated if one.at_seconds < SECONDS))


async def measured(stack: Stack, arrivals: tuple[Arrival, ...]) -> Live:
    """Start this stack and play these arrivals."""
    speed = stack.options.speed
    async with stack, client_session() as session:
        await stack.ready(READY_SECONDS)
        player, watch = Player([stack.url], speed, expected_text, session), Watch()
        ready = asyncio.Event()
        following = asyncio.create_task(watch.follow(session, stack.console, ready))
        async with asyncio.timeout(READY_SECONDS):
            await ready.wait()
        before = await seats_by_group(session, stack.console)
        await player.play(arrivals)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        after = await seats_by_group(session, stack.console)
    good = [sample for sample in player.tally.samples if sample.verdict is Verdict.OK]
    late = percentile([sample.late_seconds * speed for sample in good], 0.95) or 0.0
    waits = tuple(sample.wait_seconds or 0.0 for sample in good)
    control = control_seconds(player.tally.samples, watch.switches) * speed
    played = Played(arrivals, before, after, tuple(watch.steps), speed, control_seconds=control)
    return Live(played, waits, len(arrivals) - len(good), late, len(watch.switches))
