"""Everything a run keeps: seats, groups, the agenda of events, what has come of each request. Pure."""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappush
from math import log, sqrt

from kybernate.lab.simulate.engine_check import check
from kybernate.lab.simulate.engine_seat import FINISHED, SWITCHED, WAKE, Seat
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, Visit
from kybernate.policy.estimators import Hits
from kybernate.seat import SeatState

__all__ = ["FINISHED", "SWITCHED", "WAKE", "Group", "Operation", "Options", "SimulationError", "World"]


class SimulationError(Exception):
    """The policy got stuck; the text says at what time, for whom and why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run adds to the scenario. The defaults are the research's model: nothing fails, nothing varies."""

    seed: int = 0
    """For jitter and failures. The k-th park of a seat is the same under every policy."""
    name: str = ""
    """Of the policy, in the outcome; empty: its class."""
    late_binding: bool = True
    """Ask again after the park and take that answer; else the winner of the decision to evict comes."""
    jitter: float = 0.0
    """Coefficient of variation of park and activate seconds (lognormal, mean as given)."""
    park_failure: float = 0.0
    """Share of parks that are rolled back: the victim serves on."""
    restore_failure: float = 0.0
    """Share of activations after which the engine has to be started from disk, in place."""
    cold_start_seconds: float = 90.0
    """Start from disk: after a failed activation, or when the parked copy was given up for lack of host memory."""
    slowdown: tuple[tuple[float, float], ...] = ()
    """(requests in flight, how many times longer each takes than alone): straight lines between; empty: no effect."""
    assumed_service_seconds: float = 5.0
    """What the policy is told until the first request of a seat has ended."""
    refresh_seconds: float = 1.0
    """How old the rates may be that are shown of a parked seat for which nobody waits (the routers' signals are not
    newer either); 0: always as of now, slower."""
    measure_hits: bool = False
    """Show ``GroupView.hit_share`` also to a policy without a true ``prefetch`` setting; costs a little time."""
    age_buckets: int = 64
    """Ages of waiting requests are told one by one up to so many; of more, neighbours are told by their mean."""


@dataclass(slots=True)
class Operation:
    """One switch of a group under way."""

    victim: Seat | None
    winner: Seat | None
    phase: str
    """draining, parking, activating, or ready: activated, but its gang is not yet."""
    frozen: bool = False
    until: float = 0.0
    """When the park or activation under way ends."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of GPUs."""

    index: int
    spec: SimGroup
    seats: list[Seat] = field(default_factory=list)
    """Those that it holds or that would come back to it without moving."""
    holders: list[Seat] = field(default_factory=list)
    """Those that take one of its slots now."""
    demanded: dict[int, Seat] = field(default_factory=dict)
    """Its parked seats for which somebody waits, by index."""
    operation: Operation | None = None
    claimed: Seat | None = None
    """The member of a gang for which it makes room, or keeps a slot until the gang's other groups have room."""
    wake: int = 0
    failures: int = 0
    paused_until: float = 0.0
    hits: Hits = field(default_factory=Hits)
    """How well the seat of the next request is guessed; only if the run measures it."""

    @property
    def name(self) -> str:
        """Of the group."""
        return self.spec.name

    def has_room(self, winner: Seat, without: Seat | None) -> bool:
        """Slots and memory for one more, once ``without`` has left."""
        held = [seat for seat in self.holders if seat is not without]
        if len(held) >= self.spec.slots:
            return False
        memory = self.spec.memory_bytes
        if not memory or self.spec.slots == 1:
            return True
        return sum(seat.spec.vram_bytes for seat in held) + winner.spec.vram_bytes <= memory


class World:
    """The whole state of a run."""

    def __init__(self, scenario: Scenario, options: Options) -> None:
        check(scenario)
        self.scenario = scenario
        self.options = options
        self.now = 0.0
        self.events: list[tuple[float, int, int, int]] = []
        """(time, kind, index of seat or group, token): a heap."""
        count = len(scenario.at)
        self.wait, self.stall, self.finished = [0.0] * count, [0.0] * count, [0.0] * count
        self.unfinished = count
        self.visits: list[Visit] = []
        self.switching_seconds = 0.0
        self.host_used = 0
        self.counters = dict.fromkeys(
            ("decisions", "switches", "moves", "parks", "park_failures", "restore_failures", "cold_starts", "freezes",
             "called_off", "refused", "no_room"), 0,
        )  # fmt: skip
        self.slowdown = _curve(options.slowdown) if options.slowdown else None
        self.soft = scenario.move_seconds is not None and len(scenario.groups) > 1
        self.groups = [Group(index, spec) for index, spec in enumerate(scenario.groups)]
        by_name = {group.name: group for group in self.groups}
        self.seats = [Seat(self, index, spec, by_name[spec.group]) for index, spec in enumerate(scenario.seats)]
        self.demanded: dict[int, Seat] = {}
        """The same over all groups."""
        self.gangs = _gangs(self.seats)
        self._fill(scenario)

    def _fill(self, scenario: Scenario) -> None:
        for request, (at, index) in enumerate(zip(scenario.at, scenario.seat, strict=True)):
            seat = self.seats[index]
            seat.requests.append(request)
            seat.at.append(at)
            seat.sums.append(seat.sums[-1] + at)
        for seat in self.seats:
            seat.group.seats.append(seat)
            if seat.pinned:
                self.demand(seat)
            fits = not scenario.host_bytes or self.host_used + seat.spec.host_bytes <= scenario.host_bytes
            seat.cold = not fits
            if fits:
                seat.host_used = seat.spec.host_bytes
                self.host_used += seat.host_used

    def schedule(self, after: float, kind: int, who: int, token: int = 0) -> None:
        """Something happens ``after`` seconds from now."""
        heappush(self.events, (self.now + after, kind, who, token))

    def demand(self, seat: Seat) -> None:
        """Somebody waits for this parked seat, and so for its gang, once all of that is parked."""
        if all(one.state is SeatState.PARKED for one in seat.gang):
            for one in seat.together:
                self.demanded[one.index] = one.group.demanded[one.index] = one

    def wanted(self, group: Group) -> bool:
        """Whether somebody waits who could come to this group."""
        return bool(self.demanded if self.soft else group.demanded)

    def asked_for(self, seat: Seat) -> list[Group]:
        """Which groups a new request of a seat that is not served concerns, best first: free ones, then its home."""
        if not self.soft or seat.gang or seat.state is not SeatState.PARKED:
            return [one.group for one in seat.together]
        home = seat.group
        return sorted(self.groups, key=lambda group: (len(group.holders) >= group.spec.slots, group is not home))

    def drawn(self, seat: Seat, what: str, count: int, mean: float, failure: float) -> tuple[float, bool]:
        """How long the count-th park or activation of a seat takes and whether it fails: the same in every run."""
        if not self.options.jitter and not failure:
            return mean, False
        chance = random.Random(f"{self.options.seed}/{seat.spec.name}/{what}/{count}")
        fails = chance.random() < failure
        if self.options.jitter:
            spread = sqrt(log(1.0 + self.options.jitter**2))
            mean *= chance.lognormvariate(-spread * spread / 2, spread)
        return mean, fails

    def outcome(self, policy: str) -> Outcome:
        """What came of it. Visits that have not ended have no end."""
        ended = max(self.finished, default=0.0)
        for group in self.groups:  # what goes on after the last request is not counted
            if group.operation is not None:
                self.switching_seconds -= max(0.0, group.operation.until - ended)
        for seat in self.seats:
            if seat.state in (SeatState.ACTIVE, SeatState.DRAINING, SeatState.PARKING):
                closed = float("inf") if seat.state is SeatState.ACTIVE else seat.closed_at
                self.visits.append(
                    Visit(seat.index, seat.group.name, seat.begun, seat.active_since, closed, float("inf"), seat.served,
                          seat.moved, seat.failed)
                )  # fmt: skip
        self.visits.sort(key=lambda visit: (visit.begun, visit.seat))
        return Outcome(
            scenario=self.scenario.name,
            policy=policy,
            wait=tuple(self.wait),
            stall=tuple(self.stall),
            finished=tuple(self.finished),
            visits=tuple(self.visits),
            ended=ended,
            switching_seconds=self.switching_seconds,
            counters=self.counters,
        )


def _gangs(seats: Sequence[Seat]) -> tuple[tuple[Seat, ...], ...]:
    """Tell each seat who is of its gang; gives the gangs of two or more."""
    by_name: dict[str, list[Seat]] = {}
    for seat in seats:
        by_name.setdefault(seat.spec.gang, []).append(seat)
    found = tuple(tuple(members) for name, members in by_name.items() if name and len(members) > 1)
    for members in found:
        for seat in members:
            seat.gang, seat.pinned = members, any(one.spec.pinned for one in members)
    return found


def _curve(points: tuple[tuple[float, float], ...]) -> Callable[[int], float]:
    """Straight lines between points, level before the first and after the last."""
    table = sorted(points)
    xs = [x for x, _ in table]

    def at(count: int) -> float:
        place = bisect_right(xs, count)
        if place == 0 or place == len(table):
            return table[max(0, place - 1)][1]
        (x0, y0), (x1, y1) = table[place - 1], table[place]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)

    return at
