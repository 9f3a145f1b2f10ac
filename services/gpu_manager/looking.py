"""What decisions see of the board: the policy's view, demand, room; and its invariants. Pure."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kybernate.messages import TrafficSignal
from kybernate.policy import GroupView, SeatView
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import overlap, rebinding
from services.gpu_manager.inputs import Now
from services.gpu_manager.learning import ASSUMED_SERVICE_SECONDS
from services.gpu_manager.levels import Traffic
from services.gpu_manager.rows import Operation, Row
from services.gpu_manager.seat_pod import refusal
from services.gpu_manager.terms import terms

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState


PREFERENCE = {S.ACTIVE: 0, S.ACTIVATING: 1, S.STARTING: 2, S.DRAINING: 3, S.PARKED: 4, S.PARKING: 4, S.WAITING: 5}
"""Where demand for a model goes that names no seat: lower first."""


def view(board: "Board", group: Group, now: Now) -> GroupView:
    """What the policy sees of a group. Who could not be parked a moment ago stays, if another one can leave."""
    rows = [row for row in board.seats_of(group) if rebinding.at_hand(board, row, group)]
    rested = [row for row in rows if not row.rests(now)]
    if len(rested) < len(rows) and any(_of_use(board, row, now) for row in rested):
        rows = rested
    hits = board.learning.hits.get(group.name)
    stuck = {row.seat for row in rows if row.state is S.ACTIVE and now.wall < row.stays_until}
    seats = tuple(seat_view(board, row, now) for row in rows)
    if stuck and any(seat.state is S.ACTIVE and not seat.pinned and seat.seat not in stuck for seat in seats):
        seats = tuple(replace(seat, pinned=True) if seat.seat in stuck else seat for seat in seats)
    share = hits.share if hits is not None else None
    return GroupView(group.name, group.slots, seats, now=now.model, hit_share=share)


def _of_use(board: "Board", row: Row, now: Now) -> bool:
    """Whether a seat serves or waits: one that has just failed to come back leaves the group to it for a while."""
    demand = traffic(board, row)
    return bool(demand.waiting or demand.in_flight) or wants(board, row, now)


def seat_view(board: "Board", row: Row, now: Now, *, on: Group | None = None) -> SeatView:
    """What the policy sees of one seat. ``on``: the other group to which it could move."""
    demand = _with_frozen(board, row, now)
    tier = terms(row.pod, board.tiers).tier
    learned = board.learning.of(row.seat, row.model)
    start_wait = None
    if row.calls(now) and _may_start(board, row, demand, now):
        start_wait = 0.0 if row.called_wall is None else (now.wall - row.called_wall) * now.pace
    return SeatView(
        seat=row.seat,
        state=row.state,
        group=row.group.name,
        waiting=demand.waiting,
        ages=demand.ages(now),
        oldest_wait_seconds=demand.oldest_wait(now),
        in_flight=demand.in_flight,
        tier=row.pod.tier if row.pod else "standard",
        pinned=row.is_pinned or _must_return(board, row, now),
        wanted_seconds=None if row.wanted_since is None else now.model - row.wanted_since,
        start_wait_seconds=start_wait,
        active_seconds=now.model - row.active_since,
        unclaimed=row.unclaimed,
        idle_seconds=now.model - max(row.busy_at, row.active_since),
        park_seconds=row.park_seconds,
        activate_seconds=row.activate_seconds,
        move_seconds=None if on is None else board.move_seconds,
        home_busy=on is not None and rebinding.home_busy(board, row, now),
        weight=tier.weight,
        slo_seconds=tier.slo_seconds,
        stall_budget_seconds=tier.stall_budget_seconds,
        service_seconds=ASSUMED_SERVICE_SECONDS if learned is None else learned.service.value,
        rate_fast=0.0 if learned is None else learned.arrivals.fast.at(now.model),
        rate_slow=0.0 if learned is None else learned.arrivals.slow.at(now.model),
    )


def _with_frozen(board: "Board", row: Row, now: Now) -> Traffic:
    """The demand for one seat. Requests frozen with a parked seat wait since they stand still."""
    demand = traffic(board, row)
    if row.state is not S.PARKED or not row.frozen_since or not demand.in_flight:
        return demand
    since = now.model - (now.unix - row.frozen_since) * now.pace
    return Traffic(
        demand.waiting + demand.in_flight,
        demand.in_flight,
        since if demand.oldest_since is None else min(since, demand.oldest_since),
        demand.cause,
        tuple(sorted((*demand.since, (since, demand.in_flight)))),
    )


def _must_return(board: "Board", row: Row, now: Now) -> bool:
    """A seat with frozen requests goes before everybody else when its budget would not last another visit."""
    if row.state is not S.PARKED or not row.frozen_since or not traffic(board, row).in_flight:
        return False
    holders = [other for other in board.seats_of(row.group) if other.lease]
    leave = 0.0
    for other in holders:
        learned = board.learning.of(other.seat, other.model)
        serving = ASSUMED_SERVICE_SECONDS if learned is None else learned.service.value
        leave = max(leave, other.park_seconds + (serving if traffic(board, other).in_flight else 0.0))
    return row.stall_seconds(now) * now.pace <= row.activate_seconds + leave


def heard(board: "Board", signal: TrafficSignal, now: Now) -> None:
    """Learn from a signal; one that names no seat counts for the model's best one."""
    seat = signal.seat or _best_seat(board, signal.model)
    if seat not in board.rows or board.rows[seat].model != signal.model:
        return
    group = board.rows[seat].group
    owned = (row.seat for row in board.seats_of(group) if board.learning.of(row.seat, row.model) is not None)
    rates = board.learning.rates(owned, now)
    if arrived := board.learning.hear(signal, seat, now):
        board.learning.guessed(group.name, seat, arrived, rates)


def _may_start(board: "Board", row: Row, demand: Traffic, now: Now) -> bool:
    """Whether a container at the gate is in line: warm-up lets everybody in, else it takes a wish or a long wait."""
    if row.state is not S.WAITING or refused(row):
        return False
    asked = demand.waiting or row.wanted_since is not None or row.is_pinned
    waited = 0.0 if row.called_wall is None else now.wall - row.called_wall
    return bool(board.warmup or asked or waited > board.start_within_seconds)


def refused(row: Row) -> str:
    """Why this seat's container can never start; empty when it can."""
    return refusal(row.pod, row.group) if row.pod is not None else ""


def strangers_on(board: "Board", group: Group) -> str:
    """Why nothing is started on this group: a process that belongs to no seat uses its GPUs. Empty: none does."""
    index = {uuid: gpu.index for gpu in group.gpus for uuid in {gpu.uuid, gpu.mig.parent if gpu.mig else gpu.uuid}}
    found = [f"{one.name} (pid {one.pid}) on GPU {index[one.gpu]}" for one in board.strangers if one.gpu in index]
    if not found:
        return ""
    return (
        f"group {group.name} is quarantined: {', '.join(found)} belongs to no seat; end it, or take these GPUs out "
        f"of the configuration"
    )


def traffic(board: "Board", row: Row) -> Traffic:
    """The demand for one seat; demand for a model that names no seat goes to its best one."""
    if row.pod is None:
        return Traffic()
    unassigned = ("model", row.model) in board.levels.places and _best_seat(board, row.model) == row.seat
    return board.levels.of(row.model, row.seat, takes_unassigned=unassigned)


def _best_seat(board: "Board", model: str) -> str | None:
    rows = [row for row in board.rows.values() if row.model == model and row.state in PREFERENCE]
    return min(((PREFERENCE[row.state], row.seat) for row in rows), default=(0, None))[1]


def follow_traffic(board: "Board", row: Row, now: Now) -> None:
    """Remember when a seat was last busy and who caused it; let an operator's wish lapse."""
    if row.pod is None:
        return
    demand = traffic(board, row)
    if demand.waiting or demand.in_flight:
        row.busy_at = now.model
        row.unclaimed = False
    if demand.cause:
        row.cause = demand.cause
    if row.wanted_since is not None and now.wall > row.wanted_until:
        row.wanted_since = None


def still_wanted(board: "Board", operation: Operation, now: Now) -> bool:
    """Whether a drain still has its reason: who comes is wanted; where nobody comes, nobody asks for the victim."""
    if operation.ordered:
        return True
    comer = operation.winner or operation.clears_for or operation.room_for
    if comer is None:
        return not asked_for(seat_view(board, board.rows[operation.victim or ""], now))
    given_up = operation.clears_for is not None and overlap.claimant(board, comer) is None
    return not given_up and wants(board, board.rows[comer], now)


def wants(board: "Board", row: Row, now: Now) -> bool:
    """Whether a seat has a reason to come."""
    if row.state is S.WAITING:
        # Between two calls of kubelet it still wants to start.
        return row.called_wall is not None and _may_start(board, row, traffic(board, row), now)
    return row.state is S.PARKED and asked_for(seat_view(board, row, now))


def asked_for(seat: SeatView) -> bool:
    """Whether a parked seat has a reason to come, or one that is about to be parked to stay."""
    return bool(seat.waiting or seat.pinned or seat.wanted_seconds is not None)


def room(board: "Board", row: Row, *, without: Row | None = None, on: Group | None = None) -> bool:
    """Whether this seat may take a group's GPUs now (once ``without`` left): slots, other groups' GPUs, VRAM.

    ``on``: the group, if it is not the one that the seat is on.
    """
    group = on or row.group
    gpus = {gpu.uuid for gpu in group.gpus}
    aside = (row.seat, without.seat if without is not None else "")
    holders = [other for other in board.rows.values() if other.lease and other.seat not in aside]
    same = [other for other in holders if other.group.name == group.name]
    if len(same) >= group.slots:
        return False
    if any(gpus & {gpu.uuid for gpu in o.group.gpus} for o in holders if o.group.name != group.name):
        return False
    for gpu in group.gpus:
        taken = sum(other.reserved_bytes(gpu.memory_bytes) for other in same)
        if taken + row.reserved_bytes(gpu.memory_bytes, group) > gpu.memory_bytes:
            return False
    return True


def validate(board: "Board") -> None:
    """Raise AssertionError if an invariant does not hold."""
    owners: dict[str, list[Row]] = {}
    for group in board.groups:
        holders = [row for row in board.seats_of(group) if row.lease]
        told = any(row.state is S.QUARANTINED for row in holders)
        assert len(holders) <= group.slots or told, f"{group.name}: {len(holders)} hold, {group.slots} may"
        for gpu in group.gpus if holders else ():
            owners.setdefault(gpu.uuid, []).extend(holders)
            reserved = sum(row.reserved_bytes(gpu.memory_bytes) for row in holders)
            assert reserved <= gpu.memory_bytes or told, f"{gpu.uuid}: {reserved} bytes reserved of {gpu.memory_bytes}"
    for gpu_uuid, rows in owners.items():
        told = any(row.state is S.QUARANTINED for row in rows)
        assert told or len({row.group.name for row in rows}) == 1, f"{gpu_uuid} belongs to two groups"
    for operation in board.operations.values():
        assert operation.victim or operation.winner, f"{operation.op} moves nobody"
