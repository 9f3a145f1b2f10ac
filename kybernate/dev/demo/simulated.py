"""The simulator on what a stack has played: the same arrivals, policy, groups, costs, and seats active at first.

From the replay it gets what closing, parking, activating and moving took, by its events, with their spread, what the
decision and the release took, and how much longer than the fake engine's constants requests were in flight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.watch import ObservedStep
from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.dev.fakes.gpu.spec import MOVE_SECONDS
from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.model import Learned, Outcome, Scenario, SimGroup, SimSeat
from kybernate.lab.simulate.world import RunOptions
from kybernate.lab.traces import Arrival
from kybernate.policy import Policy
from kybernate.policy.estimators import SERVICE_WEIGHT, Ewma
from kybernate.seat import SeatState as S

ASSUMED_SECONDS = 2.0
"""To park or to activate where it was not seen, model seconds."""

_IDLE = 4.0
"""Closings up to so many times the shortest tenth are of seats with nothing in flight."""
_LEARNED = ("park_seconds", "activate_seconds", "service_seconds", "rate_fast", "rate_slow")


@dataclass(frozen=True)
class Played:
    """What the simulator needs of a replay."""

    arrivals: tuple[Arrival, ...]
    before: Sequence[Mapping[str, Any]]
    """The groups with their seats, as ``kyb why`` shows them at the beginning."""
    after: Sequence[Mapping[str, Any]]
    """And at the end."""
    steps: tuple[ObservedStep, ...]
    speed: float
    asked: int = 0
    """Requests that each model had been asked before it began."""
    observed_seconds: float = 0.0
    """Model seconds since the first of these."""
    control_seconds: float = 0.0
    """Model seconds from an arrival to the decision, and from the end of an activation to its requests."""


def simulated(
    played: Played,
    policy: Policy,
    seeds: int = 1,
    *,
    lanes: int = 0,
    side_by_side: bool = False,
    copy_seconds: float = math.inf,
) -> list[Outcome]:
    """Play the arrivals again, once for each seed, with costs that vary as they did; ``copy_seconds`` of these share
    the lanes."""
    costs = SwitchCosts(played)
    fixed = max(0.0, fmean((costs.park_seconds, costs.activate_seconds)) - copy_seconds)
    seats = [
        replace(costs.seat(group, seat), fixed_seconds=fixed) for group in played.before for seat in group["seats"]
    ]
    index, factor = {seat.model: number for number, seat in enumerate(seats)}, stretch(played)
    pools = [min((group["group"], *group["peers"])) for group in played.before]
    scenario = Scenario(
        name="replay",
        seats=tuple(seats),
        groups=tuple(SimGroup(group["group"], pool=pool) for group, pool in zip(played.before, pools, strict=True)),
        at=tuple(one.at_seconds for one in played.arrivals),
        seat=tuple(index[one.model] for one in played.arrivals),
        service=tuple(_service(one) * factor for one in played.arrivals),
        duration=played.arrivals[-1].at_seconds,
        cap=EngineOptions("").max_running,
        move_seconds=costs.move_seconds if any(group["peers"] for group in played.before) else None,
        loses_copy=costs.loses_copy,
        lanes=lanes,
        control_seconds=played.control_seconds,
        observed_seconds=played.observed_seconds,
    )
    options = RunOptions(jitter=costs.jitter, side_by_side=side_by_side)
    return [run(scenario, policy, replace(options, seed=seed)) for seed in range(seeds)]


def stretch(played: Played) -> float:
    """How much longer requests were in flight than the fake engine computes: connections, chunks, a busy machine."""
    expected: dict[str, Ewma] = {}
    for one in played.arrivals:  # as the manager learned it, of what it would have been alone
        expected.setdefault(one.model, Ewma(SERVICE_WEIGHT)).add(_service(one))
    asked = [seat for group in played.after for seat in group["seats"] if seat["model"] in expected]
    seen = sum(float(seat["service_seconds"]) for seat in asked)
    return seen / sum(expected[seat["model"]].value for seat in asked)


class SwitchCosts:
    """Model seconds that the steps of switches took."""

    def __init__(self, played: Played) -> None:
        self.played = played
        closing = self._took(S.DRAINING, S.PARKING)
        shortest = percentile(closing, 0.1) or 0.0
        idle = [one for one in closing if one <= _IDLE * shortest] or [0.0]
        starting, waking = self._took(S.STARTING, S.ACTIVE), self._took(S.ACTIVATING, S.ACTIVE)
        parking = self._took(S.PARKING, S.PARKED) or self._took(S.PARKING, S.BACKOFF)
        activating, moving = waking or starting, self._took(S.MIGRATING, S.ACTIVE)
        self.loses_copy = bool(waking and starting and not moving)
        self.park_seconds = fmean(idle) + fmean(parking) if parking else ASSUMED_SECONDS
        self.activate_seconds = fmean(activating) if activating else ASSUMED_SECONDS
        moved = moving or starting  # parked by restart a seat starts in any case
        self.move_seconds = max(0.0, fmean(moved) - self.activate_seconds) if moved else MOVE_SECONDS
        spread = [pstdev(took) / fmean(took) for took in (parking, activating) if took]
        self.jitter = fmean(spread) if spread else 0.0

    def seat(self, group: Mapping[str, Any], seat: Mapping[str, Any]) -> SimSeat:
        """A seat as it was at the beginning."""
        return SimSeat(
            name=seat["seat"],
            group=group["group"],
            park_seconds=self.park_seconds,
            activate_seconds=self.activate_seconds,
            model=seat["model"],
            tier=seat["tier"],
            weight=seat["weight"],
            slo_seconds=seat["slo_seconds"],
            active=seat["state"] == S.ACTIVE,
            learned=self._learned(seat) if self.played.asked else None,
        )

    def _learned(self, seat: Mapping[str, Any]) -> Learned:
        """What the manager knew of a seat at the beginning."""
        figures = {key: float(seat[key]) for key in _LEARNED}
        return Learned(**figures, count=self.played.asked)

    def _took(self, left: S, entered: S) -> list[float]:
        steps = self.played.steps
        return [one.seconds * self.played.speed for one in steps if (one.left, one.entered) == (left, entered)]


def _service(one: Arrival) -> float:
    engine = EngineOptions("")
    return one.prompt_tokens / engine.prefill_tokens_per_second + one.output_tokens / engine.tokens_per_second
