"""A seat in the simulator: its queue, what is in flight, and what is learned about it. Pure."""

import heapq
from typing import TYPE_CHECKING

from kybernate.lab.simulate.model import SimSeat
from kybernate.policy.estimators import COST_WEIGHT, SERVICE_WEIGHT, Arrivals, Ewma
from kybernate.seat import SeatState

if TYPE_CHECKING:
    from kybernate.lab.simulate.engine_world import Group, World
    from kybernate.policy import SeatView

FINISHED, SWITCHED, WAKE = 0, 1, 2
"""Kinds of events; at the same instant in this order."""

_SAME = 1e-7
"""Ends of service closer than this are one instant: sums of floats differ that much."""


class Seat:
    """Requests wait in order of arrival, are admitted up to the cap, and are served side by side.

    Served work is counted in seconds of a request that is alone (``done``); with ``n`` in flight it grows
    1/slowdown(n) per second, while frozen not at all.
    """

    __slots__ = (
        "_done", "_done_at", "_ends", "_slowdown", "activate_cost", "active_since", "at", "begun", "busy_at", "claim",
        "closed_at", "cold", "failed", "failing", "frozen_at", "gang", "group", "head", "host_used", "in_flight",
        "index", "moved", "park_cost", "parks", "pinned", "rates", "requests", "restores", "seen", "seen_at", "served",
        "service", "spec", "state", "sums", "tail", "token", "took", "touched_at", "world",
    )  # fmt: skip

    def __init__(self, world: "World", index: int, spec: SimSeat, group: "Group") -> None:
        self.world = world
        self.index = index
        self.spec = spec
        self.group = group
        self.gang: tuple[Seat, ...] = ()
        """All that run only together with it, itself among them; empty: it stands alone."""
        self.pinned = spec.pinned
        """It, or one of its gang."""
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
        self.frozen_at: float | None = None
        self.cold = False
        """Its copy in host memory was given up; it has to be started from disk."""
        self.host_used = 0
        self.served = self.parks = self.restores = 0
        self.moved = self.failed = False
        """Of the present visit."""
        self.took = 0.0
        self.failing = False
        """Of the park or activation under way: known to the simulator, not to the policy."""
        self.claim: Group | None = None
        """The group that makes room for it."""
        self.rates = Arrivals()
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

    @property
    def together(self) -> tuple["Seat", ...]:
        """Its gang, or it alone."""
        return self.gang or (self,)

    @property
    def waiting(self) -> int:
        """Requests that arrived and were not admitted."""
        return self.tail - self.head

    def arrives(self, now: float) -> bool:
        """The next request of this seat is here; whether it was admitted at once."""
        self.tail += 1
        self.rates.fast.add(now)
        self.rates.slow.add(now)
        self.busy_at = now
        if self.state is not SeatState.ACTIVE:
            if self.state is SeatState.PARKED:
                self.world.demand(self)
            return False
        if self.in_flight >= self.world.scenario.cap:
            return False
        self.admit(now)
        return True

    def admit(self, now: float) -> None:
        """Let in what may come in; time the next end."""
        world = self.world
        self._advance(now)
        room = min(world.scenario.cap - self.in_flight, self.tail - self.head)
        for request in self.requests[self.head : self.head + room]:
            world.wait[request] = now - world.scenario.at[request]
            heapq.heappush(self._ends, (self._done + world.scenario.service[request], request))
        self.head += room
        self.in_flight += room
        self.served += room
        if room:
            self.busy_at = now
        self._time_next(now)

    def finishes(self, now: float) -> None:
        """All that end now, end; those that wait take their place if the seat still admits."""
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

    def freeze(self, now: float) -> None:
        """What is in flight stands still until ``thaw``."""
        self._advance(now)
        self.frozen_at = now
        self.token += 1

    def thaw(self, now: float) -> None:
        """What was frozen goes on; the time in between was a stall."""
        if self.frozen_at is None:
            return
        for _, request in self._ends:
            self.world.stall[request] += now - self.frozen_at
        self.frozen_at = None
        self._done_at = now

    def _advance(self, now: float) -> None:
        self._done += (now - self._done_at) / self._slowdown
        self._done_at = now

    def _time_next(self, now: float) -> None:
        """The event of the next end; an older one is void from now on."""
        self.token += 1
        if not self._ends:
            return
        if self.world.slowdown is not None:
            self._slowdown = self.world.slowdown(self.in_flight)
        left = max(0.0, self._ends[0][0] - self._done) * self._slowdown
        heapq.heappush(self.world.events, (now + left, FINISHED, self.index, self.token))
