"""Carrying out decisions in the simulator: drain or freeze, park, decide again, activate; and claims of gangs. Pure.

As in the GPU manager, a group is in one switch at a time, and the invariants do not depend on the policy: a decision
that cannot be carried out is refused and counted.

Gangs are seats on several groups that are active together or not at all. The GPU manager has no gangs; they are
simulated as it treats a larger group over smaller ones (``overlap.py``): each group's policy sees a gang as one seat. A
gang that a policy would activate has a *claim* on all its groups, if each of them would give it the next free slot. The
seats in the way drain on every group, each group keeps its slot for the gang, and when all have room the members are
activated together; the slowest one determines when they serve. A gang also leaves as a whole.
"""

from collections.abc import Iterable
from dataclasses import replace

from kybernate.lab.simulate.model import Visit
from kybernate.lab.simulate.views import look
from kybernate.lab.simulate.world import SWITCHED, WAKE, Group, Operation, Seat, SimulationError, World
from kybernate.policy import Decision, Park, Policy, Stay, Switch
from kybernate.policy.turns import FADE_SECONDS, free_slots
from kybernate.seat import SeatState

S = SeatState


class Switching:
    """All switches under way. Methods that end one give the groups that should be asked next."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_name = {seat.spec.name: seat for seat in world.seats}
        self.gangs = Gangs(world, self)

    def decision(self, group: Group, policy: Policy) -> Decision:
        """What the policy says about a group."""
        return self.gangs.decision(group, policy) if self.world.gangs else policy.decide(look(self.world, group))

    def carry_out(self, group: Group, decision: Decision, policy: Policy) -> tuple[Group, ...]:
        """Begin what the policy wants; gives groups that lost something by it and should be asked."""
        group.wake += 1
        if isinstance(decision, Switch) and (winner := self.named(decision.activate)).gang and winner.state is S.PARKED:
            self.gangs.claim(group, winner, decision, policy)
            return ()
        if isinstance(decision, Switch) and decision.evict is None and _no_memory(group, winner):
            self.world.counters["no_room"] += 1
            decision = policy.decide(replace(look(self.world, group), slots=0))
        match decision:
            case Stay(until=until):
                if until is not None:
                    self.world.schedule(max(until, 0.001), WAKE, group.index, group.wake)
            case Switch(activate=name, evict=None):
                return self._grant(group, self.named(name))
            case Switch(activate=name, evict=str(evicted), how=how):
                self.evict(group, self.named(evicted), self.named(name), freeze=how == "freeze")
            case Park(seat=name):
                self.evict(group, self.named(name), None)
        return ()

    def named(self, name: str) -> Seat:
        """The seat of this name. Raises SimulationError."""
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
        self.activate(group, winner)
        return asked

    def _forestall(self, group: Group, winner: Seat) -> tuple[Group, ...]:
        """Another group may be making room for it: a drain is called off, after a park that group chooses anew."""
        other, winner.claim = winner.claim, None
        operation = other.operation if other is not None else None
        if other is None or other is group or operation is None or operation.winner is not winner:
            return ()
        operation.winner = None
        if operation.phase != "draining" or operation.victim is None or operation.victim.gang:
            return ()
        self.world.counters["called_off"] += 1
        other.operation = None
        operation.victim.state = S.ACTIVE
        operation.victim.admit(self.world.now)
        return (other,)

    def evict(self, group: Group, victim: Seat, winner: Seat | None, *, freeze: bool = False) -> None:
        """Close a holder's admission, and its gang's, and park it as soon as nothing is in flight, or at once if that
        is frozen.
        """
        unfit = winner is not None and winner.group is not group and not self.world.soft
        if victim.state is not S.ACTIVE or victim.group is not group or unfit or not may_close(victim):
            self.world.counters["refused"] += 1
            return
        if winner is not None and (winner.state is not S.PARKED or not group.has_room(winner, victim)):
            winner = None  # one more has to yield before it fits
        if winner is not None:
            winner.claim = group
        frozen = freeze and any(one.in_flight for one in victim.together)
        frozen = frozen and all(one.spec.stall_budget_seconds > 0 for one in victim.together)
        for one in victim.together:
            one.state, one.closed_at = S.DRAINING, self.world.now
            one.group.operation = Operation(one, winner if one is victim else one.group.claimed, "draining", frozen)
            if frozen and one.in_flight:
                one.freeze(self.world.now)
        self.world.counters["freezes"] += frozen
        for one in victim.together:
            self.drained(one.group)

    def drained(self, group: Group) -> None:
        """Something of the victim ended. When nothing of it or its gang runs any more, it is parked."""
        operation = group.operation
        assert operation is not None
        assert operation.victim is not None
        victim = operation.victim
        if not operation.frozen and any(one.in_flight for one in victim.together):
            return
        victim.state = S.PARKING
        operation.phase = "parking"
        self._park(group, victim)

    def _park(self, group: Group, victim: Seat, pause: float = 0.0) -> None:
        victim.parks += 1
        mean, failure = victim.spec.park_seconds, self.world.options.park_failure
        victim.took, victim.failing = self.world.drawn(victim, "park", victim.parks, mean, failure)
        self._takes(group, victim.took, pause)

    def due(self, group: Group, policy: Policy) -> tuple[Group, ...]:
        """A park or an activation of this group ends now."""
        operation = group.operation
        assert operation is not None
        if operation.phase == "parking":
            assert operation.victim is not None
            return self._parked(group, operation, operation.victim, policy)
        assert operation.winner is not None
        return self._activated(operation.winner)

    def _parked(self, group: Group, operation: Operation, victim: Seat, policy: Policy) -> tuple[Group, ...]:
        world, planned = self.world, operation.winner
        if victim.failing and victim.gang:  # the others are on their way out already: it follows them
            self._park(group, victim, self._failed(group))
            return ()
        if victim.failing:
            self._free(group, operation)
            self._rolled_back(group, victim)
            if group.claimed is not None:
                return self.gangs.give_up(group.claimed)
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
        if any(one.waiting or one.in_flight or one.pinned for one in victim.together):
            world.demand(victim)
        asked = self._others(group, victim, None if planned is winner else planned)
        if winner is None or winner.state is not S.PARKED or group.claimed is not None:
            return (group, *asked)
        asked = (*self._forestall(group, winner), *asked)
        self.activate(group, winner)
        return asked

    def _newest(self, group: Group, operation: Operation, victim: Seat, policy: Policy) -> Seat | None:
        """Who comes, decided at the end of the park, as the GPU manager does it (``late_binding.py``): another answer
        counts if it can be carried out, else whom the group was cleared for. The victim itself is still on its way.
        """
        planned = operation.winner
        if not self.world.options.late_binding or group.claimed is not None:
            return planned
        self.world.counters["decisions"] += 1
        decision = self.decision(group, policy)
        if not isinstance(decision, Switch) or decision.evict is not None:
            return planned
        winner = self.named(decision.activate)
        if winner.gang and winner.state is S.PARKED:
            self.gangs.claim(group, winner, decision, policy)
            return operation.winner
        fits = winner.state is S.PARKED and group.has_room(winner, victim)
        return winner if fits and (winner.group is group or self.world.soft) else planned

    def _free(self, group: Group, operation: Operation) -> None:
        group.operation = None
        if operation.winner is not None and operation.winner.claim is group:
            operation.winner.claim = None

    def instead(self, group: Group, operation: Operation, winner: Seat) -> None:
        """Another one gets the slot that is being cleared."""
        if operation.winner is not None and operation.winner.claim is group:
            operation.winner.claim = None
        operation.winner = winner

    def _failed(self, group: Group) -> float:
        """A park failed: how long the group is left alone, longer each time."""
        self.world.counters["park_failures"] += 1
        group.failures += 1
        return min(30.0, 0.25 * 2.0 ** min(group.failures, 10))

    def _rolled_back(self, group: Group, victim: Seat) -> None:
        """The victim of a failed park serves on."""
        world = self.world
        victim.state = S.ACTIVE
        victim.thaw(world.now)
        victim.admit(world.now)
        pause = self._failed(group)
        group.paused_until = world.now + pause
        group.wake += 1
        world.schedule(pause, WAKE, group.index, group.wake)

    def _others(self, group: Group, *seats: Seat | None) -> tuple[Group, ...]:
        """Other groups, if they may want one of these seats: it was just parked, or does not come here after all."""
        wanted = any(seat is not None and (seat.waiting or seat.in_flight) for seat in seats)
        return tuple(other for other in self.world.groups if other is not group) if self.world.soft and wanted else ()

    def activate(self, group: Group, winner: Seat) -> None:
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

    def _activated(self, winner: Seat) -> tuple[Group, ...]:
        """It serves, as soon as the whole of its gang can."""
        operations = [one.group.operation for one in winner.together]
        for operation in operations:
            if operation is not None and operation.winner is winner:
                operation.phase = "ready"
        if any(operation is None or operation.phase != "ready" for operation in operations):
            return ()
        return tuple(self._serves(one.group, one) for one in winner.together)

    def _serves(self, group: Group, winner: Seat) -> Group:
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
        return group

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

    def _takes(self, group: Group, seconds: float, pause: float = 0.0) -> None:
        assert group.operation is not None
        group.operation.until = self.world.now + pause + seconds
        self.world.switching_seconds += seconds
        self.world.schedule(pause + seconds, SWITCHED, group.index)


def _no_memory(group: Group, winner: Seat) -> bool:
    """A slot is free, but somebody has to yield all the same."""
    return len(group.holders) < group.spec.slots and not group.has_room(winner, None)


class Gangs:
    """Claims of gangs. ``switching`` carries out what they need."""

    def __init__(self, world: World, switching: "Switching") -> None:
        self.world = world
        self.switching = switching

    def decision(self, group: Group, policy: Policy) -> Decision:
        """What the policy says about a group. A gang that cannot have all its groups now is not offered to it."""
        view = look(self.world, group)
        decision = policy.decide(view)
        withheld = False
        while isinstance(decision, Switch) and self._withheld(decision.activate, group, policy):
            name, withheld = decision.activate, True
            view = replace(view, seats=tuple(seat for seat in view.seats if seat.seat != name))
            decision = policy.decide(view)
        if withheld and isinstance(decision, Stay):  # what the others would say changes without an event here
            soon = FADE_SECONDS if decision.until is None else min(FADE_SECONDS, decision.until)
            return Stay(soon, decision.reason)
        return decision

    def _withheld(self, name: str, group: Group, policy: Policy) -> bool:
        member = self.switching.by_name.get(name)
        if member is None or not member.gang or member.state is not S.PARKED:
            return False
        if not any(one.waiting or one.in_flight or one.pinned for one in member.gang):
            # Ahead of its first request nobody makes room for it.
            return not all(other.operation is None and other.has_room(one, None) for one, other in _pairs(member))
        return not all(self._votes(one, other, policy) for one, other in _pairs(member) if other is not group)

    def _votes(self, member: Seat, group: Group, policy: Policy) -> bool:
        """Whether the policy would give the next free slot of this group to the gang."""
        self.world.counters["decisions"] += 1
        view = look(self.world, group)
        decision = policy.decide(replace(view, slots=view.slots - free_slots(view) + 1))
        return isinstance(decision, Switch) and decision.activate == member.spec.name

    def claim(self, group: Group, member: Seat, decision: Switch, policy: Policy) -> None:
        """A group begins to bring a gang: all its groups make room."""
        if member.group is not group or any(
            one.state is not S.PARKED or other.claimed for one, other in _pairs(member)
        ):
            self.world.counters["refused"] += 1
            return
        for one, other in _pairs(member):
            other.claimed = one
        if decision.evict is not None and group.operation is None:
            self.switching.evict(group, self.switching.named(decision.evict), member, freeze=decision.how == "freeze")
        for _, other in _pairs(member):
            self.prepare(other, policy)

    def prepare(self, group: Group, policy: Policy) -> None:
        """Bring a claimed group nearer to having room; the last one that has it activates the gang."""
        member, operation = group.claimed, group.operation
        if member is None:
            return
        if operation is not None:
            if operation.phase in ("draining", "parking") and operation.winner is not member:
                self.switching.instead(group, operation, member)
            return
        if group.has_room(member, None):
            if all(other.operation is None and other.has_room(one, None) for one, other in _pairs(member)):
                for one, other in _pairs(member):
                    other.claimed = None
                    self.switching.activate(other, one)
            return
        victim, how = self._victim(group, policy)
        if victim is not None:
            self.switching.evict(group, victim, member, freeze=how == "freeze")

    def _victim(self, group: Group, policy: Policy) -> tuple[Seat | None, str]:
        """Who yields to a claim: whom the policy names, else the holder with least to do. None: nobody can yet."""
        self.world.counters["decisions"] += 1
        decision = policy.decide(replace(look(self.world, group), slots=0))
        can = [seat for seat in group.holders if not seat.pinned and may_close(seat)]
        if isinstance(decision, Switch) and decision.evict is not None:
            named = self.switching.named(decision.evict)
            if named in can:
                return named, decision.how
        return min(can, key=lambda seat: (seat.waiting + seat.in_flight, seat.index), default=None), "drain"

    def give_up(self, member: Seat) -> tuple[Group, ...]:
        """One who was in the way stays there: the others may have their groups back before it is tried again."""
        for one, group in _pairs(member):
            group.claimed = None
            if group.operation is not None and group.operation.winner is one:
                group.operation.winner = None
        return tuple(group for _, group in _pairs(member))


def may_close(seat: Seat) -> bool:
    """Whether a holder, with its whole gang, can begin to leave now."""
    return all(one.state is S.ACTIVE and one.group.operation is None for one in seat.together)


def _pairs(member: Seat) -> Iterable[tuple[Seat, Group]]:
    return [(one, one.group) for one in member.gang]
