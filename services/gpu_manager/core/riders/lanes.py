"""Lanes: how many switches copy memory side by side at full speed. More of them begin in turn. Pure.

A group whose lanes are taken begins no switch, and its holders serve on. What it then does is decided once a lane is
free, groups with the longest wait first (``board``). Holding a job back whose victim is drained already was measured
and is worse than copying side by side: such a seat serves no request while it waits.

A switch takes its lane from the decision on, but not while its victim has requests in flight, until it ends. Starts
from disk take none and wait for none.
"""

from collections.abc import Sequence

from kybernate.config import Lanes
from kybernate.machine import Gpu
from kybernate.seat import SeatState
from services.gpu_manager.core import view
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import Ask, row, unready
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import GroupSwitch, Lane, NodeState, SwitchPhase

LONGEST_SECONDS = 180.0
"""Wall: a switch that copies for longer is taken for hanging, and its lane for free."""


def resolve(written: Sequence[Lanes], gpus: Sequence[Gpu]) -> tuple[Lane, ...]:
    """The lanes of a node by its configuration; GPUs that it does not have are left out."""
    named = [
        {gpu.uuid for gpu in gpus if not one.gpus or gpu.index in one.gpus or gpu.uuid in one.gpus} for one in written
    ]
    return tuple(Lane(frozenset(found), one.transfers) for one, found in zip(written, named, strict=True))


@row(295, "lanes", "group", "-", f"a switch that copies ends, {LONGEST_SECONDS:.0f} s at most", turn=True)
def LANES(ask: Ask) -> Stage | None:
    """As many switches copy memory as its GPUs have lanes. Data: ``groups`` that copy, ``transfers`` side by side."""
    node, group = ask.node, ask.group
    mine = (one for one in node.setup.lanes if not one.gpus.isdisjoint(group.physical))
    full = next((one for one in mine if len(_copying(node, one, ask.now)) >= one.transfers), None)
    if full is None or group.name in node.switches or _needs_none(ask):
        return None
    copying = _copying(node, full, ask.now)
    what = ", ".join(f"{_moved(node, one)} on group {one.group}" for one in copying)
    text = f"{len(copying)} of {full.transfers} lanes copy: {what}; the longest wait goes next"
    return Stage("lanes", text, {"groups": [one.group for one in copying], "transfers": full.transfers})


def _copying(node: NodeState, lane: Lane, now: Now) -> list[GroupSwitch]:
    switches = [
        one for one in node.switches.values() if not lane.gpus.isdisjoint(node.groups[one.group].group.physical)
    ]
    return [one for one in switches if _copies(node, one, now)]


def _copies(node: NodeState, switch: GroupSwitch, now: Now) -> bool:
    """True for a switch that copies memory, or will at once."""
    seats = [node.seats[name] for name in (switch.victim, switch.incoming) if name is not None]
    serves = switch.phase is SwitchPhase.DRAINING and view.demand(node, node.seats[switch.victim or ""]).in_flight
    return not serves and now.wall < switch.times.drained + LONGEST_SECONDS and any(map(_is_copied, seats))


def _is_copied(seat: ManagedSeat) -> bool:
    return not seat.starts_cold and seat.acts_as is not SeatState.WAITING


def _needs_none(ask: Ask) -> bool:
    """True where no memory is copied: of seats that a restart parks, or for a container that starts in free room."""
    node, group, seats = ask.node, ask.group, [ask.of] if ask.of is not None else view.seats_on(ask.node, ask.group)
    if not any(map(_is_copied, (*seats, *view.holders(node, group)))):
        return True
    starts = (one for one in seats if one.acts_as is SeatState.WAITING and view.wanted(node, one, ask.now))
    return any(view.room(node, one, on=group) and not unready(node, one, group, ask.now) for one in starts)


def _moved(node: NodeState, switch: GroupSwitch) -> str:
    names = [node.seats[name].model for name in (switch.victim, switch.incoming) if name is not None]
    return " for ".join(names)
