"""The simulator on what a stack has played: the same arrivals, policy and groups, with the costs that were seen there.

From the replay it gets what parking and activating cost on average (the phases of all its switches, control included),
and how much longer than the fake engine's constants requests were in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kybernate.dev.demo.report import percentile
from kybernate.dev.demo.watch import ObservedSwitch
from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, SimSeat
from kybernate.lab.simulate.world import RunOptions
from kybernate.lab.traces import Arrival
from kybernate.policy import Policy
from kybernate.policy.estimators import SERVICE_WEIGHT, Ewma

ASSUMED_SECONDS = 2.0
"""To park or to activate where no switch was seen, model seconds."""


@dataclass(frozen=True)
class Played:
    """What the simulator needs of a replay with seats bound to their groups."""

    arrivals: tuple[Arrival, ...]
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    """By group, its seats as ``kyb why`` shows them at the end."""
    switches: tuple[ObservedSwitch, ...]
    speed: float


def simulated(played: Played, policy: Policy, *, move_seconds: float | None = None, seed: int = 0) -> Outcome:
    """Play the arrivals again, with bound seats or, with ``move_seconds``, with the groups as one pool."""
    seats = [_seat(played, name, seat) for name, members in played.groups.items() for seat in members]
    index, factor = {seat.model: number for number, seat in enumerate(seats)}, stretch(played)
    scenario = Scenario(
        name="replay",
        seats=tuple(seats),
        groups=tuple(SimGroup(name) for name in played.groups),
        at=tuple(one.at_seconds for one in played.arrivals),
        seat=tuple(index[one.model] for one in played.arrivals),
        service=tuple(_service(one) * factor for one in played.arrivals),
        duration=played.arrivals[-1].at_seconds,
        cap=EngineOptions("").max_running,
        move_seconds=move_seconds,
    )
    return run(scenario, policy, RunOptions(seed=seed))


def stretch(played: Played) -> float:
    """How much longer requests were in flight than the fake engine computes: connections, chunks, a busy machine."""
    expected: dict[str, Ewma] = {}
    for one in played.arrivals:  # as the manager learned it, of what it would have been alone
        expected.setdefault(one.model, Ewma(SERVICE_WEIGHT)).add(_service(one))
    asked = [seat for members in played.groups.values() for seat in members if seat["model"] in expected]
    seen = sum(float(seat["service_seconds"]) for seat in asked)
    return seen / sum(expected[seat["model"]].value for seat in asked)


def _seat(played: Played, group: str, seat: Mapping[str, Any]) -> SimSeat:
    """A seat with the mean costs of this run: activating its own, parking its group's."""
    there = [one.seconds for one in played.switches if one.group == group]
    own = [one.seconds for one in played.switches if one.seat == seat["seat"]] or there
    parks = [one["total"] - one["drain"] - _back(one) for one in there]
    closing = percentile([one["drain"] for one in there], 0.1) or 0.0  # closing a seat with nothing in flight
    return SimSeat(
        name=seat["seat"],
        group=group,
        park_seconds=sum(parks) / len(parks) * played.speed + closing * played.speed if parks else ASSUMED_SECONDS,
        activate_seconds=sum(map(_back, own)) / len(own) * played.speed if own else ASSUMED_SECONDS,
        model=seat["model"],
        tier=seat["tier"],
        weight=seat["weight"],
        slo_seconds=seat["slo_seconds"],
    )


def _back(seconds: Mapping[str, float]) -> float:
    return seconds["activate"] + seconds["verify"] / 2 + seconds["release"]


def _service(one: Arrival) -> float:
    engine = EngineOptions("")
    return one.prompt_tokens / engine.prefill_tokens_per_second + one.output_tokens / engine.tokens_per_second
