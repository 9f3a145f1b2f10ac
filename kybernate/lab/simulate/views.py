"""Views of the simulator's groups for the policy: the same fields as in the GPU manager, from what has happened so far.

Pure. States, ages, rates and learned costs mean what they mean in the manager's views.
"""

from itertools import pairwise

from kybernate.lab.simulate.world import Resting, RunState, SimulatedGroup, SimulatedSeat
from kybernate.policy import GroupView, PeerView, SeatView
from kybernate.seat import SeatState


def look(world: RunState, group: SimulatedGroup) -> GroupView:
    """Return the view of a group that is in no switch, or whose victim is leaving (late binding).

    ``elsewhere`` has the parked seats of other groups with demand. A seat for which another group makes room is not
    among them, unless that group still drains and a slot is free here.
    """
    if group.resting is not None:
        several = [*group.holders, *group.demanded.values()]
        present = [seat for seat in several if _may_come(seat, group)] if world.soft else several
        seats = (*_merged(world, group, group.resting), *[seat_view(world, seat) for seat in present])
    else:
        present = [seat for seat in group.seats if _may_come(seat, group)] if world.soft else group.seats
        seats = tuple([_resting(world, seat) or seat_view(world, seat) for seat in present])
    elsewhere: tuple[SeatView, ...] = ()
    peers: tuple[PeerView, ...] = ()
    if world.soft:
        others = [one for one in world.groups if one is not group and one.spec.pool == group.spec.pool]
        peers = tuple([_peer(world, one) for one in others])
    if world.soft and world.demanded:
        elsewhere = tuple(
            [
                seat_view(world, seat, moving=True)
                for seat in world.demanded.values()
                if world.moves(seat, group) and _may_come(seat, group)
            ]
        )
    return GroupView(
        group.name, group.spec.slots, seats, elsewhere, world.now, group.free_bytes, peers,
        world.scenario.move_seconds or 0.0,
    )  # fmt: skip


def _peer(world: RunState, group: SimulatedGroup) -> PeerView:
    """Another group of the pool, as the views of its peers have it. Unless the run merges its parked seats, its rate is
    as old as ``refresh_seconds`` allow."""
    now = world.now
    if world.scenario.loses_copy:
        group.rate = 0.0
    elif group.resting is not None:
        fast, slow, *_ = group.resting.at(now)
        group.rate = (fast + slow) / 2 + sum([seat.rates.at(now) for seat in group.demanded.values()])
    elif group.rate_at is None or now - group.rate_at >= world.options.refresh_seconds:
        group.rate, group.rate_at = sum([s.rates.at(now) for s in group.seats if s.state is SeatState.PARKED]), now
    operation = group.operation
    if group.paused_until > now:
        return PeerView(group.name, group.rate, False, None)
    if operation is not None:
        victim = operation.victim if operation.phase == "parking" and operation.incoming is None else None
        return PeerView(group.name, group.rate, victim is not None, victim.park_cost.value if victim else None)
    parked = [seat for seat in group.seats if seat.state is SeatState.PARKED] if group.packs else []
    largest = max(parked, key=lambda seat: seat.spec.vram_bytes, default=None)
    if group.has_room(largest, None) if largest else len(group.holders) < group.spec.slots:
        return PeerView(group.name, group.rate, True, 0.0)
    idle = [s for s in group.holders if s.state is SeatState.ACTIVE and not (s.in_flight or s.waiting or s.spec.pinned)]
    if not idle:
        return PeerView(group.name, group.rate, False, None)
    rate, least = min([(seat.rates.at(now), seat.index) for seat in idle])
    seat = world.seats[least]
    lost = rate / (rate + group.rate) * seat.activate_cost.value if rate > 0 else 0.0
    return PeerView(group.name, group.rate, False, seat.park_cost.value, lost)


def _merged(world: RunState, group: SimulatedGroup, resting: Resting) -> tuple[SeatView, ...]:
    """All parked seats of a group without demand, as one: the sum of their rates, and their mean seconds to activate by
    rate."""
    if not resting.count:
        return ()
    fast, slow, *activate = resting.at(world.now)
    rate = fast + slow
    seconds = sum(activate) / rate if rate > 0 else 0.0
    # By position, as below.
    return (
        SeatView(
            "parked", SeatState.PARKED, group.spec.name, 0, (), 0.0, 0, "standard", False, None, None, 0.0, False, 0.0,
            0.0, seconds, None, False, 1.0, 20.0, 5.0, max(0.0, fast), max(0.0, slow),
        ),
    )  # fmt: skip


def _resting(world: RunState, seat: SimulatedSeat) -> SeatView | None:
    """The last view of a parked seat without demand, if it is fresh enough; only rates and ages change."""
    if seat.tail != seat.head or seat.state is not SeatState.PARKED or seat.in_flight:
        return None
    last = seat.seen
    if last is None or world.now - seat.seen_at >= world.options.refresh_seconds:
        last = seat.seen = seat_view(world, seat)
        seat.seen_at = world.now
    return last


def seat_view(world: RunState, seat: SimulatedSeat, *, moving: bool = False) -> SeatView:
    """The view of one seat."""
    now, spec, options = world.now, seat.spec, world.options
    loses_copy = moving and world.scenario.loses_copy
    waiting = seat.tail - seat.head
    ages: tuple[tuple[float, int], ...] = ()
    oldest = 0.0
    if waiting:
        ages = _ages(seat, now, options.age_buckets)
        oldest = now - seat.at[seat.head]
    # By position: this is the innermost line of the simulator, and names cost a third more.
    return SeatView(
        spec.name,
        seat.state,
        seat.group.spec.name,
        waiting,
        ages,
        oldest,
        seat.in_flight,
        spec.tier,
        spec.pinned,
        None,  # wanted_seconds
        None,  # start_wait_seconds
        now - seat.active_since,
        False,  # unclaimed
        0.0 if waiting or seat.in_flight else now - max(seat.busy_at, seat.active_since),
        seat.park_cost.value,
        seat.activate_seconds,
        world.scenario.move_seconds if moving else None,
        moving and _busy(world, seat),
        spec.weight,
        spec.slo_seconds,
        seat.service.value,
        seat.rates.fast.at(now),
        seat.rates.slow.at(now),
        spec.vram_bytes,
        "",  # model
        False,  # prefers
        loses_copy,
        seat.waited,
        sum([one.rates.slow.at(now) for one in seat.group.seats if one is not seat]) if loses_copy else 0.0,
    )


def _ages(seat: SimulatedSeat, now: float, buckets: int) -> tuple[tuple[float, int], ...]:
    head, tail = seat.head, seat.tail
    count = tail - head
    if count <= buckets:
        return tuple([(now - at, 1) for at in seat.at[head:tail]])
    step = -(-count // buckets)
    sums = seat.sums
    cuts = [*range(head, tail, step), tail]
    return tuple([(now - (sums[end] - sums[begin]) / (end - begin), end - begin) for begin, end in pairwise(cuts)])


def _may_come(seat: SimulatedSeat, group: SimulatedGroup) -> bool:
    """Whether no other group makes room for it; a free slot here overrides another group's drain."""
    claim = seat.claim
    if claim is None or claim is group or claim.operation is None:
        return True
    return claim.operation.phase == "draining" and len(group.holders) < group.spec.slots


def _busy(world: RunState, seat: SimulatedSeat) -> bool:
    """Whether the group that a seat belongs to has no slot for it now."""
    home = seat.group
    return home.operation is not None or home.paused_until > world.now or not home.has_room(seat, None)
