"""Gangs in the simulator: seats on several groups that are active together or not at all. Pure.

The GPU manager has no gangs yet. They are played as it plays a larger group over smaller ones (``overlap.py``): each
group's policy sees a gang as one seat, and a gang that it would bring has a *claim* on all its groups, if each of them
would take it for its next free slot. What is in the way drains everywhere, each group keeps its slot for the gang, and
when all have room the members are activated together; the slowest says when they serve. A gang leaves as a whole, too.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kybernate.lab.simulate.engine_look import look
from kybernate.lab.simulate.engine_seat import Seat
from kybernate.lab.simulate.engine_world import Group, World
from kybernate.policy import Decision, Policy, Stay, Switch
from kybernate.policy.turns import FADE_SECONDS, free_slots
from kybernate.seat import SeatState

if TYPE_CHECKING:
    from kybernate.lab.simulate.engine_switch import Switching

S = SeatState


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
