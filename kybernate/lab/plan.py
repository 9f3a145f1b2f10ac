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
    """``seats`` share groups; ``dedicated``: one group per model."""
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
    """For each number of slots the fewest groups that are enough (or the most that were tried, if they are not), then
    one group per model. Raises SimulationError, ValueError.
    """
    found = [_fewest(scenario, goal, slots, options or RunOptions()) for slots in goal.slots]
    return [*found, dedicated(scenario, goal, options or RunOptions())]


def _fewest(scenario: Scenario, goal: Goal, slots: int, options: RunOptions) -> PlannedLayout:
    policy = POLICIES[goal.policy]()

    def tried(groups: int) -> PlannedLayout:
        played = regrouped(scenario, groups, slots, goal.move_seconds)
        return _layout("seats", played, goal, _played(played, policy, options))

    least = max(map(len, gangs(scenario)), default=1)
    if least > goal.groups_max:
        raise ValueError(f"a gang needs {least} groups and at most {goal.groups_max} are wanted; see --groups-max")
    return fewest(tried, min(goal.groups_max, len(scenario.seats)), least)


def fewest(tried: Callable[[int], PlannedLayout], most: int, least: int = 1) -> PlannedLayout:
    """The layout with fewest groups that is enough; that with ``most`` when none is. Each number is tried once."""
    known: dict[int, PlannedLayout] = {}
    low, high = least, least
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


def regrouped(scenario: Scenario, groups: int, slots: int, move_seconds: float | None) -> Scenario:
    """The same seats and requests on so many groups: the heaviest first, each where least work is. Of a gang, each on
    another group: there must be as many.
    """
    work = [0.0] * len(scenario.seats)
    for seat, service in zip(scenario.seat, scenario.service, strict=True):
        work[seat] += service
    for gang in gangs(scenario):  # what one of a gang has to do, all of it have
        most = max(work[seat] for seat in gang)
        for seat in gang:
            work[seat] = most
    loads, home = [0.0] * groups, [0] * len(work)
    taken: set[tuple[str, int]] = set()
    for seat in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        name = scenario.seats[seat].gang
        free = [group for group in range(groups) if not name or (name, group) not in taken]
        home[seat] = min(free, key=lambda group: (loads[group], group))
        taken.add((name, home[seat]))
        loads[home[seat]] += max(work[seat], 1e-9)
    return replace(
        scenario,
        seats=tuple(replace(seat, group=f"G{home[index]}") for index, seat in enumerate(scenario.seats)),
        groups=tuple(SimGroup(f"G{group}", slots) for group in range(groups)),
        move_seconds=move_seconds if groups > 1 else None,
    )


def gangs(scenario: Scenario) -> list[list[int]]:
    """Indices of the seats of each gang."""
    found: dict[str, list[int]] = {}
    for index, seat in enumerate(scenario.seats):
        if seat.gang:
            found.setdefault(seat.gang, []).append(index)
    return list(found.values())


def saved(found: list[PlannedLayout]) -> float:
    """Share of the dedicated GPUs that the cheapest layout that is enough does without; 0 when none is enough."""
    most = next(one.gpus for one in found if one.name == "dedicated")
    least = min((one.gpus for one in found if one.name != "dedicated" and one.enough), default=inf)
    return 1.0 - least / most if least < most else 0.0
