"""Which switch begins, and for which group: the policy's decisions, as far as the invariants allow them. Pure.

Groups that share GPUs: a group whose GPUs are held by seats of other groups asks the policy with those seats in view.
When the policy lets one of them yield, the group has a *claim*: all that is in the way drains, and no other group is
granted any of these GPUs until the claim is served or its seat is not wanted any more. A seat that takes many GPUs
would otherwise never find them free together.
"""

from dataclasses import replace

from kybernate.policy import Decision, GroupView, Park, Stay, Switch
from kybernate.seat import SeatState, start_inside
from kybernate.topology import Group
from services.gpu_manager.core import moves, starts, view
from services.gpu_manager.core import switch as switches
from services.gpu_manager.core.facts import Process, Ticket, Trigger
from services.gpu_manager.core.inputs import Now, StartTicket
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.moves import full_view, group_view
from services.gpu_manager.core.obstacles import STARTING, SWITCH, Ask, first, leaving, obstacles, of_group, unready
from services.gpu_manager.core.state import GpuClaim, NodeState, Rider

S, T = SeatState, Trigger

STAY_SECONDS = 15.0
"""Wall: how often an event repeats that requests wait while a group stays as it is."""
LOOK_SECONDS = 1.0
"""Wall: how often such requests are looked for."""


def decide(node: NodeState, group: Group, now: Now) -> None:
    """Decide for a group that is in no switch; where requests wait and none begins, report that from time to time."""
    _decide(node, group, now)
    if group.name not in node.switches:
        _stays(node, group, now)


def _stays(node: NodeState, group: Group, now: Now) -> None:
    """Report that requests wait for seats of a group that begins no switch, from time to time."""
    state = node.groups[group.name]
    if now.wall < state.stay_due:
        return
    waiting = [
        seat
        for seat in view.seats_on(node, group)
        if seat.state in (S.PARKED, S.WAITING) and view.demand(node, seat).waiting > 0
    ]
    state.stay_due = now.wall + (STAY_SECONDS if waiting else LOOK_SECONDS)
    if waiting:
        pause = "it pauses after a switch that failed" if state.backoff.active(now) else state.why
        longest = max(waiting, key=lambda seat: view.demand(node, seat).oldest_wait(now))
        switches.decided(node, group, "stay", pause, now, incoming=longest)


def _decide(node: NodeState, group: Group, now: Now) -> None:
    """Begin a switch of the group, or not.

    (1) A seat has to leave it. (2) Something keeps every seat from it; a switch of another group on its GPUs
    does not keep it from claiming what else is there. (3) Seats of other groups hold its GPUs: claim them. (4) A
    seat whose place is kept here is at the gate. (5) Otherwise do what the policy decides, which is asked again without
    the free slot when the seat that it picked has no room there.
    """
    state, others = node.groups[group.name], view.overlapping(node, group)
    state.wake, state.settles, state.picked = None, False, ""  # an overdue wake would spin
    if _expels(node, group, now):  # (1)
        return
    found = first(of_group(node, group, now))
    if found is not None and not (others and found.row is SWITCH):  # (2)
        state.why = found.text
        if found.row.kind == "stop":
            node.claims.pop(group.name, None)
            state.kept.clear()
        return
    if others:  # (3)
        if _claim(node, group, others, now):
            _clear(node, group, others, now)
        return
    for seat in map(node.seats.__getitem__, state.kept):
        if seat.acts_as is S.WAITING and view.calls(seat, now, group):  # (4)
            state.picked, state.why = seat.id, "its place is kept here"
            _grant(node, group, seat, state.why, now)
            return
    seen, policy = full_view(node, group, now), node.setup.policy  # (5)
    decision = policy.decide(seen)
    incoming = node.seats[decision.activate] if isinstance(decision, Switch) and decision.evict is None else None
    if incoming is not None and not view.room(node, incoming, on=group):
        decision = policy.decide(replace(seen, slots=0))
    state.why = decision.reason
    match decision:
        case Stay():
            _wake(node, group, decision, now)
        case Switch(activate=name, evict=None):
            state.picked = name
            _grant(node, group, node.seats[name], decision.reason, now)
        case Switch(activate=name, evict=str(victim)):
            state.picked = name
            _evict(node, node.seats[victim], node.seats[name], decision.reason, now)
        case Park(seat=victim):
            _park(node, node.seats[victim], decision.reason, now)


def _expels(node: NodeState, group: Group, now: Now) -> bool:
    """True when a seat begins to drain that has to leave this group, whatever the policy decides."""
    for seat in view.holders(node, group):
        if seat.state is not S.ACTIVE or seat.backoff.park.active(now):
            continue
        reason = next(filter(None, (rider.expels(node, seat) for rider in node.riders[Rider.expels])), "")
        if reason and first(leaving(node, seat, now)) is None:
            node.claims.pop(group.name, None)
            node.groups[group.name].why = reason
            switches.drain(node, seat, None, reason, now, ordered=True)
            return True
    return False


def _wake(node: NodeState, group: Group, decision: Decision, now: Now) -> None:
    if isinstance(decision, Stay) and decision.until is not None:
        node.groups[group.name].wake = now.model + max(decision.until, 0.0)
        node.groups[group.name].settles = decision.settles


def _grant(node: NodeState, group: Group, incoming: ManagedSeat, reason: str, now: Now) -> None:
    """Give a free slot to a seat: a ticket at the start gate, or a switch without a victim.

    The policy is not trusted with the invariants: nothing may stand in the way.
    """
    if found := first(obstacles(node, incoming, group, now)):
        node.groups[group.name].why = found.text
    elif incoming.acts_as is S.WAITING:
        switches.decided(node, group, "start", reason, now, incoming=incoming)
        give_ticket(node, incoming, group, now)
        node.claims.pop(group.name, None)
    elif moves.starts_on(node, incoming, group):
        switches.decided(node, group, "start", reason, now, incoming=incoming)
        moves.start_there(node, incoming, group, reason, now)
        node.claims.pop(group.name, None)
    elif incoming.state is S.PARKED:
        switches.activate(node, group, incoming, reason, now)
        node.claims.pop(group.name, None)


def give_ticket(node: NodeState, seat: ManagedSeat, group: Group, now: Now) -> None:
    """Open the start gate for a start on this group; also again, for a new call of a seat that has its lease but no
    process yet."""
    gate, pod = seat.gate, seat.pod
    assert gate.call is not None, f"{seat.id} has no waiting call"
    assert pod is not None, f"{seat.id} has no owner"
    epoch = node.next_epoch(now)
    call, gate.call = gate.call, None
    seat.durable.ticket, expires = call.call, starts.opened(seat, call, now)
    seat.durable.closed = tuple(sorted(call.closed))
    if call.inside:
        seat.durable.container_id = start_inside(pod.container_id or "", call.call)
    away = group.name if group.name != seat.home.name else ""
    if seat.acts_as is S.WAITING:
        for rider in node.riders[Rider.starts]:
            rider.starts(node, seat)
        reason = f"from group {seat.home.name}, started here: {node.groups[group.name].why}" if away else ""
        node.transition(seat, T.TICKET, now, epoch=epoch, to=group if away else None, reason=reason)
    else:
        seat.learn(ticket=Ticket.OPEN, process=Process.NONE)
        seat.epoch, seat.entered_wall = epoch, now.wall
    container = seat.durable.container_id if call.inside else ""
    node.effects.append(StartTicket(seat.id, call.call, pod.uid, epoch, expires, pod.vram_bytes, container, away))


def _evict(node: NodeState, victim: ManagedSeat, incoming: ManagedSeat | None, reason: str, now: Now) -> None:
    """Drain a holder for another seat.

    (1) Something keeps it from leaving, or would keep the other seat from its place: else it would be evicted for
    nothing. (2) The incoming seat has room: no seat need leave. (3) It has room once the victim has left. (4) It has
    not: one more seat has to leave before it fits.
    """
    if victim.state is not S.ACTIVE and not (
        incoming is not None and view.asked(node, incoming) and view.yields(node, victim, now)
    ):
        return
    group = victim.group
    found = first(leaving(node, victim, now))
    if found is None and incoming is not None:
        found = unready(node, incoming, group, now, without=victim)
    if found is not None:  # (1)
        node.groups[group.name].why = found.text
        return
    if incoming is not None and view.room(node, incoming, on=group):  # (2)
        _grant(node, group, incoming, reason, now)
        return
    fits = incoming is None or view.room(node, incoming, without=victim, on=group)
    if fits:
        switches.drain(node, victim, incoming, reason, now)  # (3)
    else:
        switches.drain(node, victim, None, reason, now, room_for=incoming)  # (4)


def _park(node: NodeState, victim: ManagedSeat, reason: str, now: Now) -> None:
    """Drain a holder without an incoming seat, unless it is wanted: that would call the drain off at once, and
    again."""
    if view.requested(view.seat_view(node, victim, now)):
        why = f"{victim.name} is wanted and stays, although the policy decided: {reason}"
        node.groups[victim.group.name].why = why
        return
    _evict(node, victim, None, reason, now)


# --- claims -----------------------------------------------------------------------------------------------------------


def _claim(node: NodeState, group: Group, others: list[ManagedSeat], now: Now) -> bool:
    """Whether the GPUs of a group that ``others`` hold are to be cleared now.

    (1) One of them cannot leave: then the others need not leave either. (2) The group has its claim already. (3) The
    policy keeps all of them. (4) The policy lets one of them yield to a seat of this group: the group gets a claim.
    """
    state = node.groups[group.name]
    for seat in others:  # (1)
        row = Ask(node, group, now).keeps(seat)
        if row is not None and row is not STARTING:
            node.claims.pop(group.name, None)
            state.why = f"its GPUs are held by {seat.name} of group {seat.group.name}: {row.stage}"
            return False
    if (claim := node.claims.get(group.name)) is not None:  # (2)
        state.picked = claim.seat
        return True
    decision = _decide_among(node, group, others, now)
    state.why = decision.reason
    state.picked = decision.activate if isinstance(decision, Switch) else ""
    _wake(node, group, decision, now)
    if not isinstance(decision, Switch) or decision.activate in {seat.id for seat in others}:  # (3)
        return False
    node.claims[group.name] = GpuClaim(decision.activate, now.model)  # (4)
    switches.decided(node, group, "claim", decision.reason, now, incoming=node.seats[decision.activate])
    return True


def _clear(node: NodeState, group: Group, others: list[ManagedSeat], now: Now) -> None:
    """Drain the seats of other groups that hold GPUs which this one has claimed."""
    claimant = node.seats[node.claims[group.name].seat]
    for victim in others:
        if victim.state is not S.ACTIVE or first(leaving(node, victim, now)) is not None:
            continue
        if _yields(node, group, victim, now):
            reason = f"its GPUs are needed together for {claimant.name} of group {claimant.group.name}"
            switches.drain(node, victim, None, reason, now, clears_for=claimant)


def _yields(node: NodeState, group: Group, victim: ManagedSeat, now: Now) -> bool:
    """True when a seat in the way of this group's claim drains now.

    (1) All that served when the claim began drain together. (2) A seat that came later, since it went before the claim,
    has a full visit first: otherwise it would wait for its turn, be drained at once, and wait again.
    """
    if victim.usage.active_since < node.claims[group.name].since:  # (1)
        return True
    decision, state = _decide_among(node, group, [victim], now), node.groups[group.name]  # (2)
    earlier = state.wake
    _wake(node, group, decision, now)
    if earlier is not None and state.wake is not None:
        state.wake = min(state.wake, earlier)
    return isinstance(decision, Switch)


def _decide_among(node: NodeState, group: Group, others: list[ManagedSeat], now: Now) -> Decision:
    """The policy's decision for a group without a free slot, with seats of other groups in view."""
    own = group_view(node, group, now).seats
    return node.setup.policy.decide(GroupView(group.name, 0, (*own, *(view.seat_view(node, o, now) for o in others))))
