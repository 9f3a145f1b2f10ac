"""The incoming seat of a switch is chosen once more when the victim is drained: the policy chooses. Pure."""

from kybernate.messages import JobStatus
from kybernate.policy import Switch
from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import decisions, view
from services.gpu_manager.core.facts import Trigger
from services.gpu_manager.core.group_switch import GroupSwitch
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import first, obstacles
from services.gpu_manager.core.pool import full_view
from services.gpu_manager.core.state import NodeState

S = SeatState


def bind(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Choose the incoming seat once more before the job is sent. Without another choice it stays while it is wanted."""
    if not _may_bind(switch) or (switch.incoming and node.seats[switch.incoming].state in COMING):
        return  # the job is sent again, to a checkpointer that lost its journal half way
    seat = _choice(node, switch, now)
    if seat is not None:
        _set_incoming(node, switch, seat, now)
    elif switch.incoming and not view.wanted(node, node.seats[switch.incoming], now):
        switch.incoming = None


def bind_another(node: NodeState, switch: GroupSwitch, now: Now) -> bool:
    """The drain has lost its reason: bind another seat that waits for the victim's place, if there is one."""
    seat = _choice(node, switch, now) if _may_bind(switch) else None
    if seat is None or not view.wanted(node, seat, now):
        return False
    _set_incoming(node, switch, seat, now)
    return True


def follow(node: NodeState, switch: GroupSwitch, status: JobStatus, now: Now) -> None:
    """The job's status is the truth about the incoming seat.

    (1) It names another seat, as a manager of the release before could make it do. (2) It ended without an incoming
    seat.
    """
    named = status.activate
    if named is not None and named.seat != switch.incoming and named.seat in node.seats:  # (1)
        _give_back(node, switch, f"{node.seats[named.seat].name} is activated instead", now)
        _set_incoming(node, switch, node.seats[named.seat], now)
    elif status.done and (named is None or named.outcome == "pending"):  # (2)
        _give_back(node, switch, "the switch ended without it", now)


def _give_back(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """The seat may have the lease already. It was not touched, and returns the GPUs."""
    before = node.seats[switch.incoming] if switch.incoming is not None else None
    if before is not None and before.op == switch.op and before.state in COMING:
        node.transition(before, Trigger.NOT_RESTORED, now, reason=reason)


def _choice(node: NodeState, switch: GroupSwitch, now: Now) -> ManagedSeat | None:
    """The seat that the policy would activate now; None if it picks none or the pick cannot be activated."""
    group, victim = node.groups[switch.group], node.seats[switch.victim or ""]
    decision = node.setup.policy.decide(full_view(node, group.group, now))
    if not isinstance(decision, Switch) or decision.evict is not None:
        return None
    seat = node.seats[decision.activate]
    ready = seat.acts_as is S.PARKED or (seat.acts_as is S.WAITING and seat.calls(now, group.group))
    if not ready or seat is victim:
        return None
    if first(obstacles(node, seat, group.group, now, act="send", without=victim)) is not None:
        return None
    if seat.id != switch.incoming:
        group.why = decision.reason
    return seat


def _may_bind(switch: GroupSwitch) -> bool:
    """True for a switch whose incoming seat the policy chooses."""
    return switch.clears_for is None and switch.victim is not None


def _set_incoming(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, now: Now) -> None:
    if seat.id != switch.incoming:
        switch.incoming, switch.cause = seat.id, seat.cause or switch.cause
        decisions.of_switch(node, switch, node.groups[switch.group].why, now)
