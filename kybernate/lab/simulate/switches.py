"""Carrying out decisions in the simulator: drain or freeze, park, decide again, activate. Pure.

As in the GPU manager, a group is in one switch at a time, and the invariants do not depend on the policy: a decision
that cannot be carried out is refused and counted.
"""

from dataclasses import replace

from kybernate.lab.simulate.lanes import Lanes
from kybernate.lab.simulate.model import Visit
from kybernate.lab.simulate.views import look
from kybernate.lab.simulate.world import (
    SWITCHED,
    WAKE,
    RunState,
    SimulatedGroup,
    SimulatedSeat,
    SimulatedSwitch,
    SimulationError,
)
from kybernate.policy import Decision, Park, Policy, Stay, Switch
from kybernate.seat import SeatState

S = SeatState


class Switching:
    """All switches under way. Methods that end one return the groups to decide about next."""

    def __init__(self, world: RunState) -> None:
        self.world = world
        self.lanes = Lanes(world)
        self.by_name = {seat.spec.name: seat for seat in world.seats}

    def carry_out(self, group: SimulatedGroup, decision: Decision, policy: Policy) -> tuple[SimulatedGroup, ...]:
        """Begin the decided switch; return the groups that lost a switch by it and need a new decision."""
        group.wake += 1
        if isinstance(decision, Switch) and decision.evict is None and _no_memory(group, self.named(decision.activate)):
            self.world.counters["no_room"] += 1
            decision = policy.decide(replace(look(self.world, group), slots=0))
        match decision:
            case Stay(until=until):
                if until is not None:
                    self.world.schedule(max(until, 0.001), WAKE, group.index, group.wake)
            case Switch(activate=name, evict=None):
                return self._grant(group, self.named(name))
            case Switch(activate=name, evict=str(evicted)):
                return self.evict(group, self.named(evicted), self.named(name), policy)
            case Park(seat=name):
                return self.evict(group, self.named(name), None, policy)
        return ()

    def named(self, name: str) -> SimulatedSeat:
        """The seat of this name. Raises SimulationError."""
        seat = self.by_name.get(name)
        if seat is None:
            raise SimulationError(f"at {self.world.now:.3f} s the policy names seat {name!r}, which is not there")
        return seat

    def _grant(self, group: SimulatedGroup, incoming: SimulatedSeat) -> tuple[SimulatedGroup, ...]:
        if (
            incoming.state is not S.PARKED
            or not group.has_room(incoming, None)
            or not (incoming.group is group or self.world.moves(incoming, group))
        ):
            self.world.counters["refused"] += 1
            return ()
        asked = self._forestall(group, incoming)
        self.activate(group, incoming)
        return asked

    def _forestall(self, group: SimulatedGroup, incoming: SimulatedSeat) -> tuple[SimulatedGroup, ...]:
        """End another group's switch for this seat: a drain is cancelled; after a park that group decides anew."""
        other, incoming.claim = incoming.claim, None
        operation = other.operation if other is not None else None
        if other is None or other is group or operation is None or operation.incoming is not incoming:
            return ()
        operation.incoming = None
        if operation.phase != "draining" or operation.victim is None:
            return ()
        self.world.counters["called_off"] += 1
        other.operation = None
        operation.victim.state = S.ACTIVE
        operation.victim.admit(self.world.now)
        return (other,)

    def evict(
        self, group: SimulatedGroup, victim: SimulatedSeat, incoming: SimulatedSeat | None, policy: Policy
    ) -> tuple[SimulatedGroup, ...]:
        """Close the admission of a holder; park it when nothing is in flight."""
        unfit = incoming is not None and not (incoming.group is group or self.world.moves(incoming, group))
        if victim.state is not S.ACTIVE or victim.group is not group or unfit or group.operation is not None:
            self.world.counters["refused"] += 1
            return ()
        if incoming is not None and (incoming.state is not S.PARKED or not group.has_room(incoming, victim)):
            incoming = None  # one more has to yield before it fits
        if incoming is not None:
            incoming.claim = group
        victim.state, victim.closed_at = S.DRAINING, self.world.now
        group.operation = SimulatedSwitch(victim, incoming, "draining")
        return self.drained(group, policy)

    def drained(self, group: SimulatedGroup, policy: Policy) -> tuple[SimulatedGroup, ...]:
        """Park the victim once nothing of it is in flight, for the seat that the policy activates now. Returns the
        groups that may want the one before it."""
        operation = group.operation
        assert operation is not None
        assert operation.victim is not None
        victim = operation.victim
        if victim.in_flight:
            return ()
        asked = self._bind(group, operation, victim, policy)
        victim.state = S.PARKING
        operation.phase = "parking"
        victim.parks += 1
        mean, failure = victim.spec.park_seconds, self.world.options.park_failure
        victim.took, victim.failing = self.world.drawn(victim, "park", victim.parks, mean, failure)
        self._takes(group, victim)
        return asked

    def due(self, group: SimulatedGroup) -> tuple[SimulatedGroup, ...]:
        """End a park or an activation of this group."""
        operation = group.operation
        assert operation is not None
        if operation.phase == "parking":
            assert operation.victim is not None
            return self._parked(group, operation, operation.victim)
        assert operation.incoming is not None
        return (self._serves(group, operation.incoming),)

    def _parked(
        self, group: SimulatedGroup, operation: SimulatedSwitch, victim: SimulatedSeat
    ) -> tuple[SimulatedGroup, ...]:
        world, incoming = self.world, operation.incoming
        if victim.failing:
            self._free(group, operation)
            self._rolled_back(group, victim)
            return self._others(group, incoming)
        self._free(group, operation)
        group.failures = 0
        world.counters["parks"] += 1
        victim.park_cost.add(victim.took)
        victim.state, victim.seen = S.PARKED, None
        victim.touched_at = world.now
        group.holders.remove(victim)
        group.rate_at = None
        world.visits.append(
            Visit(victim.index, group.name, victim.begun, victim.active_since, victim.closed_at, world.now,
                  victim.served, victim.moved, victim.failed)
        )  # fmt: skip
        self._keep_copy(victim, incoming)
        if victim.waiting or victim.in_flight or victim.spec.pinned:
            world.demand(victim)
        else:
            world.rests(victim, rests=True)
        asked = self._others(group, victim)
        if incoming is None or incoming.state is not S.PARKED:
            return (group, *asked)
        asked = (*self._forestall(group, incoming), *asked)
        self.activate(group, incoming)
        return asked

    def _bind(
        self, group: SimulatedGroup, operation: SimulatedSwitch, victim: SimulatedSeat, policy: Policy
    ) -> tuple[SimulatedGroup, ...]:
        """Choose the incoming seat again, as the GPU manager does (``switch.bind``), if the newest decision can
        be carried out. Return the groups that may want the one before it.
        """
        self.world.counters["decisions"] += 1
        before, decision = operation.incoming, policy.decide(look(self.world, group))
        if not isinstance(decision, Switch) or decision.evict is not None:
            return ()
        seat = self.named(decision.activate)
        fits = seat.state is S.PARKED and group.has_room(seat, victim)
        if seat is before or not fits or not (seat.group is group or self.world.moves(seat, group)):
            return ()
        if before is not None and before.claim is group:
            before.claim = None
        operation.incoming, seat.claim = seat, group
        return self._others(group, before)

    def _free(self, group: SimulatedGroup, operation: SimulatedSwitch) -> None:
        group.operation = None
        if operation.incoming is not None and operation.incoming.claim is group:
            operation.incoming.claim = None

    def _rolled_back(self, group: SimulatedGroup, victim: SimulatedSeat) -> None:
        """The victim of a failed park is active again; the group pauses, longer after each failure."""
        world = self.world
        victim.state = S.ACTIVE
        victim.admit(world.now)
        world.counters["park_failures"] += 1
        group.failures += 1
        pause = min(30.0, 0.25 * 2.0 ** min(group.failures, 10))
        group.paused_until = world.now + pause
        group.wake += 1
        world.schedule(pause, WAKE, group.index, group.wake)

    def _others(self, group: SimulatedGroup, *seats: SimulatedSeat | None) -> tuple[SimulatedGroup, ...]:
        """Other groups, if they may want one of these seats: it was just parked, or does not come here after all."""
        wanted = any(seat is not None and (seat.waiting or seat.in_flight) for seat in seats)
        return tuple(other for other in self.world.groups if other is not group) if self.world.soft and wanted else ()

    def activate(self, group: SimulatedGroup, incoming: SimulatedSeat) -> None:
        """Activate a parked seat in a group, which becomes its home."""
        world, options = self.world, self.world.options
        moved = incoming.group is not group
        world.rests(incoming, rests=False)
        world.demanded.pop(incoming.index, None)
        incoming.group.demanded.pop(incoming.index, None)
        if moved:
            incoming.group.seats.remove(incoming)
            incoming.group.rate_at = None
            group.seats.append(incoming)
            incoming.group = group
            world.counters["moves"] += 1
        group.holders.append(incoming)
        group.rate_at = None
        group.operation = SimulatedSwitch(None, incoming, "activating")
        incoming.state = S.ACTIVATING
        incoming.begun, incoming.served, incoming.moved, incoming.failed = world.now, 0, moved, False
        incoming.restores += 1
        oldest = world.now - incoming.at[incoming.head] if incoming.tail > incoming.head else 0.0
        incoming.waited = 0.0 if moved else incoming.waited + oldest
        world.counters["switches"] += 1
        extra = (world.scenario.move_seconds or 0.0) if moved else 0.0
        incoming.took = 0.0
        if incoming.cold:
            incoming.cold = False
            extra = options.cold_start_seconds
        else:
            mean, failure = incoming.spec.activate_seconds, options.restore_failure
            incoming.took, incoming.failed = world.drawn(incoming, "activate", incoming.restores, mean, failure)
            extra += options.cold_start_seconds if incoming.failed else 0.0
            world.counters["restore_failures"] += incoming.failed
        world.counters["cold_starts"] += extra >= options.cold_start_seconds > 0
        self._takes(group, incoming, extra + world.scenario.control_seconds)

    def _serves(self, group: SimulatedGroup, incoming: SimulatedSeat) -> SimulatedGroup:
        world = self.world
        group.operation = None
        world.host_used -= incoming.host_used
        incoming.host_used = 0
        if incoming.took and not incoming.failed:
            incoming.activate_cost.add(incoming.took)
        incoming.state = S.ACTIVE
        incoming.active_since = incoming.busy_at = world.now
        incoming.admit(world.now)
        return group

    def _keep_copy(self, victim: SimulatedSeat, incoming: SimulatedSeat | None) -> None:
        """Keep the victim's VRAM in host memory; without room, the copies of the longest parked seats are dropped."""
        world, limit = self.world, self.world.scenario.host_bytes
        need = victim.spec.host_bytes
        if limit:
            kept = [s for s in world.seats if s.host_used and s is not incoming]
            for other in sorted((s for s in kept if s.state is S.PARKED), key=lambda s: (s.touched_at, s.index)):
                if world.host_used + need <= limit:
                    break
                world.host_used -= other.host_used
                resting = other.rests
                world.rests(other, rests=False)
                other.host_used, other.cold, other.seen = 0, True, None
                world.rests(other, rests=resting)
            if world.host_used + need > limit:
                victim.cold = True
                return
        victim.host_used = need
        world.host_used += need

    def _takes(self, group: SimulatedGroup, seat: SimulatedSeat, after: float = 0.0) -> None:
        assert group.operation is not None
        if self.lanes.count and seat.took:
            self.lanes.begin(group, seat, after)
            return
        seconds = seat.took + after
        group.operation.until = self.world.now + seconds
        self.world.switching_seconds += seconds
        self.world.schedule(seconds, SWITCHED, group.index)


def _no_memory(group: SimulatedGroup, incoming: SimulatedSeat) -> bool:
    """Whether a slot is free but a holder has to leave for its memory."""
    return len(group.holders) < group.spec.slots and not group.has_room(incoming, None)
