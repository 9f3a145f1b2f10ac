"""Nothing is granted, drained or sent against the list of obstacles: its entry is noted at the instant of the act.

Each row counts but those that are named here: a new one does, whatever its number. (The other direction, that a seat
without an obstacle does not wait, is checked by the worlds after a tick.)
"""

from functools import wraps
from types import ModuleType
from typing import Any

from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import arbiter, obstacles, switch
from services.gpu_manager.core.obstacles import ROWS, Ask, Obstacle
from services.gpu_manager.core.riders import lanes

AGAINST: list[str] = []
"""What happened against the list since it was cleared."""
LOOKS = True
"""Whether acts are looked at."""

ASKS = {obstacles.START_GATE, obstacles.IDLE, obstacles.NO_CALL, obstacles.POLICY}
"""Whether the seat asks, and the choice of the policy: both may change once the decision is made."""
LEAVES = {obstacles.UNPROVEN, obstacles.STARTING, obstacles.UNPARKED, obstacles.ROOM}
"""What the holders do: one of them leaves by this act."""
BEGINS = {obstacles.ROUTERS, obstacles.PAUSE, obstacles.BARRIER, obstacles.SWITCH, lanes.LANES}
"""When a switch of the group may begin: this one has."""


def _against(
    node: Any, seat: Any, group: Any, now: Any, less: set[Any] = frozenset(), without: Any = None
) -> Obstacle | None:  # type: ignore[assignment]
    ask = Ask(node, group, now, seat, without)
    rows = (one for one in ROWS if one not in less)
    return next((Obstacle(one, found) for one in rows if (found := one.holds(ask)) is not None), None)


def _give_ticket(node: Any, seat: Any, group: Any, now: Any) -> Obstacle | None:
    again = seat.state is not SeatState.WAITING
    return _against(node, seat, group, now, ASKS | BEGINS | LEAVES - {obstacles.ROOM} if again else set())


def _activate(node: Any, group: Any, incoming: Any, _: str, now: Any) -> Obstacle | None:
    return _against(node, incoming, group, now)


def _drain(node: Any, victim: Any, incoming: Any, _: str, now: Any, **more: Any) -> Obstacle | None:
    """The victim may leave, and the seat for which it does may come."""
    group, seat = victim.group, incoming or more.get("room_for")
    if (claimant := more.get("clears_for")) is not None:
        claims = (name for name, claim in node.claims.items() if claim.seat == claimant.id)
        group, seat = node.groups[next(claims)].group, claimant
    found = next(obstacles.leaving(node, victim, now), None)
    less = ASKS - {obstacles.POLICY} | LEAVES | (BEGINS if claimant is not None else set())
    return found or (seat and _against(node, seat, group, now, less, victim))


def _sends(node: Any, under_way: Any, now: Any) -> Obstacle | None:
    """Of the first job of a switch that brings a parked seat, once that seat is bound."""
    job = next((one for one in node.effects[-1:] if getattr(one, "op", "") == under_way.op), None)
    seat = node.seats.get(under_way.incoming or "")
    if job is None or job.activate is None or seat is None or seat.state in COMING:
        return None
    victim, group = node.seats.get(under_way.victim or ""), node.groups[under_way.group].group
    return _against(node, seat, group, now, ASKS | BEGINS | LEAVES - {obstacles.ROOM}, victim)


def _watch(module: ModuleType, name: str, check: Any, *, after: bool = False) -> None:
    act = getattr(module, name)

    @wraps(act)
    def watched(*args: Any, **more: Any) -> Any:
        if not LOOKS:
            return act(*args, **more)
        again = after and args[1].job.sent is not None
        found = None if after else check(*args, **more)
        result = act(*args, **more)
        found = check(*args, **more) if after and not again else found
        if found is not None:
            AGAINST.append(f"{name} of {getattr(args[1], 'id', args[1])} against {found.row.nr}: {found.text}")
        return result

    setattr(module, name, watched)


_watch(arbiter, "give_ticket", _give_ticket)
_watch(switch, "activate", _activate)
_watch(switch, "drain", _drain)
_watch(switch, "_send", _sends, after=True)


def against() -> list[str]:
    """What happened against the list since the last call."""
    found = [*AGAINST]
    AGAINST.clear()
    return found
