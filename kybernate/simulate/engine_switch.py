"""Carrying out decisions in the simulator: drain or freeze, park, ask again, activate; what can fail, fails. Pure.

As in the GPU manager, a group is in one switch at a time, and the policy is not trusted with the invariants: what
cannot be done is refused and counted.
"""

from dataclasses import replace

from kybernate.policy import Decision, Park, Policy, Stay, Switch
from kybernate.seat import SeatState
from kybernate.simulate.engine_look import look
from kybernate.simulate.engine_seat import Seat
from kybernate.simulate.engine_world import SWITCHED, WAKE, Group, Operation, SimulationError, World
from kybernate.simulate.model import Visit

S = SeatState


class Switching:
    """All switches under way. Methods that end one give the groups that should be asked next."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_name = {seat.spec.name: seat for seat in world.seats}

    def carry_out(self, group: Group, decision: Decision, policy: Policy) -> tuple[Group, ...]:
        """Begin what the policy wants; gives groups that lost something by it and should be asked."""
        group.wake += 1
        if isinstance(decision, Switch) and decision.evict is None:
            winner = self._named(decision.activate)
            if len(group.holders) < group.spec.slots and not group.has_room(winner, None):
                # A slot is free, but no memory: somebody has to yield.
                self.world.counters["no_room"] += 1
                decision = policy.decide(replace(look(self.world, group), slots=0))
        match decision:
            case Stay(until=until):
                if until is not None:
                    self.world.schedule(max(until, 0.001), WAKE, group.index, group.wake)
            case Switch(activate=name, evict=None):
                return self._grant(group, self._named(name))
            case Switch(activate=name, evict=str(evicted), how=how):
                self._evict(group, self._named(evicted), self._named(name), how == "freeze")
            case Park(seat=name):
                self._evict(group, self._named(name), None, False)
        return ()

    def _named(self, name: str) -> Seat:
        seat = self.by_name.get(name)
        if seat is None:
            raise SimulationError(f"at {self.world.now:.3f} s the policy names seat {name!r}, which is not there")
        return seat

    def _grant(self, group: Group, winner: Seat) -> tuple[Group, ...]:
        if (
            winner.state is not S.PARKED
            or not group.has_room(winner, None)
            or (winner.group is not group and not self.world.soft)
        ):
            self.world.counters["refused"] += 1
            return ()
        asked = self._forestall(group, winner)
        self._activate(group, winner)
        return asked

    def _forestall(self, group: Group, winner: Seat) -> tuple[Group, ...]:
        """Another group may be making room for it: a drain is called off, after a park that group chooses anew."""
        other, winner.claim = winner.claim, None
        operation = other.operation if other is not None else None
        if other is None or other is group or operation is None or operation.winner is not winner:
            return ()
        operation.winner = None
        if operation.phase != "draining" or operation.victim is None:
            return ()
        self.world.counters["called_off"] += 1
        other.operation = None
        operation.victim.state = S.ACTIVE
        operation.victim.admit(self.world.now)
        return (other,)

    def _evict(self, group: Group, victim: Seat, winner: Seat | None, freeze: bool) -> None:
        """Close a holder's admission and park it as soon as nothing is in flight, or at once if it is frozen."""
        unfit = winner is not None and winner.group is not group and not self.world.soft
        if victim.state is not S.ACTIVE or victim.group is not group or unfit:
            self.world.counters["refused"] += 1
            return
        if winner is not None and (winner.state is not S.PARKED or not group.has_room(winner, victim)):
            winner = None  # one more has to yield before it fits
        if winner is not None:
            winner.claim = group
        victim.state = S.DRAINING
        victim.closed_at = self.world.now
        group.operation = Operation(victim, winner, "draining")
        if freeze and victim.in_flight and victim.spec.stall_budget_seconds > 0:
            victim.freeze(self.world.now)
            group.operation.frozen = True
            self.world.counters["freezes"] += 1
        if not victim.in_flight or group.operation.frozen:
            self.drained(group)

    def drained(self, group: Group) -> None:
        """Nothing of the victim runs any more: it is parked."""
        operation = group.operation
        assert operation is not None
        assert operation.victim is not None
        victim = operation.victim
        victim.state = S.PARKING
        operation.phase = "parking"
        victim.parks += 1
        options = self.world.options
        mean, failure = victim.spec.park_seconds, options.park_failure
        victim.took, victim.failing = self.world.drawn(victim, "park", victim.parks, mean, failure)
        self._takes(group, victim.took)

    def due(self, group: Group, policy: Policy) -> tuple[Group, ...]:
        """A park or an activation of this group ends now."""
        operation = group.operation
        assert operation is not None
        if operation.phase == "parking":
            assert operation.victim is not None
            return self._parked(group, operation, operation.victim, policy)
        assert operation.winner is not None
        return self._activated(group, operation.winner)

    def _parked(self, group: Group, operation: Operation, victim: Seat, policy: Policy) -> tuple[Group, ...]:
        world, planned = self.world, operation.winner
        if victim.failing:
            self._free(group, operation)
            self._rolled_back(group, victim)
            return self._others(group, planned)
        winner = self._newest(group, operation, victim, policy)
        self._free(group, operation)
        group.failures = 0
        world.counters["parks"] += 1
        victim.park_cost.add(victim.took)
        victim.state, victim.seen = S.PARKED, None
        victim.touched_at = world.now
        group.holders.remove(victim)
        world.visits.append(
            Visit(victim.index, group.name, victim.begun, victim.active_since, victim.closed_at, world.now,
                  victim.served, victim.moved, victim.failed)
        )  # fmt: skip
        self._keep_copy(victim, winner)
        if victim.waiting or victim.in_flight or victim.spec.pinned:
            world.demand(victim)
        asked = self._others(group, victim, None if planned is winner else planned)
        if winner is None or winner.state is not S.PARKED:
            return (group, *asked)
        asked = (*self._forestall(group, winner), *asked)
        self._activate(group, winner)
        return asked

    def _newest(self, group: Group, operation: Operation, victim: Seat, policy: Policy) -> Seat | None:
        """Who comes, decided at the end of the park, as the GPU manager does it (``late_binding.py``): another answer
        counts if it can be carried out, else whom the group was cleared for. The victim itself is still on its way.
        """
        planned = operation.winner
        if not self.world.options.late_binding:
            return planned
        self.world.counters["decisions"] += 1
        decision = policy.decide(look(self.world, group))
        if not isinstance(decision, Switch) or decision.evict is not None:
            return planned
        winner = self._named(decision.activate)
        fits = winner.state is S.PARKED and group.has_room(winner, victim)
        return winner if fits and (winner.group is group or self.world.soft) else planned

    def _free(self, group: Group, operation: Operation) -> None:
        group.operation = None
        if operation.winner is not None and operation.winner.claim is group:
            operation.winner.claim = None

    def _rolled_back(self, group: Group, victim: Seat) -> None:
        """A park failed: the victim serves on, and the group is left alone for a while, longer each time."""
        world = self.world
        world.counters["park_failures"] += 1
        victim.state = S.ACTIVE
        victim.thaw(world.now)
        victim.admit(world.now)
        group.failures += 1
        pause = min(30.0, 0.25 * 2**group.failures)
        group.paused_until = world.now + pause
        group.wake += 1
        world.schedule(pause, WAKE, group.index, group.wake)

    def _others(self, group: Group, *seats: Seat | None) -> tuple[Group, ...]:
        """Other groups, if they may want one of these seats: it was just parked, or does not come here after all."""
        wanted = any(seat is not None and (seat.waiting or seat.in_flight) for seat in seats)
        return tuple(other for other in self.world.groups if other is not group) if self.world.soft and wanted else ()

    def _activate(self, group: Group, winner: Seat) -> None:
        """Bring a parked seat to a group; it belongs there from now on."""
        world, options = self.world, self.world.options
        moved = winner.group is not group
        world.demanded.pop(winner.index, None)
        winner.group.demanded.pop(winner.index, None)
        if moved:
            winner.group.seats.remove(winner)
            group.seats.append(winner)
            winner.group = group
            world.counters["moves"] += 1
        group.holders.append(winner)
        group.operation = Operation(None, winner, "activating")
        winner.state = S.ACTIVATING
        winner.begun, winner.served, winner.moved, winner.failed = world.now, 0, moved, False
        winner.restores += 1
        world.counters["switches"] += 1
        extra = (world.scenario.move_seconds or 0.0) if moved else 0.0
        winner.took = 0.0
        if winner.cold:
            winner.cold = False
            extra = options.cold_start_seconds
        else:
            mean, failure = winner.spec.activate_seconds, options.restore_failure
            winner.took, winner.failed = world.drawn(winner, "activate", winner.restores, mean, failure)
            extra += options.cold_start_seconds if winner.failed else 0.0
            world.counters["restore_failures"] += winner.failed
        world.counters["cold_starts"] += extra >= options.cold_start_seconds > 0
        self._takes(group, winner.took + extra)

    def _activated(self, group: Group, winner: Seat) -> tuple[Group, ...]:
        world = self.world
        group.operation = None
        world.host_used -= winner.host_used
        winner.host_used = 0
        if winner.took and not winner.failed:
            winner.activate_cost.add(winner.took)
        winner.state = S.ACTIVE
        winner.active_since = winner.busy_at = world.now
        winner.thaw(world.now)
        winner.admit(world.now)
        return (group,)

    def _keep_copy(self, victim: Seat, winner: Seat | None) -> None:
        """Its VRAM lies in host memory now; if there is no room, whoever was parked longest is given up."""
        world, limit = self.world, self.world.scenario.host_bytes
        need = victim.spec.host_bytes
        if limit:
            kept = [s for s in world.seats if s.host_used and s is not winner and s.frozen_at is None]
            for other in sorted((s for s in kept if s.state is S.PARKED), key=lambda s: (s.touched_at, s.index)):
                if world.host_used + need <= limit:
                    break
                world.host_used -= other.host_used
                other.host_used, other.cold, other.seen = 0, True, None
            if world.host_used + need > limit and victim.frozen_at is None:
                victim.cold = True
                return
        victim.host_used = need
        world.host_used += need

    def _takes(self, group: Group, seconds: float) -> None:
        assert group.operation is not None
        group.operation.until = self.world.now + seconds
        self.world.switching_seconds += seconds
        self.world.schedule(seconds, SWITCHED, group.index)
