"""The ways in which a seat comes to another group of its pool: why it has none, and what each costs. Pure reads.

The cheapest way that a seat has is taken. ``map``: the driver restores its copy on other GPUs. ``restart``: its engine
ends and starts there, without its copy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kybernate.annotations import REBALANCE
from kybernate.engines import DRIVER_BACKENDS
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core.managed_seat import AT_HOME, ManagedSeat
from services.gpu_manager.core.state import NodeState

COLD_SECONDS = 60.0
"""Model seconds that a start is assumed to take until one was measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way."""

    name: str
    refused: Callable[[NodeState, ManagedSeat], str]
    """Why a seat does not have it; empty: it has."""
    seconds: Callable[[NodeState, ManagedSeat], float]
    """Model seconds beyond what bringing it back at home takes."""


def _no_map(node: NodeState, seat: ManagedSeat) -> str:
    if seat.state in AT_HOME:
        return "it has no copy"
    if seat.group.is_mig:
        return "the driver cannot checkpoint MIG instances"
    if seat.backend not in DRIVER_BACKENDS:
        return f"backend {seat.backend} cannot restore on other GPUs"
    return seat.durable.fixed or node.immovable


def _no_restart(_: NodeState, seat: ManagedSeat) -> str:
    call, pod = seat.gate.call, seat.pod
    anywhere = pod is not None and pod.restarts_inside and pod.running
    if seat.state in AT_HOME and call is not None:
        anywhere = call.inside
    return (
        "" if anywhere else "kubelet has given its container its GPUs; with kyb-run in front it could start on others"
    )


def _cold(_: NodeState, seat: ManagedSeat) -> float:
    if seat.state in AT_HOME:
        return 0.0  # it starts in any case
    return max(0.0, (seat.durable.costs.cold_seconds or COLD_SECONDS) - seat.activate_seconds)


MAP = Way("map", _no_map, lambda node, _: node.move_seconds)
RESTART = Way("restart", _no_restart, _cold)
WAYS = (MAP, RESTART)


def way(node: NodeState, seat: ManagedSeat) -> Way | None:
    """The cheapest way that a seat of a pool has; None: it has none."""
    if _bound(seat):
        return None
    found = [one for one in WAYS if not one.refused(node, seat)]
    return min(found, key=lambda one: one.seconds(node, seat), default=None)


def why_immovable(node: NodeState, seat: ManagedSeat) -> str:
    """Why this seat stays on its group although that is part of a pool; empty: it may move, or has no other group."""
    if seat.pod is None or not node.groups[seat.group.name].peers or way(node, seat) is not None:
        return ""
    return _bound(seat) or "; ".join(one.refused(node, seat) for one in WAYS)


def may_move(node: NodeState, seat: ManagedSeat) -> bool:
    """True for a seat that could be activated, or started, on another group now."""
    there = seat.state in (SeatState.PARKED, SeatState.WAITING) and bool(node.groups[seat.group.name].peers)
    return there and way(node, seat) is not None


def starts_on(node: NodeState, seat: ManagedSeat, group: Group) -> bool:
    """True for a parked seat that comes to this group by a start of its engine."""
    return seat.state is SeatState.PARKED and group.name != seat.group.name and way(node, seat) is RESTART


def _bound(seat: ManagedSeat) -> str:
    pod = seat.pod
    return "" if pod is None or pod.notes.rebalance else f"pod {pod.pod} opted out ({REBALANCE})"
