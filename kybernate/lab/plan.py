"""How many groups of GPUs a trace needs at an SLO: a search over the simulator. Pure.

Attainment is taken to grow with groups, so that halving finds the fewest; that is checked at the answer: one group less
was played and is not enough.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import Measures, measures
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.policy import Policy


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, and what may be tried."""

    share: float = 0.95
    """Of requests within the SLO of their seat."""
    groups_max: int = 16
    slots: tuple[int, ...] = (1,)
    """Seats that a group runs at the same time, to be tried."""
    memory_bytes: int = 0
    """Of a group: groups whose seats share it are tried, too. 0: they are not."""
    move_seconds: float | None = 3.0
    """Extra seconds for a seat on another group than its own; None: seats stay at home."""
    gpus_per_group: int = 1
    price: float = 0.0
    """Of one GPU for an hour."""
    policy: str = "kyb-balanced"


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One way to place the seats, and what it gives."""

    name: str
    """``seats`` share groups; ``packed``: also their memory, as many are active as fit; ``dedicated``: one group per
    model."""
    groups: int
    slots: int
    gpus: int
    enough: bool
    """It reaches the goal."""
    wait_mean_s: float
    wait_p99_s: float
    slo_attainment: float
    switches_per_hour: float
    moves_per_hour: float
    gpu_hours: float
    """Over the trace."""
    cost: float
    cost_of_month: float
    """Of 730 hours."""

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def plan(scenario: Scenario, goal: Goal, options: RunOptions | None = None) -> list[PlannedLayout]:
    """For each number of slots the fewest groups that are enough (or the most that were tried, if they are not), the
    same for seats that share memory, then one group per model. Raises SimulationError, ValueError.
    """
    found = [_fewest(scenario, goal, slots, options or RunOptions()) for slots in goal.slots]
    if goal.memory_bytes:
        found.append(_fewest(scenario, goal, len(scenario.seats), options or RunOptions(), goal.memory_bytes))
    return [*found, dedicated(scenario, goal, options or RunOptions())]


def _fewest(scenario: Scenario, goal: Goal, slots: int, options: RunOptions, memory_bytes: int = 0) -> PlannedLayout:
    policy = POLICIES[goal.policy]()

    def tried(groups: int) -> PlannedLayout:
        played = regrouped(scenario, groups, slots, goal.move_seconds, memory_bytes)
        return _layout("packed" if memory_bytes else "seats", played, goal, _played(played, policy, options))

    return fewest(tried, min(goal.groups_max, len(scenario.seats)))


def fewest(tried: Callable[[int], PlannedLayout], most: int) -> PlannedLayout:
    """The layout with fewest groups that is enough; that with ``most`` when none is. Each number is tried once."""
    known: dict[int, PlannedLayout] = {}
    low, high = 1, 1
    while True:  # upwards by doubling, since few groups are the usual answer
        known[high] = tried(high)
        if known[high].enough or high == most:
            break
        low, high = high + 1, min(2 * high, most)
    if not known[high].enough:
        return known[high]
    while low < high:
        middle = (low + high) // 2
        known[middle] = tried(middle)
        low, high = (low, middle) if known[middle].enough else (middle + 1, high)
    return known[high]


def dedicated(scenario: Scenario, goal: Goal, options: RunOptions) -> PlannedLayout:
    """One group per model: each is activated once and stays."""
    played = regrouped(scenario, len(scenario.seats), 1, None)
    return _layout("dedicated", played, goal, _played(played, POLICIES["exhaustive"](), options))


def _played(scenario: Scenario, policy: Policy, options: RunOptions) -> Measures:
    return measures(run(scenario, policy, options), scenario)


def _layout(name: str, scenario: Scenario, goal: Goal, measured: Measures) -> PlannedLayout:
    groups = len(scenario.groups)
    gpus = groups * goal.gpus_per_group
    hours = scenario.duration / 3600
    return PlannedLayout(
        name=name,
        groups=groups,
        slots=scenario.groups[0].slots,
        gpus=gpus,
        enough=measured.slo_attainment >= goal.share,
        wait_mean_s=measured.wait_mean_s,
        wait_p99_s=measured.wait_p99_s,
        slo_attainment=measured.slo_attainment,
        switches_per_hour=measured.switches_per_hour,
        moves_per_hour=measured.moves_per_hour,
        gpu_hours=gpus * hours,
        cost=gpus * hours * goal.price,
        cost_of_month=gpus * 730 * goal.price,
    )


def regrouped(
    scenario: Scenario, groups: int, slots: int, move_seconds: float | None, memory_bytes: int = 0
) -> Scenario:
    """The same seats and requests on so many groups: the heaviest first, each where least work is."""
    work = [0.0] * len(scenario.seats)
    for seat, service in zip(scenario.seat, scenario.service, strict=True):
        work[seat] += service
    loads, home = [0.0] * groups, [0] * len(work)
    for seat in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        home[seat] = min(range(groups), key=lambda group: (loads[group], group))
        loads[home[seat]] += max(work[seat], 1e-9)
    return replace(
        scenario,
        seats=tuple(replace(seat, group=f"G{home[index]}") for index, seat in enumerate(scenario.seats)),
        groups=tuple(SimGroup(f"G{group}", slots, memory_bytes) for group in range(groups)),
        move_seconds=move_seconds if groups > 1 else None,
    )


def saved(found: list[PlannedLayout]) -> float:
    """Share of the dedicated GPUs that the cheapest layout that is enough does without; 0 when none is enough."""
    most = next(one.gpus for one in found if one.name == "dedicated")
    least = min((one.gpus for one in found if one.name != "dedicated" and one.enough), default=inf)
    return 1.0 - least / most if least < most else 0.0
