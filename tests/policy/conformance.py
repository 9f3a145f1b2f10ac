"""What every policy must keep, whatever it sees; also for one of your own."""

from kybernate.policy import Decision, GroupView, Park, Policy, SeatView, Stay, Switch
from kybernate.seat import HOLDING
from kybernate.seat import SeatState as S


def can_be_carried_out(policy: Policy, shown: GroupView, decision: Decision) -> None:
    """It names who is there, who waits, who may leave; it asks for no more holders than slots."""
    assert policy.decide(shown) == decision, "deterministic"
    assert decision.reason
    here = {one.seat: one for one in shown.seats}
    holding = sum(one.state in HOLDING for one in shown.seats)
    match decision:
        case Stay(until=until):
            assert until is None or 0 < until < 1e6
        case Park(seat=victim):
            assert here[victim].state is S.ACTIVE
            assert not here[victim].pinned
            assert not here[victim].in_flight
            assert not here[victim].waiting
        case Switch(activate=incoming, evict=victim):
            far = {one.seat: one for one in shown.elsewhere if one.home_busy and one.wait_seconds is not None}
            assert (here | {one.seat: one for one in shown.elsewhere})[incoming].ready
            assert incoming in far or here[incoming].wait_seconds is not None
            needs = (here | far)[incoming].vram_bytes
            room = holding < shown.slots and (shown.free_bytes is None or needs <= shown.free_bytes)
            if victim is None:
                assert room
            else:
                assert here[victim].state is S.ACTIVE
                assert not here[victim].pinned
                assert not room


def is_looked_at_again(shown: GroupView, decision: Decision, *, bounded: bool) -> None:
    """With demand and a holder that may leave, only a rule that waits for idleness (not ``bounded``) may stay."""
    waits = any(one.wait_seconds is not None and one.ready for one in shown.seats)
    movable = [one for one in shown.seats if one.state is S.ACTIVE and not one.pinned]
    if shown.free_bytes is not None and not movable_make_room(shown, movable):
        return
    idle = any(not (one.in_flight or one.waiting) for one in movable)
    if waits and movable and (bounded or idle) and isinstance(decision, Stay):
        assert decision.until is not None


def movable_make_room(shown: GroupView, movable: list[SeatView]) -> bool:
    """Whether every seat with demand would fit if all holders left that may."""
    waiting = [one.vram_bytes for one in (*shown.seats, *shown.elsewhere) if one.wait_seconds is not None and one.ready]
    return max(waiting, default=0) <= (shown.free_bytes or 0) + sum(one.vram_bytes for one in movable)
