"""The life of a move: a seat comes to another group of its pool. Pure.

 1 asked      a group's policy has the waiting seats of its pool in view (``full_view``), or an operator names seat and
              group (``operations``: ``NodeState.moves``; ``view.seats_for``)
 2 may it     its pod, its backend, the driver, its container (``view.why_immovable``: row 150 of the list); no failed
              move of it a short time before (row 310); no other group brings it (row 320)
 3 costs      the cheapest way that it has (``view.way``, ``seconds``)
 4 leaves     ordered while it serves, it is drained and parked at home first (``Operations.expels``)
 5 pulled     the policy of the other group chooses it for a free slot or for the place of a victim, which drains
              (``arbiter._grant``, ``_evict``)
 6 begins     by its copy: it has the GPUs of the other group from here on (``switch.lease``); by a restart: its copy
              is dropped, and its place there kept (``start_there``)
 7 carried    one job restores the copy with a map of GPUs (``switch._send``); or its container ends, and calls the gate
    out       there (``arbiter._decide``, ``give_ticket``)
 8 arrives    it serves, and the duration is learned (``reports._activated``, ``on_engine_answer``)
 9 fails      it is parked where it was and stays for a while, or for ever (``failed``); a start that fails is followed
              by one at home (``NodeState.transition``)
10 ends       its order is over (``operations._result``)

Until its job is sent (7 where a victim leaves, else 6) nothing has changed for the seat: a request that ends, an
obstacle, or a free slot at home turns it back (``switch._drain``). From then on it has left its group, and only 9
brings it back. The seat's engine is asked in 7 alone.

Ways: ``map``: the driver restores its copy on other GPUs. ``restart``: its engine ends and starts there, without its
copy.
"""

from dataclasses import replace

from kybernate.annotations import PREFER_GROUP
from kybernate.messages import SeatProgress
from kybernate.policy import GroupView, PeerView, SeatView
from kybernate.policy.index import rate
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import phases, view
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import SWITCH, Ask, counted, first, holding, of_group, ordered_to, unready
from services.gpu_manager.core.state import GroupState, NodeState

S = SeatState

HEADS_SECONDS = 30.0
"""Wall: how long a seat that drops its copy to start on another group keeps its place there."""
_NO_WAY_SECONDS = 3600.0


# --- what the policy sees ---------------------------------------------------------------------------------------------


def group_view(node: NodeState, group: Group, now: Now) -> GroupView:
    """The policy's view of a group, without seats elsewhere, but with those that an operator moves here. Holders that
    are spared count as pinned."""
    present, free = view.seats_for(node, group), view.free_bytes(node, group)
    keep = view.spared(present, now)
    seats = [view.seat_view(node, seat, now) for seat in present]
    seats = [replace(seat, pinned=True) if seat.seat in keep else seat for seat in seats]
    if any(seat.yields for seat in seats):  # to requests: warm-up of one interrupts no start of another
        seats = [seat for seat in seats if seat.state is not S.WAITING or view.requested(seat)]
    judged = tuple(_judged(node, seat, group, now) for seat in seats)
    return GroupView(group.name, group.slots, judged, now=float(now.model), free_bytes=free)


def _judged(node: NodeState, seen: SeatView, group: Group, now: Now) -> SeatView:
    """The view of a seat, with the list's verdict about this group if it has demand."""
    found = None if seen.wait_seconds is None else unready(node, node.seats[seen.seat], group, now)
    return seen if found is None else replace(seen, ready=False, why=found.text)


def full_view(node: NodeState, group: Group, now: Now) -> GroupView:
    """The policy's view of a group, with its peers and those of their seats that are wanted and could be activated, or
    started, on it."""
    seen, peers = group_view(node, group, now), node.groups[group.name].peers
    if not peers:
        return seen
    found, parked = list[SeatView](), {peer.name: list[SeatView]() for peer in peers}
    for seat in node.seats.values():
        if seat.state not in (S.PARKED, S.WAITING) or seat.group.name not in parked:
            continue
        if (guest := node.moved_views.get(seat.id)) is None or seat.acts_as is S.WAITING:  # its call names groups
            guest = node.moved_views[seat.id] = as_guest(node, seat, group, now)
        if seat.pod is not None and names(seat.pod.annotations.get(PREFER_GROUP, ""), group, node.name):
            guest = replace(guest, prefers=True)
        if seat.acts_as is S.PARKED and not guest.loses_copy:
            parked[seat.group.name].append(guest)
        if guest.wait_seconds is not None and not ordered_to(node, seat):
            found.append(_judged(node, guest, group, now))
    shown = tuple(_peer(node, peer, parked[peer.name], now) for peer in peers)
    return replace(seen, elsewhere=tuple(found), peers=shown, move_seconds=_leaves_for(node, seen))


def names(prefers: str, group: Group, node: str) -> bool:
    """True for the group that a pod names (``kyb.ai/prefer-group``: ``group`` or ``node/group``)."""
    return prefers in (group.name, f"{node}/{group.name}")


def as_guest(node: NodeState, seat: ManagedSeat, group: Group, now: Now) -> SeatView:
    """The view of a seat that another group could bring."""
    guest = view.seat_view(node, seat, now, on=group)
    cold = starts_on(node, seat, group)
    return replace(
        guest,
        move_seconds=seconds(node, seat),
        loses_copy=cold,
        home_busy=guest.wait_seconds is not None and _home_busy(node, seat, now),
        others_rate=_others_rate(node, seat, now) if cold else 0.0,
        home_late=cold and _starts_late(node, seat.group, now),
    )


def _leaves_for(node: NodeState, seen: GroupView) -> float:
    """What the parked seat of a group that moves most cheaply pays for it."""
    parked = [node.seats[seat.seat] for seat in seen.seats if seat.state is S.PARKED]
    return min((seconds(node, seat) for seat in parked), default=node.move_seconds)


def _others_rate(node: NodeState, seat: ManagedSeat, now: Now) -> float:
    """``rate_slow`` of the other seats of its group, summed."""
    others = (one for one in view.seats_on(node, seat.group) if one is not seat)
    learned = (node.learning.of(one.id, one.terms.model) for one in others)
    return sum(one.arrivals.slow.at(float(now.model)) for one in learned if one is not None)


def _starts_late(node: NodeState, group: Group, now: Now) -> bool:
    """True when an engine starts on a group for far longer than usual. (While the checkpointer parks or activates
    there, it ends no engine that is to start elsewhere.)"""
    starting = (seat for seat in view.holders(node, group) if seat.state is S.STARTING)
    return any(phases.clock(node, seat, now).late(now) for seat in starting)


def _peer(node: NodeState, peer: Group, parked: list[SeatView], now: Now) -> PeerView:
    """Another group of the pool, with its parked seats. (1) A park that makes room for no seat. (2) Something keeps
    every seat from it. (3) It has room for each of its seats. (4) An idle holder could leave."""
    asked, switch = sum(map(rate, parked)), node.switches.get(peer.name)
    if switch is not None:
        victim = node.seats.get(switch.victim or "") if switch.beneficiary is None else None
        seconds = None if victim is None else victim.durable.costs.park_seconds
        return PeerView(peer.name, asked, victim is not None, seconds)  # (1)
    if first(of_group(node, peer, now)) is not None or view.overlapping(node, peer):
        return PeerView(peer.name, asked, free=False, frees_in=None)  # (2)
    held, memory = view.holders(node, peer), view.free_bytes(node, peer)
    largest = max((seat.vram_bytes for seat in parked), default=0)
    if len(held) < peer.slots and (memory is None or largest <= memory):
        return PeerView(peer.name, asked, free=True, frees_in=0.0)  # (3)
    active = (seat for seat in held if seat.state is S.ACTIVE and not (seat.pinned or seat.backoff.park.active(now)))
    idle = []
    for seat in active:
        if not ((load := view.demand(node, seat)).waiting or load.in_flight):
            learned = node.learning.of(seat.id, seat.terms.model)
            idle.append((0.0 if learned is None else learned.arrivals.at(float(now.model)), seat.id, seat))
    if not idle:
        return PeerView(peer.name, asked, free=False, frees_in=None)
    own, _, seat = min(idle)  # (4)
    lost = own / (own + asked) * view.activate_seconds(seat) if own > 0 else 0.0
    return PeerView(peer.name, asked, False, seat.durable.costs.park_seconds, lost)


def _home_busy(node: NodeState, seat: ManagedSeat, now: Now) -> bool:
    """True when the group that a parked seat is on has no slot for it now. GPUs that are no group of this configuration
    any more have none; a switch of which only the last report is on its way keeps none."""
    switch = node.switches.get(seat.group.name)
    victim = node.seats.get(switch.victim or "") if switch is not None and switch.incoming is None else None
    over = victim is not None and victim.state is S.PARKED
    elsewhere = seat.acts_as is S.WAITING and view.calls(seat, now) and not view.calls(seat, now, seat.group)
    found = holding(counted(None), Ask(node, seat.group, now, seat))
    busy = any(not (over and one.row is SWITCH) for one in found) or not view.room(node, seat)
    return busy or elsewhere or not seat.group.seat_ids


def seconds(node: NodeState, seat: ManagedSeat) -> float:
    """What bringing it back on another group costs beyond bringing it back where it is; very much without a way."""
    found = view.way(node, seat)
    return view.way_seconds(node, seat, found) if found else _NO_WAY_SECONDS


def starts_on(node: NodeState, seat: ManagedSeat, group: Group) -> bool:
    """True for a parked seat that comes to this group by a start of its engine."""
    return seat.acts_as is S.PARKED and group.name != seat.group.name and view.way(node, seat) == view.RESTART


# --- it begins by a restart, and ends ---------------------------------------------------------------------------------


def start_there(node: NodeState, seat: ManagedSeat, group: Group, reason: str, now: Now) -> None:
    """End the engine of a parked seat, which has a place on the other group until it has started there."""
    node.groups[group.name].kept[seat.id] = now.wall + HEADS_SECONDS
    why = f"its engine ends here and starts on group {group.name}: {reason}"
    node.drop_copy(seat, why, now, node.next_epoch(now))


def step(node: NodeState, there: GroupState, now: Now) -> None:
    """A seat that starts, does not come, is asked for no more, or is ordered elsewhere gives its place on another group
    back."""
    for name, until in [*there.kept.items()]:
        seat = node.seats[name]
        gone = seat.acts_as is S.WAITING and seat.gate.called is not None and not view.wanted(node, seat, now)
        late = now.wall > until or seat.state not in (S.PARKED, S.BACKOFF, S.WAITING)
        if gone or late or ordered_to(node, seat) not in ("", there.group.name):
            del there.kept[name]


def failed(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> bool:
    """A seat was not restored on the other group; True: the move was refused, which is no fault of the group.

    (1) The driver refused it for this node, (2) for this seat, or its engine did not survive it: it is not tried again
    with this pod. (3) A step failed: it is not moved again before its own group had time to bring it back. What had no
    room yet, or was undone by a restart of the checkpointer, is tried again.
    """
    refused = progress.move_refused
    if refused == "node":  # (1)
        node.immovable = progress.reason
    elif refused or progress.outcome == "lost":  # (2)
        lost = "" if refused else "its engine did not survive a move, so it stays until its pod is replaced: "
        seat.durable.fixed = lost + progress.reason
    elif progress.failed:  # (3)
        seat.stay(now)
    return bool(refused)
