"""Nothing is granted, drained or sent against the list of obstacles: its entry is noted at the instant of the act.

The other direction, that a seat without an obstacle does not wait, is checked by the worlds after a tick.
"""

from functools import wraps
from types import ModuleType
from typing import Any

from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import arbiter, obstacles, switch
from services.gpu_manager.core.obstacles import Obstacle, first

AGAINST: list[str] = []
"""What happened against the list since it was cleared."""


def _give_ticket(node: Any, seat: Any, group: Any, now: Any) -> Obstacle | None:
    act = "run" if seat.state is SeatState.WAITING else "ticket"
    return first(obstacles.obstacles(node, seat, group, now, act=act))


def _activate(node: Any, group: Any, incoming: Any, _: str, now: Any) -> Obstacle | None:
    return first(obstacles.obstacles(node, incoming, group, now))


def _drain(node: Any, victim: Any, _: Any, __: str, now: Any, **___: Any) -> Obstacle | None:
    return first(obstacles.leaving(node, victim, now))


def _sends(node: Any, under_way: Any, now: Any) -> Obstacle | None:
    """Of the first job of a switch that brings a parked seat, once that seat is bound."""
    job = next((one for one in node.effects[-1:] if getattr(one, "op", "") == under_way.op), None)
    seat = node.seats.get(under_way.incoming or "")
    if job is None or job.activate is None or seat is None or seat.state in COMING:
        return None
    victim, group = node.seats.get(under_way.victim or ""), node.groups[under_way.group].group
    return first(obstacles.obstacles(node, seat, group, now, act="send", without=victim))


def _watch(module: ModuleType, name: str, check: Any, *, after: bool = False) -> None:
    act = getattr(module, name)

    @wraps(act)
    def watched(*args: Any, **more: Any) -> Any:
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
