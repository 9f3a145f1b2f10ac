"""What the policy wants for one group, as far as the invariants allow it. Pure."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kybernate.policy import Park, Stay, Switch
from kybernate.seat import SeatState, Trigger
from kybernate.topology import Group
from services.gpu_manager import looking, outcomes, overlap, rebinding
from services.gpu_manager.inputs import Now
from services.gpu_manager.rows import Row
from services.gpu_manager.terms import terms

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S, T = SeatState, Trigger


def decide(board: "Board", group: Group, now: Now) -> None:
    """Ask the policy about a group that is in no switch, and begin what it says."""
    board.wake_at.pop(group.name, None)  # also where nothing is decided: a look that is overdue would spin
    if board.pause_until.get(group.name, 0.0) > now.wall:
        return
    foreign = looking.strangers_on(board, group)
    if foreign:
        board.why[group.name] = foreign
        board.claims.pop(group.name, None)
        return
    comer_elsewhere = overlap.claimed_for(board, group, now)
    if comer_elsewhere is not None:
        board.why[group.name] = f"its GPUs are being cleared for {comer_elsewhere}"
        return
    others = overlap.in_the_way(board, group)
    if others:
        if overlap.decide(board, group, others, now):
            _clear(board, group, others, now)
        return
    view = replace(looking.view(board, group, now), elsewhere=rebinding.seats_elsewhere(board, group, now))
    decision = board.policy.decide(view)
    comer = board.rows[decision.activate] if isinstance(decision, Switch) and decision.evict is None else None
    if comer is not None and not looking.room(board, comer, on=group):  # a slot is free but no room: somebody yields
        decision = board.policy.decide(replace(view, slots=0))
    board.why[group.name] = decision.reason
    match decision:
        case Stay(until=until):
            if until is not None:
                board.wake_at[group.name] = now.model + max(until, 0.0)
        case Switch(activate=winner, evict=None):
            _grant(board, group, board.rows[winner], decision.reason, now)
        case Switch(activate=winner, evict=str(victim), how=how):
            freeze = how == "freeze" and terms(board.rows[victim].pod, board.tiers).tier.stall_budget_seconds > 0
            _evict(board, board.rows[victim], board.rows[winner], decision.reason, now, freeze=freeze)
        case Park(seat=victim):
            _park(board, board.rows[victim], decision.reason, now)


def _grant(board: "Board", group: Group, winner: Row, reason: str, now: Now) -> None:
    """Give a free slot to a seat. The policy is not trusted with the invariants: there must be room."""
    if not looking.room(board, winner, on=group):
        return
    if winner.state is S.WAITING and winner.calls(now):
        board.claims.pop(group.name, None)
        board.say_decided(group, reason)
        board.give_ticket(winner, now)
    elif winner.state is S.PARKED and board.bus_up:
        board.claims.pop(group.name, None)
        board.say_decided(group, reason)
        operation = board.begin(group, None, winner, now)
        operation.phase = "job"
        outcomes.lease(board, operation, winner, now)


def _evict(board: "Board", victim: Row, winner: Row | None, reason: str, now: Now, *, freeze: bool = False) -> None:
    """Drain a holder for another seat, or freeze it with what it has in flight.

    Never while routers may be there that would not hear of it.
    """
    if not board.bus_up or victim.state is not S.ACTIVE or not board.routers.settled(now):
        return
    if winner is not None and looking.room(board, winner, on=victim.group):
        _grant(board, victim.group, winner, reason, now)  # nobody need leave
        return
    board.say_decided(victim.group, reason)
    fits = winner is None or looking.room(board, winner, without=victim, on=victim.group)
    operation = board.drain(victim, winner if fits else None, reason, now, freeze=freeze)
    operation.room_for = None if fits or winner is None else winner.seat  # one more has to yield before it fits


def _park(board: "Board", victim: Row, reason: str, now: Now) -> None:
    """Drain a holder for nobody, unless somebody asks for it: that would call the drain off at once, and again."""
    if looking.asked_for(looking.seat_view(board, victim, now)):
        board.why[victim.group.name] = f"{victim.seat} is asked for and stays, although the policy said: {reason}"
        return
    _evict(board, victim, None, reason, now)


def _clear(board: "Board", group: Group, others: list[Row], now: Now) -> None:
    """Drain the seats of other groups that hold GPUs which this one has claimed."""
    if not board.bus_up or not board.routers.settled(now):
        return
    comer = board.rows[board.claims[group.name].seat]
    for victim in others:
        paused = board.pause_until.get(victim.group.name, 0.0) > now.wall
        if victim.state is not S.ACTIVE or victim.group.name in board.operations or paused:
            continue
        if overlap.yields(board, group, victim, now):
            reason = f"its GPUs are needed together for {comer.seat} of group {comer.group.name}"
            operation = board.drain(victim, None, reason, now)
            operation.clears_for, operation.cause = comer.seat, comer.cause or operation.cause
