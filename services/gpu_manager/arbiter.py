"""Which switch begins, and for which group: the policy's decisions, as far as the invariants allow them. Pure.

Groups that share GPUs: a group whose GPUs are held by seats of other groups asks the policy with those seats in view.
When the policy lets one of them yield, the group has a *claim*: all that is in the way drains, and no other group is
granted any of these GPUs until the claim is served or its seat is not wanted any more. A seat that takes many GPUs
would otherwise never find them free together.

Groups of one pool (``topology.peers``): a group sees the parked seats of its peers beside its own, and the policy
picks one of them or none (``docs/decisions/014-moves-are-pulled.md``).
"""

from dataclasses import replace

from kybernate.messages import DrainAck, JobProgress, Presence, TrafficSignal
from kybernate.policy import Decision, GroupView, Park, Stay, Switch
from kybernate.seat import SeatState, Trigger
from kybernate.topology import Group
from services.gpu_manager import decisions, host_memory, view
from services.gpu_manager import switch as switches
from services.gpu_manager.inputs import (
    DrainAnnounced,
    ForeignProcessesSeen,
    JobAnswered,
    Now,
    RetargetAnswered,
    StartTicket,
)
from services.gpu_manager.managed_seat import ManagedSeat
from services.gpu_manager.state import GpuClaim, NodeState

S, T = SeatState, Trigger

_UNMOVABLE = (S.QUARANTINED, S.LOST, S.RELEASING)
"""States of holders that no drain can move; they leave by themselves or with an operator's help."""


# --- demand -----------------------------------------------------------------------------------------------------------


def on_signal(node: NodeState, signal: TrafficSignal, now: Now) -> bool:
    """Take a signal in and learn from it. True: its source reported other counts than before."""
    changed = node.levels.update(signal, now)
    seat = node.seats.get(signal.seat or view.best_seat(node, signal.model) or "")
    if seat is None or seat.model != signal.model:
        return changed
    learning, group = node.learning, seat.group
    rates = learning.rates((o.id for o in node.seats_on(group) if learning.of(o.id, o.model) is not None), now)
    if arrived := learning.update(signal, seat.id, now):
        learning.count_hits(group.name, seat.id, arrived, rates)
    return changed


def follow_demand(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """Remember when a seat was last busy and the cause of its demand; let an operator's wish lapse."""
    if seat.pod is None:
        return
    found, usage = view.demand(node, seat), seat.usage
    had, usage.has_requests = usage.has_requests, bool(found.waiting or found.in_flight)
    if had or usage.has_requests:  # the last one ended with this message
        usage.busy = now.model
        usage.unclaimed = False
    if found.cause:
        seat.cause = found.cause
    if usage.wanted_since is not None and now.wall > usage.wanted_until:
        usage.wanted_since = None


def on_gpu_processes(node: NodeState, seen: ForeignProcessesSeen, now: Now) -> None:
    """A group with a foreign process on one of its GPUs is quarantined until the process is gone. What seats use is
    learned."""
    for seat in node.seats.values():
        seat.durable.peak_bytes = max(seat.durable.peak_bytes, seen.peaks.get(seat.durable.container_id, 0))
    before = {group.name: node.foreign_on(group) for group in node.setup.groups}
    node.foreign = seen.processes
    for group in node.setup.groups:
        why = node.foreign_on(group)
        if bool(why) != bool(before[group.name]):
            text = why or "no foreign process uses its GPUs any more"
            decisions.decided(node, group, "block", text, now)


# --- which groups decide ----------------------------------------------------------------------------------------------


def due(node: NodeState, message: object, now: Now, *, claims: set[str], repeated: bool) -> tuple[Group, ...]:
    """The groups for which a message or the time may change something, in the order in which they decide.

    ``claims``: the groups that had one before the message. ``repeated``: a signal with the counts of the last one.
    (1) Demand has expired, or a claim was dropped: all groups, since the groups that it kept waiting need not share a
    GPU with the one that had it. (2) Otherwise the groups of the message, those that share GPUs with them and those to
    which their seats may move. (3) Groups that share GPUs decide by the longest wait, whatever their size: in any fixed
    order a group that comes late would never see a holder that may yield.
    """
    expired = node.levels.expire(now)
    node.routers.expire(now)
    for name, claim in tuple(node.claims.items()):
        if not view.wanted(node, node.seats[claim.seat], now):
            del node.claims[name]
    if expired or claims - node.claims.keys():  # (1)
        groups = node.setup.groups
    else:
        groups = _concerned(node, message, repeated=repeated)  # (2)
    if not any(node.groups[group.name].neighbours for group in groups):
        return groups
    return tuple(sorted(groups, key=lambda group: view.turn(node, group, now)))  # (3)


def _concerned(node: NodeState, message: object, *, repeated: bool) -> tuple[Group, ...]:
    """Groups for which a message may change something, with their neighbours and peers; all when it does not tell.

    Signals are frequent: only parked seats can migrate, and wait ages count with the next tick, so that a signal about
    any other seat, or one with the counts of the last one, does not concern the peers.
    """
    groups, peers = node.setup.groups, True
    match message:
        case Presence():
            groups = tuple(group for group in groups if group.name in node.switches)
        case DrainAck(seat=name) | DrainAnnounced(seat=name) if name in node.seats:
            return (node.seats[name].group,)  # only the switch in which it leaves reads them
        case JobProgress(status=status):
            groups = tuple(group for group in groups if group.name == status.group)
        case JobAnswered(op=op) | RetargetAnswered(op=op):
            groups = tuple(group for group in groups if op.startswith(f"{group.name}-"))
        case _:
            seat = node.seats.get(getattr(message, "seat", None) or "")
            if seat is not None:
                groups = (seat.group,)
                peers = not isinstance(message, TrafficSignal) or not (repeated or seat.state is not S.PARKED)
    found = {group.name: group for group in groups}
    for name in tuple(found):
        state = node.groups[name]
        found |= {other.name: other for other in (*state.neighbours, *(state.peers if peers else ()))}
    return tuple(found.values())


# --- what a group decides ---------------------------------------------------------------------------------------------


def decide(node: NodeState, group: Group, now: Now) -> None:
    """Decide for a group that is in no switch; where requests wait and none begins, report that from time to time."""
    _decide(node, group, now)
    if group.name not in node.switches:
        decisions.stays(node, group, now)


def _decide(node: NodeState, group: Group, now: Now) -> None:
    """Begin a switch of the group, or not.

    (1) It pauses after a failed switch. (2) An operator wants a seat off it. (3) A foreign process uses its GPUs, an
    invariant does not hold on them, or they are drained. (4) Its GPUs are being cleared for a seat of another group.
    (5) Seats of other groups hold its GPUs: claim them. A switch of another group may hold them, too, while no seat has
    their lease. (6) Otherwise do what the policy decides, which is asked again without the free slot when the seat that
    it picked has no room there.
    """
    state = node.groups[group.name]
    state.wake, state.settles = None, False  # also where nothing is decided: a wake that is overdue would spin
    if state.backoff.active(now):  # (1)
        return
    leaves = view.ordered_out(node, group, now)  # (2)
    if leaves is not None and node.bus_up and node.routers.settled(now):
        leaving, state.why = leaves
        node.claims.pop(group.name, None)
        switches.drain(node, leaving, None, state.why, now, ordered=True)
        return
    if stopped := node.foreign_on(group) or node.broken_on(group) or node.drained_on(group):  # (3)
        state.why = stopped
        node.claims.pop(group.name, None)
        return
    if claimed := view.claimed_for(node, group, now):  # (4)
        state.why = f"its GPUs are being cleared for {claimed}"
        return
    if others := view.in_the_way(node, group):  # (5)
        if _claim(node, group, others, now):
            _clear(node, group, others, now)
        return
    if other := view.switch_in_the_way(node, group):
        state.why = f"its GPUs are held by the switch {other.op} of group {other.group}"
        return
    seen, policy = view.full_view(node, group, now), node.setup.policy  # (6)
    decision = policy.decide(seen)
    incoming = node.seats[decision.activate] if isinstance(decision, Switch) and decision.evict is None else None
    if incoming is not None and not view.room(node, incoming, on=group):
        decision = policy.decide(replace(seen, slots=0))
    state.why = decision.reason
    match decision:
        case Stay():
            _wake(node, group, decision, now)
        case Switch(activate=name, evict=None):
            _grant(node, group, node.seats[name], decision.reason, now)
        case Switch(activate=name, evict=str(victim), how=how):
            holder = node.seats[victim]
            freeze = how == "freeze" and holder.owner.terms.tier.stall_budget_seconds > 0 and holder.freezes
            freeze = freeze and host_memory.fits(node, holder)
            _evict(node, holder, node.seats[name], decision.reason, now, freeze=freeze)
        case Park(seat=victim):
            _park(node, node.seats[victim], decision.reason, now)


def _wake(node: NodeState, group: Group, decision: Decision, now: Now) -> None:
    if isinstance(decision, Stay) and decision.until is not None:
        node.groups[group.name].wake = now.model + max(decision.until, 0.0)
        node.groups[group.name].settles = decision.settles


def _grant(node: NodeState, group: Group, incoming: ManagedSeat, reason: str, now: Now) -> None:
    """Give a free slot to a seat: a ticket at the start gate, or a switch without a victim.

    The policy is not trusted with the invariants: there must be room.
    """
    if not view.room(node, incoming, on=group):
        return
    if incoming.state is S.WAITING and incoming.calls(now):
        node.claims.pop(group.name, None)
        decisions.decided(node, group, "start", reason, now, incoming=incoming)
        give_ticket(node, incoming, now)
    elif incoming.state is S.PARKED and node.bus_up:
        node.claims.pop(group.name, None)
        switches.activate(node, group, incoming, reason, now)


def give_ticket(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """Open the start gate; also again, for a new call of a seat that has its lease but no process yet."""
    gate, pod = seat.gate, seat.pod
    assert gate.call is not None, f"{seat.id} has no waiting call"
    assert pod is not None, f"{seat.id} has no owner"
    epoch = node.next_epoch(now)
    call, gate.call = gate.call, None
    gate.ticket_open, gate.ticket_given = True, now.wall
    seat.durable.ticket, seat.durable.inherited, seat.durable.seen_running = call.call, False, False
    if seat.state is S.WAITING:
        host_memory.reserve_start(node, seat)
        node.transition(seat, T.TICKET, now, epoch=epoch)
    else:
        seat.epoch, seat.entered_wall = epoch, now.wall
    node.effects.append(StartTicket(seat.id, call.call, pod.uid, epoch, pod.vram_bytes))


def _evict(
    node: NodeState, victim: ManagedSeat, incoming: ManagedSeat | None, reason: str, now: Now, *, freeze: bool = False
) -> None:
    """Drain a holder for another seat, or freeze it with its requests in flight.

    (1) Never while routers may be present that would not learn of it. (2) The incoming seat has room: no seat need
    leave. (3) It has room once the victim has left. (4) It has not: one more seat has to leave before it fits.
    """
    if not node.bus_up or victim.state is not S.ACTIVE or not node.routers.settled(now):  # (1)
        return
    group = victim.group
    if incoming is not None and view.room(node, incoming, on=group):  # (2)
        _grant(node, group, incoming, reason, now)
        return
    fits = incoming is None or view.room(node, incoming, without=victim, on=group)
    if fits:
        switches.drain(node, victim, incoming, reason, now, freeze=freeze)  # (3)
    else:
        switches.drain(node, victim, None, reason, now, freeze=freeze, room_for=incoming)  # (4)


def _park(node: NodeState, victim: ManagedSeat, reason: str, now: Now) -> None:
    """Drain a holder without an incoming seat, unless it is wanted: that would call the drain off at once, and
    again."""
    if view.requested(view.seat_view(node, victim, now)):
        why = f"{victim.id} is wanted and stays, although the policy decided: {reason}"
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
        if stays := _stays(seat, now):
            node.claims.pop(group.name, None)
            state.why = f"its GPUs are held by {seat.id} of group {seat.group.name}, which {stays}"
            return False
    if group.name in node.claims:  # (2)
        return True
    decision = _decide_among(node, group, others, now)
    state.why = decision.reason
    _wake(node, group, decision, now)
    if not isinstance(decision, Switch) or decision.activate in {seat.id for seat in others}:  # (3)
        return False
    node.claims[group.name] = GpuClaim(decision.activate, now.model)  # (4)
    decisions.decided(node, group, "claim", decision.reason, now, incoming=node.seats[decision.activate])
    return True


def _stays(seat: ManagedSeat, now: Now) -> str:
    """Why a holder in the way cannot leave; empty: it can."""
    if seat.pinned or seat.state in _UNMOVABLE:
        return f"is {'pinned' if seat.pinned else seat.state}"
    return "could not be parked a moment ago" if seat.backoff.park.active(now) else ""


def _clear(node: NodeState, group: Group, others: list[ManagedSeat], now: Now) -> None:
    """Drain the seats of other groups that hold GPUs which this one has claimed."""
    if not node.bus_up or not node.routers.settled(now):
        return
    claimant = node.seats[node.claims[group.name].seat]
    for victim in others:
        paused = node.groups[victim.group.name].backoff.active(now)
        if victim.state is not S.ACTIVE or victim.group.name in node.switches or paused:
            continue
        if _yields(node, group, victim, now):
            reason = f"its GPUs are needed together for {claimant.id} of group {claimant.group.name}"
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
    own = view.group_view(node, group, now).seats
    return node.setup.policy.decide(GroupView(group.name, 0, (*own, *(view.seat_view(node, o, now) for o in others))))
