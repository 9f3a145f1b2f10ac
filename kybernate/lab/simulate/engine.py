"""The simulator: plays a scenario against a policy, event by event. Pure.

The policies are the live code; parking, activating and switching are a model (``docs/dev/simulate.md``). Times are
model seconds from the beginning of the scenario. The policy gets the same views as in the GPU manager (``views.py``),
learned from what has happened so far, never the future.
"""

import heapq
from collections.abc import Sequence

from kybernate.lab.simulate.model import Outcome, Scenario
from kybernate.lab.simulate.switches import Switching
from kybernate.lab.simulate.views import look
from kybernate.lab.simulate.world import (
    FINISHED,
    SWITCHED,
    WAKE,
    RunOptions,
    RunState,
    SimulatedGroup,
    SimulatedSeat,
    SimulationError,
)
from kybernate.policy import Policy

__all__ = ["RunOptions", "SimulationError", "run"]

_PATIENCE = 7200.0
"""A policy that leaves requests waiting although nothing else will happen (all have arrived, none is served, no switch
is under way) is asked again when it wished, and after 1 s, 2 s, 4 s …; if after this long it still does nothing, it
never will."""
_ASKED_AT_ONCE = 20_000
"""Decisions without time passing: more than this is a policy that runs in circles."""
_SWITCHED_FOR_NOTHING = 2_000
"""Parks and activations since a request last came or ended: more is a policy that will never let one end."""


def run(scenario: Scenario, policy: Policy, options: RunOptions | None = None) -> Outcome:
    """Play the scenario; the same arguments give the same outcome. Raises SimulationError for a policy that gets
    stuck and ValueError for a scenario that makes no sense.
    """
    world = RunState(scenario, options or RunOptions())
    _Run(world, policy).play()
    return world.outcome(world.options.name or type(policy).__name__)


class _Run:
    """One run: takes events in order of time and asks the policy where something changed that may matter."""

    def __init__(self, world: RunState, policy: Policy) -> None:
        self.world = world
        self.policy = policy
        self.switching = Switching(world)
        self.asked_at = -1.0
        self.asked = 0
        self.switched = 0

    def play(self) -> None:
        """Until everything has ended."""
        world, events = self.world, self.world.events
        arrivals = world.scenario.at
        count, index, pause, moved_at = len(arrivals), 0, 1.0, 0.0
        self._ask(world.groups)
        while world.unfinished:
            if index < count and not (events and events[0][0] <= arrivals[index]):
                world.now = moved_at = arrivals[index]
                self._arrives(index)
                index += 1
                continue
            if world.now - moved_at > _PATIENCE and index == count and all(event[1] == WAKE for event in events):
                raise SimulationError(self._stuck())
            if events:
                if events[0][1] != WAKE:
                    pause, moved_at = 1.0, max(moved_at, events[0][0])
                self._event()
            else:
                world.now += pause
                pause *= 2
                self._ask(world.groups)

    def _arrives(self, request: int) -> None:
        world = self.world
        self.switched = 0
        seat = world.seats[world.scenario.seat[request]]
        if seat.arrives(world.now):
            return
        for group in world.asked_for(seat):
            if group.operation is None:
                self._ask((group,))

    def _event(self) -> None:
        world = self.world
        time, kind, who, token = heapq.heappop(world.events)
        if kind == FINISHED:
            seat = world.seats[who]
            if token == seat.token:
                world.now, self.switched = time, 0
                self._finishes(seat)
        elif kind == SWITCHED:
            world.now = time
            if self.switching.lanes.count and not self.switching.lanes.over(world.groups[who]):
                return
            self.switched += 1
            if self.switched > _SWITCHED_FOR_NOTHING:
                raise SimulationError(self._restless())
            asked = self.switching.due(world.groups[who])
            self._ask(self.switching.lanes.in_turn(asked))
        elif token == world.groups[who].wake:
            world.now = time
            self._ask((world.groups[who],))

    def _finishes(self, seat: SimulatedSeat) -> None:
        """Requests of a seat end; others of its queue may be admitted; its group may want something else now."""
        seat.finishes(self.world.now)
        group, operation = seat.group, seat.group.operation
        if operation is None:
            if seat.in_flight == 0 or self.world.wanted(group):
                self._ask((group,))
        elif operation.victim is seat and operation.phase == "draining":
            self._ask(self.switching.drained(group, self.policy))

    def _ask(self, groups: Sequence[SimulatedGroup]) -> None:
        """Decide about these groups, one after the other, and begin what is decided."""
        world = self.world
        if world.now > self.asked_at:
            self.asked_at, self.asked = world.now, 0
        pending = list(groups)
        while pending:
            group = pending.pop(0)
            if group.operation is not None or group.paused_until > world.now or self.switching.lanes.holds(group):
                continue
            self.asked += 1
            if self.asked > _ASKED_AT_ONCE:
                raise SimulationError(
                    f"policy {self._name} decided {_ASKED_AT_ONCE} times at {world.now:.3f} s for group {group.name} "
                    f"without time passing; it runs in circles"
                )
            world.counters["decisions"] += 1
            pending += self.switching.carry_out(group, self.policy.decide(look(world, group)), self.policy)

    @property
    def _name(self) -> str:
        return self.world.options.name or type(self.policy).__name__

    def _restless(self) -> str:
        return (
            f"policy {self._name} has parked and activated {_SWITCHED_FOR_NOTHING} times until {self.world.now:.0f} s "
            f"while no request came or ended; {self.world.unfinished} of them never would"
        )

    def _stuck(self) -> str:
        waiting = [(seat.waiting, seat.spec.name) for seat in self.world.seats if seat.waiting]
        return (
            f"policy {self._name} leaves {sum(count for count, _ in waiting)} requests waiting for ever at "
            f"{self.world.now:.0f} s (most: {max(waiting, default=(0, 'none'))[1]}); it answers Stay although nothing "
            f"else will happen"
        )
