"""How many groups of GPUs a trace needs at an SLO: a search over the simulator. Pure.

Attainment is taken to grow with groups, so that halving finds the fewest; that is checked at the answer: one group less
was played and is not enough.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import ceil, log, log2
from typing import Any

from kybernate.lab.advise import MEMORY_SHARE, GpuKind, first_fit, knowledge
from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import Interval, blocks, draws, interval, measures
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, check
from kybernate.lab.simulate.node import GB
from kybernate.policy import Policy

HOURS_OF_MONTH = 730
SEATS = ("seats", "packed")
"""Names of the layouts that Kybernate runs."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, and what may be tried."""

    share: float = 0.95
    """Of requests within the SLO of their seat: of all, and of each tier."""
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
    model_share: float = 0.0
    """Of each model's requests within the SLO."""
    spare: int = 0
    """So many groups may fail: the goal is reached without them, and they are counted."""
    memory_price: float = 0.0
    """Of one GB of host memory for a month."""
    gpu: str = ""
    """A product of ``advise.yaml``, for which MIG and time slicing are tried; empty: they are not."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One way to place the seats, and what it gives. Figures are those with all spare groups failed."""

    name: str
    """``seats`` share groups; ``packed``: also their memory, as many are active as fit; ``llama-swap``: groups of seats
    under its rule with ``ttl``; ``time-slicing``, ``mig``: every model stays in memory; ``dedicated``: one group per
    model."""
    groups: int
    """Spare ones included."""
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
    """Of 730 hours, with host memory."""
    at_once: float = 0.0
    """Share of requests that did not wait at all."""
    slo_low: float = 0.0
    slo_high: float = 1.0
    """95 % interval of ``slo_attainment``, bootstrapped over days (hours of a trace of less than three)."""
    worst_model: str = ""
    worst_attainment: float = 0.0
    """Of the model that reaches the least."""
    worst_tier_attainment: float = 0.0
    host_gb: float = 0.0
    """Host memory with all models of the seats parked."""
    stretch: float = 1.0
    """Time in flight, divided by that of a model alone on its GPUs."""

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def plan(
    scenario: Scenario,
    goal: Goal,
    options: RunOptions | None = None,
    played: Callable[[PlannedLayout], None] | None = None,
) -> list[PlannedLayout]:
    """For each number of slots the fewest groups that are enough (or the most that were tried, if they are not), the
    same for seats that share memory and under llama-swap's rule; then models that stay in memory, and one group per
    model. ``played`` gets every layout that was tried. Raises SimulationError, ValueError.
    """
    return list(_Planner(scenario, goal, options or RunOptions(), played or (lambda layout: None)).rows())  # noqa: ARG005


def most_runs(seats: int, goal: Goal) -> int:
    """So many layouts are played at most."""
    each = 2 * ceil(log2(max(1, min(goal.groups_max, seats)))) + 1
    return (len(goal.slots) + bool(goal.memory_bytes) + 1) * each + (2 if goal.gpu else 0) + 1


@dataclass(frozen=True, slots=True)
class _Planner:
    scenario: Scenario
    goal: Goal
    options: RunOptions
    played: Callable[[PlannedLayout], None]

    def rows(self) -> Iterator[PlannedLayout]:
        goal, policy = self.goal, POLICIES[self.goal.policy]()
        for slots in goal.slots:
            yield self.fewest("seats", policy, slots)
        if goal.memory_bytes:
            yield self.fewest("packed", policy, len(self.scenario.seats), memory_bytes=goal.memory_bytes)
        yield self.fewest("llama-swap", POLICIES["exhaustive-ttl"](), 1, fixed=True)
        if goal.gpu and goal.gpus_per_group == 1:
            yield from self.resident(knowledge().gpus[goal.gpu])
        yield self.dedicated()

    def fewest(
        self, name: str, policy: Policy, slots: int, *, memory_bytes: int = 0, fixed: bool = False
    ) -> PlannedLayout:
        move = None if fixed else self.goal.move_seconds

        def tried(groups: int) -> PlannedLayout:
            return self.play(name, regrouped(self.scenario, groups, slots, move, memory_bytes), policy)

        most = min(self.goal.groups_max, len(self.scenario.seats))
        return fewest(tried, most, self.least(most, slots, move, memory_bytes))

    def least(self, most: int, slots: int, move: float | None, memory_bytes: int) -> int:
        """So many groups hold the pinned seats and leave room for others; ``most`` where none of so many do."""
        if not any(seat.pinned for seat in self.scenario.seats):
            return 1
        for groups in range(1, most):
            try:
                check(regrouped(self.scenario, groups, slots, move, memory_bytes))
            except ValueError:
                continue
            return groups
        return most

    def dedicated(self) -> PlannedLayout:
        """One group per model: each is activated once and stays."""
        alone = regrouped(self.scenario, len(self.scenario.seats), 1, None)
        return self.play("dedicated", alone, POLICIES["exhaustive"](), resident=True)

    def resident(self, kind: GpuKind) -> Iterator[PlannedLayout]:
        """All models stay in memory: time slices of whole GPUs, and MIG slices with their share of the bandwidth."""
        sizes = [seat.vram_bytes / GB for seat in self.scenario.seats]
        sliced = knowledge().strategies["time-slicing"]
        if max(sizes) <= MEMORY_SHARE * kind.memory:
            order = sorted(range(len(sizes)), key=lambda seat: (-sizes[seat], seat))

            def fits(held: "list[int] | Any") -> bool:
                return len(held) <= sliced.most and sum(sizes[seat] for seat in held) <= MEMORY_SHARE * kind.memory

            bins = first_fit(order, fits)
            home = {seat: f"G{place}" for place, held in enumerate(bins) for seat in held}
            shared = replace(
                self.scenario,
                seats=tuple(replace(seat, group=home[index]) for index, seat in enumerate(self.scenario.seats)),
                groups=tuple(SimGroup(f"G{place}", len(held)) for place, held in enumerate(bins)),
                move_seconds=None,
            )
            options = replace(self.options, sharing=max(self.options.sharing, sliced.slowdown))
            yield self.play("time-slicing", shared, POLICIES["exhaustive"](), resident=True, options=options)
        if any(kind.slices(size) for size in sizes) and max(sizes) <= kind.memory:
            parts = [kind.slices(size) or 1 for size in sizes]
            alone = regrouped(self.scenario, len(sizes), 1, None)
            slower = (part * parts[seat] for part, seat in zip(alone.service, alone.seat, strict=True))
            gpus = ceil(sum(Fraction(1, part) for part in parts))
            slices = replace(alone, service=tuple(slower))
            yield self.play("mig", slices, POLICIES["exhaustive"](), resident=True, gpus=gpus)

    def play(
        self,
        name: str,
        scenario: Scenario,
        policy: Policy,
        *,
        resident: bool = False,
        gpus: int | None = None,
        options: RunOptions | None = None,
    ) -> PlannedLayout:
        """Play one layout. ``resident``: no model is ever parked; ``gpus``: where they are not the groups'."""
        goal, outcome = self.goal, run(scenario, policy, options or self.options)
        measured = measures(outcome, scenario)
        groups = len(scenario.groups) + goal.spare
        gpus = groups * goal.gpus_per_group if gpus is None else gpus + goal.spare
        ends = zip(outcome.finished, scenario.at, outcome.wait, strict=True)
        tier = min(measured.slo_by_tier.values(), default=1.0)
        low, high = attainment_interval(outcome, scenario)
        host = 0.0 if resident else sum(seat.host_bytes or seat.vram_bytes for seat in scenario.seats) / GB
        hours = scenario.duration / 3600
        layout = PlannedLayout(
            name=name,
            groups=groups,
            slots=scenario.groups[0].slots,
            gpus=gpus,
            enough=min(measured.slo_attainment, tier) >= goal.share
            and measured.worst_seat_attainment >= goal.model_share,
            wait_mean_s=measured.wait_mean_s,
            wait_p99_s=measured.wait_p99_s,
            slo_attainment=measured.slo_attainment,
            switches_per_hour=measured.switches_per_hour,
            moves_per_hour=measured.moves_per_hour,
            gpu_hours=gpus * hours,
            cost=gpus * hours * goal.price + host * goal.memory_price * hours / HOURS_OF_MONTH,
            cost_of_month=gpus * HOURS_OF_MONTH * goal.price + host * goal.memory_price,
            at_once=measured.immediate,
            slo_low=low,
            slo_high=high,
            worst_model=measured.worst_seat,
            worst_attainment=measured.worst_seat_attainment,
            worst_tier_attainment=tier,
            host_gb=host,
            stretch=sum(end - at - wait for end, at, wait in ends) / max(sum(self.scenario.service), 1e-9),
        )
        self.played(layout)
        return layout


def verified(
    layout: PlannedLayout, planned: Scenario, unseen: Scenario, goal: Goal, options: RunOptions | None = None
) -> PlannedLayout:
    """The planned groups of seats on requests that the plan has not seen. Models keep their homes, sizes and costs;
    others get some."""
    groups, memory = layout.groups - goal.spare, goal.memory_bytes if layout.name == "packed" else 0
    known = {seat.name: seat for seat in regrouped(planned, groups, layout.slots, goal.move_seconds).seats}
    made = regrouped(unseen, groups, layout.slots, goal.move_seconds, memory)
    kept = tuple(known.get(seat.name, seat) for seat in made.seats)
    planner = _Planner(unseen, goal, options or RunOptions(), lambda layout: None)  # noqa: ARG005
    return planner.play(layout.name, replace(made, seats=kept), POLICIES[goal.policy]())


def attainment_interval(outcome: Outcome, scenario: Scenario) -> Interval:
    """Of the share within the SLO, over resampled days; (0, 1) where there are not two blocks of time."""
    parts = blocks(outcome, scenario, 86_400 if scenario.duration >= 3 * 86_400 else 3600)
    if len(parts) < 2:
        return 0.0, 1.0
    shares = []
    for weights in draws(len(parts), 0):
        count = sum(weight * len(part.waits) for weight, part in zip(weights, parts, strict=True))
        met = sum(weight * part.met for weight, part in zip(weights, parts, strict=True))
        shares.append(met / count if count else 1.0)
    return interval(shares)


def headroom(layout: PlannedLayout, scenario: Scenario, goal: Goal, options: RunOptions | None = None) -> float:
    """So many times the scenario's traffic the layout of seats serves within the goal, in steps of 5 %.

    The same requests come so many times faster, as with ``--speed-up``. At ``MOST_HEADROOM`` or more it ends.
    """
    low, high = 0, ceil(log(MOST_HEADROOM) / log(_STEP))  # exponents: enough, and not known to be
    while low < high:
        middle = (low + high + 1) // 2
        faster = sped_up(scenario, _STEP**middle)
        low, high = (middle, high) if verified(layout, scenario, faster, goal, options).enough else (low, middle - 1)
    return _STEP**low


_STEP = 1.05
MOST_HEADROOM = 8
"""More is not tried."""


def sped_up(scenario: Scenario, times: float) -> Scenario:
    """The same requests, so many times faster."""
    return replace(scenario, at=tuple(at / times for at in scenario.at), duration=scenario.duration / times)


def fewest(tried: Callable[[int], PlannedLayout], most: int, least: int = 1) -> PlannedLayout:
    """The layout with fewest groups, ``least`` to ``most``, that is enough; that with ``most`` when none is. Each
    number is tried once."""
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


def regrouped(
    scenario: Scenario, groups: int, slots: int, move_seconds: float | None, memory_bytes: int = 0
) -> Scenario:
    """The same seats and requests on so many groups: pinned seats first, then the heaviest, each where least work is
    and pinned seats leave a slot."""
    work = [0.0] * len(scenario.seats)
    for seat, service in zip(scenario.seat, scenario.service, strict=True):
        work[seat] += service
    loads, home, free = [0.0] * groups, [0] * len(work), [slots] * groups
    for seat in sorted(range(len(work)), key=lambda index: (not scenario.seats[index].pinned, -work[index], index)):
        home[seat] = min(range(groups), key=lambda group: (free[group] <= 0, loads[group], group))
        loads[home[seat]] += max(work[seat], 1e-9)
        free[home[seat]] -= scenario.seats[seat].pinned
    return replace(
        scenario,
        seats=tuple(replace(seat, group=f"G{home[index]}") for index, seat in enumerate(scenario.seats)),
        groups=tuple(SimGroup(f"G{group}", slots, memory_bytes) for group in range(groups)),
        move_seconds=move_seconds if groups > 1 else None,
    )


def saved(found: list[PlannedLayout]) -> float:
    """Share of the dedicated GPUs that the smallest layout of seats that is enough does without; 0 when none is."""
    most = next(one.gpus for one in found if one.name == "dedicated")
    best = smallest(found)
    return 1.0 - best.gpus / most if best is not None and best.gpus < most else 0.0


def smallest(found: list[PlannedLayout]) -> PlannedLayout | None:
    """The layout of seats with fewest GPUs that is enough."""
    enough = [one for one in found if one.name in SEATS and one.enough]
    return min(enough, key=lambda one: one.gpus, default=None)
