"""Carrying out decisions in the simulator: drain or freeze, park, decide again, activate; and claims of gangs. Pure.

As in the GPU manager, a group is in one switch at a time, and the invariants do not depend on the policy: a decision
that cannot be carried out is refused and counted.

Gangs are seats on several groups that are active together or not at all. The GPU manager has no gangs; they are
simulated as it treats a larger group over smaller ones (``arbiter.py``): each group's policy sees a gang as one seat. A
gang that a policy would activate has a *claim* on all its groups, if each of them would give it the next free slot. The
seats in the way drain on every group, each group keeps its slot for the gang, and when all have room the members are
activated together; the slowest one determines when they serve. A gang also leaves as a whole.
"""

from collections.abc import Iterable
from dataclasses import replace

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
from kybernate.policy.turns import FADE_SECONDS, free_slots
from kybernate.seat import SeatState

S = SeatState


class Switching:
    """All switches under way. Methods that end one return the groups to decide about next."""

    def __init__(self, world: RunState) -> None:
        self.world = world
        self.by_name = {seat.spec.name: seat for seat in world.seats}
        self.gangs = Gangs(world, self)

    def decision(self, group: SimulatedGroup, policy: Policy) -> Decision:
        """Return the policy's decision about a group."""
        return self.gangs.decision(group, policy) if self.world.gangs else policy.decide(look(self.world, group))

    def carry_out(self, group: SimulatedGroup, decision: Decision, policy: Policy) -> tuple[SimulatedGroup, ...]:
        """Begin the decided switch; return the groups that lost a switch by it and need a new decision."""
        group.wake += 1
        if isinstance(decision, Switch):
            incoming = self.named(decision.activate)
            if incoming.gang and incoming.state is S.PARKED:
                self.gangs.claim(group, incoming, decision, policy)
                return ()
        if isinstance(decision, Switch) and decision.evict is None and _no_memory(group, incoming):
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
            or (incoming.group is not group and not self.world.soft)
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
        if operation.phase != "draining" or operation.victim is None or operation.victim.gang:
            return ()
        self.world.counters["called_off"] += 1
        other.operation = None
        operation.victim.state = S.ACTIVE
        operation.victim.admit(self.world.now)
        return (other,)

    def evict(
        self, group: SimulatedGroup, victim: SimulatedSeat, incoming: SimulatedSeat | None, *, freeze: bool = False
    ) -> None:
        """Close the admission of a holder and its gang; park it when nothing is in flight, or at once if frozen."""
        unfit = incoming is not None and incoming.group is not group and not self.world.soft
        if victim.state is not S.ACTIVE or victim.group is not group or unfit or not may_close(victim):
            self.world.counters["refused"] += 1
            return
        if incoming is not None and (incoming.state is not S.PARKED or not group.has_room(incoming, victim)):
            incoming = None  # one more has to yield before it fits
        if incoming is not None:
            incoming.claim = group
        frozen = freeze and any(one.in_flight for one in victim.together)
        frozen = frozen and all(one.spec.stall_budget_seconds > 0 for one in victim.together)
        for one in victim.together:
            one.state, one.closed_at = S.DRAINING, self.world.now
            one.group.operation = SimulatedSwitch(
                one, incoming if one is victim else one.group.claimed, "draining", frozen
            )
            if frozen and one.in_flight:
                one.freeze(self.world.now)
        self.world.counters["freezes"] += frozen
        for one in victim.together:
            self.drained(one.group)

    def drained(self, group: SimulatedGroup) -> None:
        """Park the victim once nothing of it or its gang is in flight."""
        operation = group.operation
        assert operation is not None
        assert operation.victim is not None
        victim = operation.victim
        if not operation.frozen and any(one.in_flight for one in victim.together):
            return
        victim.state = S.PARKING
        operation.phase = "parking"
        self._park(group, victim)

    def _park(self, group: SimulatedGroup, victim: SimulatedSeat, pause: float = 0.0) -> None:
        victim.parks += 1
        mean, failure = victim.spec.park_seconds, self.world.options.park_failure
        victim.took, victim.failing = self.world.drawn(victim, "park", victim.parks, mean, failure)
        self._takes(group, victim.took, pause)

    def due(self, group: SimulatedGroup, policy: Policy) -> tuple[SimulatedGroup, ...]:
        """End a park or an activation of this group."""
        operation = group.operation
        assert operation is not None
        if operation.phase == "parking":
            assert operation.victim is not None
            return self._parked(group, operation, operation.victim, policy)
        assert operation.incoming is not None
        return self._activated(operation.incoming)

    def _parked(
        self, group: SimulatedGroup, operation: SimulatedSwitch, victim: SimulatedSeat, policy: Policy
    ) -> tuple[SimulatedGroup, ...]:
        world, planned = self.world, operation.incoming
        if victim.failing and victim.gang:  # the others are on their way out already: it follows them
            self._park(group, victim, self._failed(group))
            return ()
        if victim.failing:
            self._free(group, operation)
            self._rolled_back(group, victim)
            if group.claimed is not None:
                return self.gangs.drop_claim(group.claimed)
            return self._others(group, planned)
        incoming = self._newest(group, operation, victim, policy)
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
        self._keep_copy(victim, incoming)
        if any(one.waiting or one.in_flight or one.pinned for one in victim.together):
            world.demand(victim)
        asked = self._others(group, victim, None if planned is incoming else planned)
        if incoming is None or incoming.state is not S.PARKED or group.claimed is not None:
            return (group, *asked)
        asked = (*self._forestall(group, incoming), *asked)
        self.activate(group, incoming)
        return asked

    def _newest(
        self, group: SimulatedGroup, operation: SimulatedSwitch, victim: SimulatedSeat, policy: Policy
    ) -> SimulatedSeat | None:
        """Return the incoming seat, decided at the end of the park, as in the GPU manager's late binding.

        The newest decision counts if it can be carried out, else the planned seat. The victim is not parked yet.
        """
        planned = operation.incoming
        if not self.world.options.late_binding or group.claimed is not None:
            return planned
        self.world.counters["decisions"] += 1
        decision = self.decision(group, policy)
        if not isinstance(decision, Switch) or decision.evict is not None:
            return planned
        incoming = self.named(decision.activate)
        if incoming.gang and incoming.state is S.PARKED:
            self.gangs.claim(group, incoming, decision, policy)
            return operation.incoming
        fits = incoming.state is S.PARKED and group.has_room(incoming, victim)
        return incoming if fits and (incoming.group is group or self.world.soft) else planned

    def _free(self, group: SimulatedGroup, operation: SimulatedSwitch) -> None:
        group.operation = None
        if operation.incoming is not None and operation.incoming.claim is group:
            operation.incoming.claim = None

    def instead(self, group: SimulatedGroup, operation: SimulatedSwitch, incoming: SimulatedSeat) -> None:
        """Give the slot that is being cleared to another seat."""
        if operation.incoming is not None and operation.incoming.claim is group:
            operation.incoming.claim = None
        operation.incoming = incoming

    def _failed(self, group: SimulatedGroup) -> float:
        """Count a failed park; return the group's pause, exponential in the failures."""
        self.world.counters["park_failures"] += 1
        group.failures += 1
        return min(30.0, 0.25 * 2.0 ** min(group.failures, 10))

    def _rolled_back(self, group: SimulatedGroup, victim: SimulatedSeat) -> None:
        """The victim of a failed park is active again."""
        world = self.world
        victim.state = S.ACTIVE
        victim.thaw(world.now)
        victim.admit(world.now)
        pause = self._failed(group)
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
        world.demanded.pop(incoming.index, None)
        incoming.group.demanded.pop(incoming.index, None)
        if moved:
            incoming.group.seats.remove(incoming)
            group.seats.append(incoming)
            incoming.group = group
            world.counters["moves"] += 1
        group.holders.append(incoming)
        group.operation = SimulatedSwitch(None, incoming, "activating")
        incoming.state = S.ACTIVATING
        incoming.begun, incoming.served, incoming.moved, incoming.failed = world.now, 0, moved, False
        incoming.restores += 1
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
        self._takes(group, incoming.took + extra)

    def _activated(self, incoming: SimulatedSeat) -> tuple[SimulatedGroup, ...]:
        """The seat is active as soon as its whole gang is ready."""
        operations = [one.group.operation for one in incoming.together]
        for operation in operations:
            if operation is not None and operation.incoming is incoming:
                operation.phase = "ready"
        if any(operation is None or operation.phase != "ready" for operation in operations):
            return ()
        return tuple(self._serves(one.group, one) for one in incoming.together)

    def _serves(self, group: SimulatedGroup, incoming: SimulatedSeat) -> SimulatedGroup:
        world = self.world
        group.operation = None
        world.host_used -= incoming.host_used
        incoming.host_used = 0
        if incoming.took and not incoming.failed:
            incoming.activate_cost.add(incoming.took)
        incoming.state = S.ACTIVE
        incoming.active_since = incoming.busy_at = world.now
        incoming.thaw(world.now)
        incoming.admit(world.now)
        return group

    def _keep_copy(self, victim: SimulatedSeat, incoming: SimulatedSeat | None) -> None:
        """Keep the victim's VRAM in host memory; without room, the copies of the longest parked seats are dropped."""
        world, limit = self.world, self.world.scenario.host_bytes
        need = victim.spec.host_bytes
        if limit:
            kept = [s for s in world.seats if s.host_used and s is not incoming and s.frozen_at is None]
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

    def _takes(self, group: SimulatedGroup, seconds: float, pause: float = 0.0) -> None:
        assert group.operation is not None
        group.operation.until = self.world.now + pause + seconds
        self.world.switching_seconds += seconds
        self.world.schedule(pause + seconds, SWITCHED, group.index)


def _no_memory(group: SimulatedGroup, incoming: SimulatedSeat) -> bool:
    """Whether a slot is free but a holder has to leave for its memory."""
    return len(group.holders) < group.spec.slots and not group.has_room(incoming, None)


class Gangs:
    """Claims of gangs. ``switching`` carries out their evictions and activations."""

    def __init__(self, world: RunState, switching: "Switching") -> None:
        self.world = world
        self.switching = switching

    def decision(self, group: SimulatedGroup, policy: Policy) -> Decision:
        """Return the policy's decision; a gang that cannot have all its groups now is not in its view."""
        view = look(self.world, group)
        decision = policy.decide(view)
        withheld = False
        while isinstance(decision, Switch) and self._withheld(decision.activate, group, policy):
            name, withheld = decision.activate, True
            view = replace(view, seats=tuple(seat for seat in view.seats if seat.seat != name))
            decision = policy.decide(view)
        if withheld and isinstance(decision, Stay):  # the other groups' decisions change without an event here
            soon = FADE_SECONDS if decision.until is None else min(FADE_SECONDS, decision.until)
            return Stay(soon, decision.reason)
        return decision

    def _withheld(self, name: str, group: SimulatedGroup, policy: Policy) -> bool:
        member = self.switching.by_name.get(name)
        if member is None or not member.gang or member.state is not S.PARKED:
            return False
        if not any(one.waiting or one.in_flight or one.pinned for one in member.gang):
            # Without demand no seat leaves for it.
            return not all(other.operation is None and other.has_room(one, None) for one, other in _pairs(member))
        return not all(self._votes(one, other, policy) for one, other in _pairs(member) if other is not group)

    def _votes(self, member: SimulatedSeat, group: SimulatedGroup, policy: Policy) -> bool:
        """Whether the policy would give the next free slot of this group to the gang."""
        self.world.counters["decisions"] += 1
        view = look(self.world, group)
        decision = policy.decide(replace(view, slots=view.slots - free_slots(view) + 1))
        return isinstance(decision, Switch) and decision.activate == member.spec.name

    def claim(self, group: SimulatedGroup, member: SimulatedSeat, decision: Switch, policy: Policy) -> None:
        """Begin to activate a gang: all its groups make room."""
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

    def prepare(self, group: SimulatedGroup, policy: Policy) -> None:
        """Make room in a claimed group; when all groups of the gang have room, activate it."""
        member, operation = group.claimed, group.operation
        if member is None:
            return
        if operation is not None:
            if operation.phase in ("draining", "parking") and operation.incoming is not member:
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

    def _victim(self, group: SimulatedGroup, policy: Policy) -> tuple[SimulatedSeat | None, str]:
        """The victim of a claim: the policy's choice, else the least busy holder. None: no holder can leave yet."""
        self.world.counters["decisions"] += 1
        decision = policy.decide(replace(look(self.world, group), slots=0))
        can = [seat for seat in group.holders if not seat.pinned and may_close(seat)]
        if isinstance(decision, Switch) and decision.evict is not None:
            named = self.switching.named(decision.evict)
            if named in can:
                return named, decision.how
        return min(can, key=lambda seat: (seat.waiting + seat.in_flight, seat.index), default=None), "drain"

    def drop_claim(self, member: SimulatedSeat) -> tuple[SimulatedGroup, ...]:
        """Drop a gang's claim after a failed park; return its groups, which decide anew."""
        for one, group in _pairs(member):
            group.claimed = None
            if group.operation is not None and group.operation.incoming is one:
                group.operation.incoming = None
        return tuple(group for _, group in _pairs(member))


def may_close(seat: SimulatedSeat) -> bool:
    """Whether a holder, with its whole gang, can begin to leave now."""
    return all(one.state is S.ACTIVE and one.group.operation is None for one in seat.together)


def _pairs(member: SimulatedSeat) -> Iterable[tuple[SimulatedSeat, SimulatedGroup]]:
    return [(one, one.group) for one in member.gang]
