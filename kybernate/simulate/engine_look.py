"""What the policy sees in the simulator: the same view that the GPU manager makes, from what has happened so far.

State names, ages, rates and learned costs mean what they mean in ``services/gpu_manager/looking.py``.
"""

from itertools import pairwise

from kybernate.policy import GroupView, SeatView
from kybernate.seat import SeatState
from kybernate.simulate.engine_seat import Seat
from kybernate.simulate.engine_world import Group, World


def look(world: World, group: Group) -> GroupView:
    """The view of a group that is in no switch.

    ``elsewhere`` has the parked seats of other groups for which somebody waits: nobody else would be moved. One for
    which another group makes room is not among them, unless that one still drains and a slot is free here.
    """
    seats = tuple([seat_view(world, seat) for seat in group.seats])
    elsewhere: tuple[SeatView, ...] = ()
    if world.soft and world.demanded:
        elsewhere = tuple(
            [
                seat_view(world, seat, moving=True)
                for seat in world.demanded.values()
                if seat.group is not group and _may_come(seat, group)
            ]
        )
    return GroupView(group.name, group.spec.slots, seats, elsewhere, world.now)


def seat_view(world: World, seat: Seat, *, moving: bool = False) -> SeatView:
    """The view of one seat. Frozen requests of a parked seat count as waiting since they were frozen."""
    now, spec = world.now, seat.spec
    waiting = seat.tail - seat.head
    ages: tuple[tuple[float, int], ...] = ()
    oldest = 0.0
    if waiting:
        ages = _ages(seat, now, world.options.age_buckets)
        oldest = now - seat.at[seat.head]
    if seat.frozen_at is not None and seat.state is SeatState.PARKED:
        frozen = now - seat.frozen_at
        waiting += seat.in_flight
        oldest = max(oldest, frozen)
        ages = tuple(sorted((*ages, (frozen, seat.in_flight)), reverse=True))
    busy = seat.in_flight or (waiting and seat.state is SeatState.ACTIVE)
    return SeatView(
        seat=spec.name,
        state=seat.state,
        group=seat.group.name,
        waiting=waiting,
        ages=ages,
        oldest_wait_seconds=oldest,
        in_flight=seat.in_flight,
        tier=spec.tier,
        pinned=spec.pinned,
        active_seconds=now - seat.active_since,
        idle_seconds=0.0 if waiting or busy else now - max(seat.busy_at, seat.active_since),
        park_seconds=seat.park_cost.value,
        activate_seconds=world.options.cold_start_seconds if seat.cold else seat.activate_cost.value,
        move_seconds=world.scenario.move_seconds if moving else None,
        home_busy=moving and _busy(seat.group),
        weight=spec.weight,
        slo_seconds=spec.slo_seconds,
        service_seconds=seat.service.value,
        rate_fast=seat.rates.fast.at(now),
        rate_slow=seat.rates.slow.at(now),
        stall_budget_seconds=spec.stall_budget_seconds,
    )


def _ages(seat: Seat, now: float, buckets: int) -> tuple[tuple[float, int], ...]:
    head, tail = seat.head, seat.tail
    count = tail - head
    if count <= buckets:
        return tuple([(now - at, 1) for at in seat.at[head:tail]])
    step = -(-count // buckets)
    sums = seat.sums
    cuts = [*range(head, tail, step), tail]
    return tuple([(now - (sums[end] - sums[begin]) / (end - begin), end - begin) for begin, end in pairwise(cuts)])


def _may_come(seat: Seat, group: Group) -> bool:
    """Whether no other group makes room for it; one that only drains for it is forestalled by a free slot."""
    claim = seat.claim
    if claim is None or claim.operation is None:
        return True
    return claim.operation.phase == "draining" and len(group.holders) < group.spec.slots


def _busy(home: Group) -> bool:
    return home.operation is not None or len(home.holders) >= home.spec.slots
