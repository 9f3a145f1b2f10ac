"""How many groups of GPUs a trace needs at an SLO: a search over the simulator. Pure.

Attainment is taken to grow with groups, so that halving finds the fewest; that is checked at the answer: one group less
was played and is not enough. A layout that is being searched is played until so many requests have missed their SLO
that it cannot be enough any more.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from math import ceil, log, log2
from typing import Any

from kybernate.lab.advise import MEMORY_SHARE, GpuKind, first_fit, knowledge
from kybernate.lab.baselines import POLICIES
from kybernate.lab.forecast import busiest_day, whole_hours
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import Interval, blocks, draws, interval, measures, promise
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, check
from kybernate.lab.simulate.node import GB

HOURS_OF_MONTH = 730
SEATS = ("seats", "packed")
"""Names of the layouts that Kybernate runs."""
TRIED = ("kyb-balanced", "kyb-slo", "kyb-bounded", "exhaustive-ttl", "fifo-switch", "lru-60")
"""Policies that are tried unless others are asked for: the modes, and simple rules in the same pool."""


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
    policies: tuple[str, ...] = TRIED
    """The first is searched whole; each other one only where it would need fewer groups."""
    model_share: float = 0.0
    """Of each model's requests within the SLO."""
    spare: int = 0
    """So many groups may fail: the goal is reached without them, and they are counted."""
    memory_price: float = 0.0
    """Of one GB of host memory for a month."""
    gpu: str = ""
    """A product of ``advise.yaml``, for which MIG and time slicing are tried; empty: they are not."""


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one model gets of a layout."""

    requests: int
    attained: float
    """Share within the SLO."""
    promised: float | None
    """At least this on another day like these; None: too few requests to promise anything, or no whole day."""


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
    """It reaches the goal, and promises it for another day where the trace has a whole one."""
    wait_mean_s: float
    wait_p99_s: float
    slo_attainment: float
    """Of a layout that was not played to its end: no more than this."""
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
    policy: str = ""
    whole: bool = True
    """False: it was played until it could not be enough any more, and other figures than the share are not known."""
    models: dict[str, ModelShare] = field(default_factory=dict)
    busiest: int | None = None
    """Requests of the busiest whole day; None: there is no whole day, and nothing is promised."""
    promised: float | None = None
    """At least this share of all requests within the SLO on another day, with at most as many requests as that one."""

    @property
    def promises(self) -> dict[str, float]:
        """Of the models that have enough requests for one."""
        return {name: one.promised for name, one in self.models.items() if one.promised is not None}

    def broken(self, unseen: "PlannedLayout") -> dict[str, tuple[float, float]]:
        """(promised, attained) of the models whose promise did not hold on unseen hours. Of fewer than ``JUDGED``
        requests one alone decides too much."""
        seen = {name: one for name, one in unseen.models.items() if one.requests >= JUDGED}
        return {
            name: (promised, seen[name].attained)
            for name, promised in self.promises.items()
            if name in seen and seen[name].attained < promised
        }

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


JUDGED = 10
"""Requests of a model below which its promise is not judged."""


def plan(
    scenario: Scenario,
    goal: Goal,
    options: RunOptions | None = None,
    played: Callable[[PlannedLayout], None] | None = None,
    *,
    whole: bool = False,
) -> list[PlannedLayout]:
    """For each number of slots the fewest groups that are enough under the first policy (or the most that were tried,
    if they are not), and under each other policy that needs fewer; the same for seats that share memory and under
    llama-swap's rule; then models that stay in memory, and one group per model. ``played`` gets every layout that was
    tried; ``whole``: all of them are played to their end. Raises SimulationError, ValueError.
    """
    return list(_Planner(scenario, goal, options or RunOptions(), played or (lambda layout: None), whole).rows())  # noqa: ARG005


def most_runs(seats: int, goal: Goal) -> int:
    """So many layouts are played at most."""
    most, each, high = min(goal.groups_max, seats), 1, 1
    while high < most:
        each, high = each + 1, min(high + max(1, high // 2), most)
    each += ceil(log2(max(1, most // 3)))
    return (len(goal.slots) + bool(goal.memory_bytes)) * (each + len(goal.policies) - 1) + each + 3


class _TooFewError(Exception):
    """So many requests missed their SLO that the goal cannot be reached; the argument is the share that is left."""


@dataclass(slots=True)
class _Allowance:
    """Ends a run at the miss that is one too many: of all requests, of a tier's, or of a model's."""

    scenario: Scenario
    goal: Goal
    missed: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for index, count in Counter(self.scenario.seat).items():
            for name in self._names(index):
                self.counts[name] += count

    def _names(self, seat: int) -> tuple[str, str, str]:
        spec = self.scenario.seats[seat]
        return "", f"tier/{spec.tier}", f"model/{spec.name}"

    def __call__(self, seat: int) -> None:
        for name in self._names(seat):
            self.missed[name] += 1
            share = self.goal.model_share if name.startswith("model/") else self.goal.share
            if (self.counts[name] - self.missed[name]) / self.counts[name] < share:
                raise _TooFewError(1 - self.missed[""] / self.counts[""])


@dataclass(frozen=True, slots=True)
class _Planner:
    scenario: Scenario
    goal: Goal
    options: RunOptions
    played: Callable[[PlannedLayout], None]
    whole: bool

    def rows(self) -> Iterator[PlannedLayout]:
        goal = self.goal
        groups = 1
        for slots in goal.slots:
            for layout in self.shared("seats", slots):
                groups = layout.groups - goal.spare
                yield layout
        if goal.memory_bytes:
            yield from self.shared("packed", len(self.scenario.seats), goal.memory_bytes)
        yield self.fixed(groups)
        if goal.gpu and goal.gpus_per_group == 1:
            yield from self.resident(knowledge().gpus[goal.gpu])
        yield self.dedicated()

    def shared(self, name: str, slots: int, memory_bytes: int = 0) -> Iterator[PlannedLayout]:
        """The first policy's row, and that of each policy that needs fewer groups than all before it."""
        most = min(self.goal.groups_max, len(self.scenario.seats))
        least = self.least(most, slots, self.goal.move_seconds, memory_bytes)
        best: PlannedLayout | None = None
        for policy in self.goal.policies:

            def tried(groups: int, policy: str = policy, first: bool = best is None) -> PlannedLayout:
                made = regrouped(self.scenario, groups, slots, self.goal.move_seconds, memory_bytes)
                return self.play(name, made, policy, searched=not first or groups < most)

            if best is None or not best.enough:
                found: PlannedLayout | None = fewest(tried, most, least)
            else:
                found, groups = None, best.groups - self.goal.spare - 1
                while groups >= least and (one := tried(groups)).enough:
                    found, groups = one, groups - 1
            if found is not None and (best is None or found.enough):
                best = found
                yield best

    def fixed(self, begin: int) -> PlannedLayout:
        """The fewest groups under llama-swap's rule, where each model stays on its own."""
        most = min(self.goal.groups_max, len(self.scenario.seats))

        def tried(groups: int) -> PlannedLayout:
            made = regrouped(self.scenario, groups, 1, None)
            return self.play("llama-swap", made, "exhaustive-ttl", searched=groups < most)

        return fewest(tried, most, self.least(most, 1, None, 0), begin)

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
        return self.play("dedicated", alone, "exhaustive", resident=True)

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
            yield self.play("time-slicing", shared, "exhaustive", resident=True, options=options)
        if any(kind.slices(size) for size in sizes) and max(sizes) <= kind.memory:
            parts = [kind.slices(size) or 1 for size in sizes]
            alone = regrouped(self.scenario, len(sizes), 1, None)
            slower = (part * parts[seat] for part, seat in zip(alone.service, alone.seat, strict=True))
            gpus = ceil(sum(Fraction(1, part) for part in parts))
            slices = replace(alone, service=tuple(slower))
            yield self.play("mig", slices, "exhaustive", resident=True, gpus=gpus)

    def play(
        self,
        name: str,
        scenario: Scenario,
        policy: str,
        *,
        resident: bool = False,
        gpus: int | None = None,
        options: RunOptions | None = None,
        searched: bool = False,
    ) -> PlannedLayout:
        """Play one layout. ``resident``: no model is ever parked; ``gpus``: where they are not the groups';
        ``searched``: only until it cannot be enough."""
        goal, rule = self.goal, POLICIES[policy]()
        groups = len(scenario.groups) + goal.spare
        gpus = groups * goal.gpus_per_group if gpus is None else gpus + goal.spare
        # A policy of another package may look at each parked seat.
        merged = policy in (*TRIED, "exhaustive")
        missed = _Allowance(scenario, goal) if searched and not self.whole else None
        try:
            outcome = run(scenario, rule, replace(options or self.options, merged=merged, missed=missed))
        except _TooFewError as few:
            layout = PlannedLayout(
                name, groups, scenario.groups[0].slots, gpus, False, 0.0, 0.0, few.args[0], 0.0, 0.0, 0.0, 0.0, 0.0,
                policy=policy, whole=False,
            )  # fmt: skip
            self.played(layout)
            return layout
        measured = measures(outcome, scenario)
        ends = zip(outcome.finished, scenario.at, outcome.wait, strict=True)
        tier = min(measured.slo_by_tier.values(), default=1.0)
        low, high = attainment_interval(outcome, scenario)
        promised = promised_share(outcome, scenario)
        host = 0.0 if resident else sum(seat.host_bytes or seat.vram_bytes for seat in scenario.seats) / GB
        hours = scenario.duration / 3600
        layout = PlannedLayout(
            name=name,
            groups=groups,
            slots=scenario.groups[0].slots,
            gpus=gpus,
            enough=min(measured.slo_attainment, tier, 1.0 if promised is None else promised) >= goal.share
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
            policy=policy,
            models=model_shares(outcome, scenario),
            busiest=busiest_day(scenario.at, 0.0, _end(scenario)),
            promised=promised,
        )
        self.played(layout)
        return layout


_DAY = 86_400.0


def _end(scenario: Scenario) -> float:
    """Of the hours that are over, in seconds: a day's trace may end minutes before midnight."""
    return max(scenario.duration, 3600.0 * whole_hours(scenario.at))


def promised_share(outcome: Outcome, scenario: Scenario) -> float | None:
    """The share of all requests within the SLO on another day, with a confidence of 99 %: the worst day, or less where
    a day of so many hours drawn from the trace has less. None: less than a day."""
    end = _end(scenario)
    if end < _DAY:
        return None
    hours = blocks(outcome, scenario, 3600.0)
    drawn = [
        (sum(n * one.met for n, one in zip(weights, hours, strict=True)),
         sum(n * len(one.waits) for n, one in zip(weights, hours, strict=True)))
        for weights in draws(len(hours), 0, size=24, repeats=500)
    ]  # fmt: skip
    days = [(one.met, len(one.waits)) for one in blocks(outcome, scenario, _DAY)[: int(end // _DAY)]]
    low = interval([met / count for met, count in drawn if count], 0.98)[0]
    return min([low, *(met / count for met, count in days if count)])


def model_shares(outcome: Outcome, scenario: Scenario) -> dict[str, ModelShare]:
    """By model, of those with requests."""
    found: dict[int, tuple[list[float], list[bool]]] = {}
    for at, seat, wait in zip(scenario.at, scenario.seat, outcome.wait, strict=True):
        moments, met = found.setdefault(seat, ([], []))
        moments.append(at)
        met.append(wait <= scenario.seats[seat].slo_seconds)
    days = _end(scenario) / _DAY
    return {
        scenario.seats[seat].name: ModelShare(
            len(met), sum(met) / len(met), promise(moments, met, days) if days >= 1 else None
        )
        for seat, (moments, met) in sorted(found.items())
    }


def verified(
    layout: PlannedLayout,
    planned: Scenario,
    unseen: Scenario,
    goal: Goal,
    options: RunOptions | None = None,
    *,
    searched: bool = False,
) -> PlannedLayout:
    """The planned groups of seats on requests that the plan has not seen. Models keep their homes, sizes and costs;
    others get some. ``searched``: only until it is known not to be enough."""
    groups, memory = layout.groups - goal.spare, goal.memory_bytes if layout.name == "packed" else 0
    known = {seat.name: seat for seat in regrouped(planned, groups, layout.slots, goal.move_seconds).seats}
    made = regrouped(unseen, groups, layout.slots, goal.move_seconds, memory)
    kept = tuple(known.get(seat.name, seat) for seat in made.seats)
    planner = _Planner(unseen, goal, options or RunOptions(), lambda layout: None, whole=not searched)  # noqa: ARG005
    return planner.play(layout.name, replace(made, seats=kept), layout.policy, searched=searched)


def attainment_interval(outcome: Outcome, scenario: Scenario) -> Interval:
    """Of the share within the SLO, over resampled days; (0, 1) where there are not two blocks of time."""
    parts = blocks(outcome, scenario, _DAY if scenario.duration >= 3 * _DAY else 3600.0)
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
        enough = verified(layout, scenario, faster, goal, options, searched=True).enough
        low, high = (middle, high) if enough else (low, middle - 1)
    return _STEP**low


_STEP = 1.05
MOST_HEADROOM = 8
"""More is not tried."""


def sped_up(scenario: Scenario, times: float) -> Scenario:
    """The same requests, so many times faster."""
    return replace(scenario, at=tuple(at / times for at in scenario.at), duration=scenario.duration / times)


def fewest(tried: Callable[[int], PlannedLayout], most: int, least: int = 1, begin: int = 1) -> PlannedLayout:
    """The layout with fewest groups, ``least`` to ``most``, that is enough; that with ``most`` when none is. Each
    number is tried once, ``begin`` first."""
    known: dict[int, PlannedLayout] = {}
    low, high = least, min(most, max(least, begin))
    while True:  # upwards in growing steps: few groups are the usual answer, and too few of them end soon
        known[high] = tried(high)
        if known[high].enough or high == most:
            break
        low, high = high + 1, min(high + max(1, high // 2), most)
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
