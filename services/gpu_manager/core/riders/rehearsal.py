"""The rehearsal of an engine that sleeps: it is parked and activated once, in one job, before its seat serves. Pure."""

from kybernate.engines import REHEARSED, RESTART
from kybernate.messages import JobReply, JobStatus, SwitchJob
from kybernate.seat import SeatState
from services.gpu_manager.core.facts import Trigger
from services.gpu_manager.core.group_switch import RESEND_SECONDS
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import REHEARSAL, ManagedSeat, Rehearsal
from services.gpu_manager.core.state import NodeState, Rider, SeatChange

S, T = SeatState, Trigger
COLD_START = 5
"""A start of a seat that is parked by restart counts as so many good activations."""


class Rehearsals(Rider):
    """Which engines rehearse."""

    def before_serving(self, node: NodeState, seat: ManagedSeat, now: Now) -> bool:
        """True once the seat may serve; else its rehearsal is sent (again), one job that parks and activates it.

        The answer to a repeated job is its status, so that no report needs to arrive. A refused job is no reason not to
        serve; "busy" and "stale-epoch" are asked again."""
        known = seat.rehearsal if seat.rehearsal is not None and _same_container(seat, seat.rehearsal) else None
        if seat.durable.backend == RESTART:
            seat.forgive(COLD_START)
        if seat.backend not in REHEARSED or seat.starts_cold or (known is not None and known.done):
            return True
        if known is None:
            epoch = node.next_epoch(now)
            op, never = f"{REHEARSAL}{seat.id}-{epoch}", WallTime(-RESEND_SECONDS)
            seat.rehearsal = known = Rehearsal(op, epoch, seat.durable.container_id, never, begun=now.wall)
        if now.wall >= known.sent + RESEND_SECONDS:
            known.sent = now.wall
            node.effects.append(
                SwitchJob(
                    cause=seat.default_cause,
                    node=node.name,
                    epoch=known.epoch,
                    op=known.op,
                    group=seat.group.name,
                    park=(seat.target(),),
                    activate=seat.target(),
                )
            )
        return False

    def on_answer(self, node: NodeState, op: str, reply: JobReply, now: Now) -> None:
        """The checkpointer's answer to the job: it holds the job's status, or refuses the job."""
        for status in reply.jobs:
            self.on_status(node, status, now)
        seat = next((one for one in node.seats.values() if one.rehearsal and one.rehearsal.op == op), None)
        if seat is None or seat.rehearsal is None or reply.accepted or reply.code == "busy":
            return
        node.epoch = max(node.epoch, reply.highest_epoch)
        if reply.code == "stale-epoch":
            seat.rehearsal = None
        else:
            seat.rehearsal.done = True

    def on_status(self, node: NodeState, status: JobStatus, now: Now) -> None:
        """How a rehearsal ended: the seat may serve, is parked (a frozen engine is never healthy), or begins again with
        what is left of the engine."""
        seat = next((one for one in node.seats.values() if one.rehearsal and one.rehearsal.op == status.op), None)
        if seat is None or seat.rehearsal is None or seat.rehearsal.done or not status.done or not status.park:
            return
        first, second = status.park[0], status.activate
        progress = second if second is not None and first.outcome == "parked" else first
        if first.outcome == "parked":
            seat.learn_park(first)
        for half in [first] * (first.outcome == "parked") + [progress] * (progress.outcome == "active"):
            for rider in node.riders[Rider.after]:
                rider.after(node, seat, SeatChange(seat.state, progress=half), now)
        seat.judge_backend(progress, weight=2)
        known, seat.rehearsal.done = seat.rehearsal, progress.outcome == "active"
        if not known.done:
            seat.rehearsal = None
        if progress.outcome == "quarantined" and seat.state is S.STARTING:
            node.transition(seat, T.QUARANTINE, now, reason=progress.reason)
        elif progress.outcome == "parked" and seat.state is S.STARTING and _same_container(seat, known):
            node.transition(seat, T.EVIDENCE, now, reason=progress.reason)


def _same_container(seat: ManagedSeat, rehearsal: Rehearsal) -> bool:
    return rehearsal.container_id == seat.durable.container_id
