"""The incoming seat of a switch is chosen again when the victim is drained, and as long as the victim is parked. Pure.

The policy chooses; the checkpointer has the last word about a job that it has already (RetargetJob).
"""

from kybernate.messages import JobReply, JobStatus, RetargetJob
from kybernate.policy import Switch
from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import decisions, view, ways
from services.gpu_manager.core.facts import Trigger
from services.gpu_manager.core.group_switch import GroupSwitch
from services.gpu_manager.core.inputs import Now, RetargetAnswered
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import first, full_view, obstacles
from services.gpu_manager.core.state import NodeState

S = SeatState

ASK_AGAIN_SECONDS = 1.0
"""Wall: how long after a retarget that was not answered the next one is sent."""


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


def offer(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """While the victim is being parked: offer the checkpointer another seat, if the policy picks one now."""
    retarget = switch.retarget
    if not _may_bind(switch) or retarget.asking is not None or retarget.settled or now.wall < retarget.ask_after:
        return
    if not switch.job.journaled or node.seats[switch.victim or ""].state is not S.PARKING:
        return
    seat = _choice(node, switch, now)
    if seat is None or seat.id == switch.incoming:
        return
    group = node.groups[switch.group].group
    parked = seat.state is S.PARKED and not ways.starts_on(node, seat, group)  # others start once the group is free
    if parked and seat.epoch > switch.epoch:
        return
    retarget.asking = seat.id
    retarget.offered.add(seat.id)
    node.effects.append(
        RetargetJob(
            cause=seat.cause or switch.cause,
            node=node.name,
            epoch=switch.epoch,
            op=switch.op,
            activate=view.target(node, seat, group) if parked else None,
        )
    )


def on_answer(node: NodeState, answer: RetargetAnswered, now: Now) -> None:
    """The checkpointer's answer to an offer.

    (1) About no open question. (2) None: it may have accepted; the job's status will show. (3) Refused: any other offer
    would be refused as well. (4) Accepted, for a seat at the gate or for the seat that the job now names. With (3) and
    (4) seats of earlier offers are free for other groups, unless an offer was not answered.
    """
    switch, reply = node.switch_of_op(answer.op), answer.reply
    if switch is None or switch.retarget.asking is None:  # (1)
        return
    retarget, seat = switch.retarget, node.seats[switch.retarget.asking]
    retarget.asking = None
    if reply is None:  # (2)
        retarget.unanswered.add(seat.id)
        retarget.ask_after = now.wall + ASK_AGAIN_SECONDS
    elif not reply.accepted:  # (3)
        retarget.settled = True
        retarget.offered &= retarget.unanswered
    elif seat.state is S.WAITING or _names(reply, switch.op, seat.id):  # (4)
        _replace_incoming(node, switch, seat, now)
        retarget.offered &= retarget.unanswered


def follow(node: NodeState, switch: GroupSwitch, status: JobStatus, now: Now) -> None:
    """The job's status is the truth about the incoming seat.

    (1) It names another seat: one that was offered, or one whose activation has begun (a RetargetJob of the manager
    before this one may have been on its way into the journal when this one asked). (2) It ended without an incoming
    seat.
    """
    named = status.activate
    if named is not None and named.seat != switch.incoming and named.seat in node.seats:  # (1)
        if named.seat in switch.retarget.offered or named.outcome != "pending":
            _replace_incoming(node, switch, node.seats[named.seat], now)
    elif status.done and (named is None or named.outcome == "pending"):  # (2)
        _give_back(node, switch, "the switch ended without it", now)


def _replace_incoming(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, now: Now) -> None:
    if seat.id != switch.incoming:
        _give_back(node, switch, f"{seat.name} is activated instead", now)
    _set_incoming(node, switch, seat, now)


def _give_back(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """The replaced seat may have the lease already: a park can be reported while a RetargetJob is on its way into the
    journal. It was not touched, and returns the GPUs."""
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
    ready = seat.state is S.PARKED or (seat.state is S.WAITING and seat.calls(now, group.group))
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


def _names(reply: JobReply, op: str, seat: str) -> bool:
    """True when the answer shows this seat as the incoming one."""
    found = [status.activate.seat for status in reply.jobs if status.op == op and status.activate is not None]
    return not reply.jobs or seat in found
