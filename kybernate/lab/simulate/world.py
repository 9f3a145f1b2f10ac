"""The state of a run: seats with their queues, groups, the agenda of events, and the result of each request.

No I/O; random numbers come from a seed.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush
from math import exp, expm1, log, sqrt

from kybernate.lab.simulate.model import Learned, Outcome, Scenario, SimGroup, SimSeat, Visit, check
from kybernate.policy import SeatView
from kybernate.policy.estimators import (
    COST_WEIGHT,
    FAST_HALF_LIFE,
    LEAST_SEEN,
    SERVICE_WEIGHT,
    SLOW_HALF_LIFE,
    Arrivals,
    Ewma,
)
from kybernate.policy.turns import LEAVING
from kybernate.seat import SeatState

FINISHED, SWITCHED, WAKE = 0, 1, 2
"""Kinds of events; at the same instant in this order."""

_RESTED_SECONDS = 3600.0
"""How long seats that are active at the beginning have been idle."""
_SAME = 1e-7
"""Ends of service closer than this are one instant: sums of floats differ that much."""


class SimulatedSeat:
    """Requests wait in order of arrival, are admitted up to the cap, and are served side by side.

    Served work is counted in seconds of a request that is alone (``done``); with ``n`` in flight it grows
    1/slowdown(n) per second.
    """

    __slots__ = (
        "_computes", "_done", "_done_at", "_ends", "_slowdown", "activate_cost", "active_since", "at", "begun",
        "busy_at", "claim", "closed_at", "cold", "failed", "failing", "group", "head", "host_used",
        "in_flight", "index", "moved", "park_cost", "parks", "rates", "requests", "restores", "rests", "seen",
        "seen_at", "served", "service", "spec", "state", "sums", "tail", "token", "took", "touched_at", "waited",
        "world",
    )  # fmt: skip

    def __init__(self, world: "RunState", index: int, spec: SimSeat, group: "SimulatedGroup") -> None:
        self.world = world
        self.index = index
        self.spec = spec
        self.group = group
        self.state = SeatState.PARKED
        self.requests: list[int] = []
        """Indices into the scenario's columns, all of them; those from head to tail wait now."""
        self.at: list[float] = []
        self.sums: list[float] = [0.0]
        """Sums of ``at``, so that the mean age of neighbours is one subtraction."""
        self.head = self.tail = 0
        self.in_flight = 0
        self.token = 0
        self.active_since = self.busy_at = self.begun = self.closed_at = self.touched_at = 0.0
        self.cold = False
        """Its copy in host memory was dropped; its next activation is a cold start."""
        self.host_used = 0
        self.served = self.parks = self.restores = 0
        self.rests = False
        """It is parked without demand."""
        self.moved = self.failed = False
        """Of the present visit."""
        self.took = 0.0
        self.waited = 0.0
        """Longest wait before each visit since it came to its group, summed."""
        self.failing = False
        """Of the park or activation under way: known to the simulator, not to the policy."""
        self.claim: SimulatedGroup | None = None
        """The group whose switch is for this seat."""
        self.rates = Arrivals(-world.scenario.observed_seconds)
        self.seen: SeatView | None = None
        """Its last view while it rests; None: something changed since."""
        self.seen_at = 0.0
        self.service = Ewma(SERVICE_WEIGHT, world.options.assumed_service_seconds)
        self.park_cost = Ewma(COST_WEIGHT, spec.park_seconds)
        self.activate_cost = Ewma(COST_WEIGHT, spec.activate_seconds)
        self._ends: list[tuple[float, int]] = []
        """(``done`` at which it ends, request), a heap."""
        self._done = self._done_at = 0.0
        self._slowdown = 1.0
        self._computes = False
        """It had requests in flight when the seats beside it were last slowed down."""
        if spec.learned is not None:
            self._begin_with(spec.learned)

    def _begin_with(self, learned: Learned) -> None:
        """What its estimators know at the beginning."""
        means = (
            (self.park_cost, learned.park_seconds),
            (self.activate_cost, learned.activate_seconds),
            (self.service, learned.service_seconds),
        )
        for mean, value in means:
            mean.value, mean.count = value, learned.count
        for rate, per_second in ((self.rates.fast, learned.rate_fast), (self.rates.slow, learned.rate_slow)):
            rate.add(0.0)
            rate.add(0.0, per_second / rate.at(0.0) - 1.0)

    @property
    def activate_seconds(self) -> float:
        """As the policy knows it."""
        return self.world.options.cold_start_seconds if self.cold else self.activate_cost.value

    @property
    def waiting(self) -> int:
        """Requests that arrived and were not admitted."""
        return self.tail - self.head

    def arrives(self, now: float) -> bool:
        """Add the next request of this seat; return whether it was admitted at once."""
        if self.state is SeatState.PARKED:
            self.world.demand(self)
        self.tail += 1
        self.rates.fast.add(now)
        self.rates.slow.add(now)
        self.busy_at = now
        if self.state is not SeatState.ACTIVE:
            return False
        if self.in_flight >= self.world.scenario.cap:
            return False
        self.admit(now)
        return True

    def admit(self, now: float) -> None:
        """Admit waiting requests up to the cap; schedule the next end of service."""
        world = self.world
        self._advance(now)
        room = min(world.scenario.cap - self.in_flight, self.tail - self.head)
        for request in self.requests[self.head : self.head + room]:
            world.wait[request] = waited = now - world.scenario.at[request]
            if waited > self.spec.slo_seconds and world.options.missed is not None:
                world.options.missed(self.index)
            heapq.heappush(self._ends, (self._done + world.scenario.service[request], request))
        self.head += room
        self.in_flight += room
        self.served += room
        if room:
            self.busy_at = now
        self._time_next(now)

    def finishes(self, now: float) -> None:
        """End all requests that are due now; waiting ones take their place if the seat still admits."""
        self._advance(now)
        world, ends = self.world, self._ends
        due = self._done + _SAME
        while ends and ends[0][0] <= due:
            _, request = heapq.heappop(ends)
            world.finished[request] = now
            world.unfinished -= 1
            self.in_flight -= 1
            self.service.add(now - world.scenario.at[request] - world.wait[request])
        self.busy_at = now
        if self.state is SeatState.ACTIVE:
            self.admit(now)
        else:
            self._time_next(now)

    def _advance(self, now: float) -> None:
        self._done += (now - self._done_at) / self._slowdown
        self._done_at = now

    def _time_next(self, now: float) -> None:
        """The event of the next end; an older one is void from now on."""
        self.token += 1
        if self.world.options.sharing and self._computes != bool(self.in_flight):
            self._computes = not self._computes
            for other in self._beside():
                other._advance(now)
                other._time_next(now)
        if not self._ends:
            return
        if self.world.slowdown is not None or self.world.options.sharing:
            alone = self.world.slowdown(self.in_flight) if self.world.slowdown is not None else 1.0
            self._slowdown = alone * (1.0 + self.world.options.sharing * len(self._beside()))
        left = max(0.0, self._ends[0][0] - self._done) * self._slowdown
        heapq.heappush(self.world.events, (now + left, FINISHED, self.index, self.token))

    def _beside(self) -> list["SimulatedSeat"]:
        """The other seats of its group that compute."""
        holders = self.group.holders
        return [one for one in holders if one is not self and one._computes]


__all__ = [
    "FINISHED",
    "SWITCHED",
    "WAKE",
    "RunOptions",
    "RunState",
    "SimulatedGroup",
    "SimulatedSwitch",
    "SimulationError",
]


class SimulationError(Exception):
    """The policy got stuck; the text names the time, the seat or group, and the reason."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run adds to the scenario. The defaults are the simplest model: nothing fails, nothing varies."""

    seed: int = 0
    """For jitter and failures. The k-th park of a seat is the same under every policy."""
    name: str = ""
    """Of the policy, in the outcome; empty: its class."""
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
    sharing: float = 0.0
    """By what share each other busy seat of its group slows a seat's requests; 0: they do not share its compute."""
    assumed_service_seconds: float = 5.0
    """The service time in views until the first request of a seat has ended."""
    refresh_seconds: float = 1.0
    """How old the rates may be in the view of a parked seat without demand (the routers' signals are not
    newer either); 0: always as of now, slower."""
    merged: bool = False
    """Show the parked seats without demand of a group as one seat with their summed rates: a view then takes as long
    with 200 models as with 20. For policies that read no more of such seats: those of this package.
    Groups whose seats share memory are shown whole."""
    missed: Callable[[int], None] | None = None
    """Called with the index of the seat when a request was not admitted within its SLO. It may raise, which ends the
    run."""
    side_by_side: bool = False
    """With lanes, more transfers than there are share them, instead of beginning in turn."""
    age_buckets: int = 64
    """Most ages of waiting requests in a view; if more wait, neighbours are given by their mean."""


class Resting:
    """Parked seats without demand of one group: their rates as sums, kept as seats come and go.

    All rates began at the same time, so that each is the decayed number of its events times a factor of that time.
    """

    __slots__ = ("_last", "_sums", "count", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self._last = since
        self._sums = (0.0, 0.0, 0.0, 0.0)
        """Of the fast and of the slow rates, and of both with each seat's times its seconds to activate."""

    def add(self, seat: SimulatedSeat, now: float, sign: int = 1) -> None:
        """Count a seat; ``sign`` -1 takes it out."""
        self.count += sign
        fast, slow = sign * seat.rates.fast.at(now), sign * seat.rates.slow.at(now)
        seconds, sums = seat.activate_seconds, self.at(now)
        self._sums = (
            (sums[0] + fast, sums[1] + slow, sums[2] + fast * seconds, sums[3] + slow * seconds)
            if self.count
            else (0.0, 0.0, 0.0, 0.0)
        )

    def at(self, now: float) -> tuple[float, float, float, float]:
        """The sums of the fast and slow rates, and those times the seconds to activate."""
        last = self._last
        if now > last:
            fast, slow = exp(_FAST * (last - now)), exp(_SLOW * (last - now))
            if last - self.since < _LONG:
                fast *= _part(_FAST, last - self.since) / _part(_FAST, now - self.since)
                slow *= _part(_SLOW, last - self.since) / _part(_SLOW, now - self.since)
            sums, self._last = self._sums, now
            self._sums = sums[0] * fast, sums[1] * slow, sums[2] * fast, sums[3] * slow
        return self._sums


_FAST, _SLOW = log(2.0) / FAST_HALF_LIFE, log(2.0) / SLOW_HALF_LIFE
_LONG = 37.0 / _SLOW
"""Seconds after which ``_part`` is 1 as a float."""


def _part(decay: float, seen: float) -> float:
    """By which share of all time the observed time counts; see ``Rate``."""
    return -expm1(-max(decay * seen, LEAST_SEEN * log(2.0)))


@dataclass(slots=True)
class SimulatedSwitch:
    """One switch of a group under way."""

    victim: SimulatedSeat | None
    incoming: SimulatedSeat | None
    phase: str
    """draining, parking or activating."""
    until: float = 0.0
    """When the park or activation under way ends."""
    begun: float = 0.0
    """When its transfer began, less the fixed seconds that follow it; with lanes, as ``left`` and ``after``."""
    left: float = 0.0
    """Seconds of it at full speed that are left."""
    after: float = 0.0
    """Seconds after its transfer."""


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """A group of GPUs."""

    index: int
    spec: SimGroup
    seats: list[SimulatedSeat] = field(default_factory=list)
    """Seats that hold it, or would be activated in it without moving."""
    holders: list[SimulatedSeat] = field(default_factory=list)
    """Seats that take one of its slots now."""
    demanded: dict[int, SimulatedSeat] = field(default_factory=dict)
    """Its parked seats with demand, by index."""
    resting: Resting | None = None
    """Its other parked seats; None: the run does not merge them."""
    operation: SimulatedSwitch | None = None
    rate: float = 0.0
    """Expected requests per second of its parked seats, as of ``rate_at``; None: others are parked now."""
    rate_at: float | None = None
    wake: int = 0
    failures: int = 0
    paused_until: float = 0.0
    """How often the seat of the next request is predicted; only if the run measures it."""

    @property
    def name(self) -> str:
        """Of the group."""
        return self.spec.name

    def has_room(self, incoming: SimulatedSeat, without: SimulatedSeat | None) -> bool:
        """Slots and memory for one more, once ``without`` has left."""
        held = [seat for seat in self.holders if seat is not without]
        if len(held) >= self.spec.slots:
            return False
        return not self.packs or sum(seat.spec.vram_bytes for seat in (*held, incoming)) <= self.spec.memory_bytes

    @property
    def packs(self) -> bool:
        """Whether its seats share its memory."""
        return bool(self.spec.memory_bytes) and self.spec.slots > 1

    @property
    def free_bytes(self) -> int | None:
        """Memory for further seats once those that leave have left; None: only slots count."""
        staying = (seat for seat in self.holders if seat.state not in LEAVING)
        return self.spec.memory_bytes - sum(seat.spec.vram_bytes for seat in staying) if self.packs else None


class RunState:
    """The whole state of a run."""

    def __init__(self, scenario: Scenario, options: RunOptions) -> None:
        check(scenario)
        self.scenario = scenario
        self.options = options
        self.now = 0.0
        self.events: list[tuple[float, int, int, int]] = []
        """(time, kind, index of seat or group, token): a heap."""
        count = len(scenario.at)
        self.wait, self.finished = [0.0] * count, [0.0] * count
        self.unfinished = count
        self.visits: list[Visit] = []
        self.switching_seconds = 0.0
        self.host_used = 0
        self.counters = dict.fromkeys(
            ("decisions", "switches", "moves", "parks", "park_failures", "restore_failures", "cold_starts",
             "called_off", "refused", "no_room"), 0,
        )  # fmt: skip
        self.slowdown = _curve(options.slowdown) if options.slowdown else None
        self.soft = scenario.move_seconds is not None and len(scenario.groups) > 1
        self.groups = [SimulatedGroup(index, spec) for index, spec in enumerate(scenario.groups)]
        by_name = {group.name: group for group in self.groups}
        self.seats = [
            SimulatedSeat(self, index, spec, by_name[spec.group]) for index, spec in enumerate(scenario.seats)
        ]
        self.demanded: dict[int, SimulatedSeat] = {}
        """The same over all groups."""
        for group in self.groups:
            group.resting = Resting(-scenario.observed_seconds) if options.merged and not group.packs else None
        self._fill(scenario)

    def _fill(self, scenario: Scenario) -> None:
        for request, (at, index) in enumerate(zip(scenario.at, scenario.seat, strict=True)):
            seat = self.seats[index]
            seat.requests.append(request)
            seat.at.append(at)
            seat.sums.append(seat.sums[-1] + at)
        for seat in self.seats:
            seat.group.seats.append(seat)
            if seat.spec.active:
                seat.state = SeatState.ACTIVE
                seat.active_since = seat.busy_at = -_RESTED_SECONDS
                seat.group.holders.append(seat)
                continue
            if seat.spec.pinned:
                self.demand(seat)
            fits = not scenario.host_bytes or self.host_used + seat.spec.host_bytes <= scenario.host_bytes
            seat.cold = not fits
            if fits:
                seat.host_used = seat.spec.host_bytes
                self.host_used += seat.host_used
            self.rests(seat, rests=not seat.spec.pinned)

    def schedule(self, after: float, kind: int, who: int, token: int = 0) -> None:
        """Add an event ``after`` seconds from now."""
        heappush(self.events, (self.now + after, kind, who, token))

    def demand(self, seat: SimulatedSeat) -> None:
        """Mark this parked seat as in demand."""
        self.rests(seat, rests=False)
        self.demanded[seat.index] = seat.group.demanded[seat.index] = seat

    def rests(self, seat: SimulatedSeat, *, rests: bool) -> None:
        """Whether a seat is parked without demand from now on."""
        if seat.rests is not rests:
            seat.rests = rests
            if seat.group.resting is not None:
                seat.group.resting.add(seat, self.now, 1 if rests else -1)

    def wanted(self, group: SimulatedGroup) -> bool:
        """Whether a seat in demand could be activated in this group."""
        return bool(self.demanded if self.soft else group.demanded)

    def asked_for(self, seat: SimulatedSeat) -> list[SimulatedGroup]:
        """Which groups a new request of a seat that is not served concerns, best first: its home while a park there
        ends, which its activation can follow, free ones, and else its home."""
        if not self.soft or seat.state is not SeatState.PARKED:
            return [seat.group]
        home = seat.group
        pool = [group for group in self.groups if self.moves(seat, group) or group is home]
        parks = home.operation is not None and home.operation.phase == "parking"
        return sorted(
            pool, key=lambda one: (not (parks and one is home), not one.has_room(seat, None), one is not home)
        )

    def moves(self, seat: SimulatedSeat, group: SimulatedGroup) -> bool:
        """Whether a seat may be activated in this group, which it does not belong to."""
        return self.soft and seat.group is not group and seat.group.spec.pool == group.spec.pool

    def drawn(self, seat: SimulatedSeat, what: str, count: int, mean: float, failure: float) -> tuple[float, bool]:
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
        """Return the outcome. Visits that have not ended have no end."""
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
            finished=tuple(self.finished),
            visits=tuple(self.visits),
            ended=ended,
            switching_seconds=self.switching_seconds,
            counters=self.counters,
        )


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
