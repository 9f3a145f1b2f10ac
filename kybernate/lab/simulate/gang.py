"""Gangs: seats that serve one model together and run only together, seen as one. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kybernate.policy.view import SeatView


def as_one(members: Sequence[SeatView]) -> SeatView:
    """One seat that stands for a gang: the sum of its demand, the cost of its slowest member.

    Named after its first member. Whoever decides about it moves all members. Raises ValueError for no members.
    """
    if not members:
        raise ValueError("a gang needs at least one seat")
    wanted = [seat.wanted_seconds for seat in members if seat.wanted_seconds is not None]
    moves = [seat.move_seconds for seat in members if seat.move_seconds is not None]
    in_line = [seat.start_wait_seconds for seat in members if seat.start_wait_seconds is not None]
    ages = sorted((age for seat in members for age in seat.ages), reverse=True)
    complete = all(seat.ages or not seat.waiting for seat in members)
    return replace(
        members[0],
        waiting=sum(seat.waiting for seat in members),
        ages=tuple(ages) if complete else (),
        oldest_wait_seconds=max(seat.oldest_wait_seconds for seat in members),
        in_flight=sum(seat.in_flight for seat in members),
        pinned=any(seat.pinned for seat in members),
        wanted_seconds=max(wanted, default=None),
        start_wait_seconds=max(in_line, default=None),
        active_seconds=min(seat.active_seconds for seat in members),
        unclaimed=all(seat.unclaimed for seat in members),
        idle_seconds=min(seat.idle_seconds for seat in members),
        park_seconds=max(seat.park_seconds for seat in members),
        activate_seconds=max(seat.activate_seconds for seat in members),
        move_seconds=max(moves, default=None),
        home_busy=any(seat.home_busy for seat in members),
        weight=max(seat.weight for seat in members),
        slo_seconds=min(seat.slo_seconds for seat in members),
        service_seconds=max(seat.service_seconds for seat in members),
        rate_fast=sum(seat.rate_fast for seat in members),
        rate_slow=sum(seat.rate_slow for seat in members),
        stall_budget_seconds=min(seat.stall_budget_seconds for seat in members),
    )
