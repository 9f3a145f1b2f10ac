"""Whether a backend parks a seat well. An engine that sleeps rehearses: it is parked and activated once, in one job,
before its seat serves. A backend that fails, or is refused, twice in a row gives way to the next one. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kybernate.engines import REHEARSED, RESTART, next_backend
from kybernate.messages import JobReply, JobStatus, SeatProgress, SwitchJob
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core.facts import Trigger
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import REHEARSAL, ManagedSeat, Rehearsal
from services.gpu_manager.core.state import RESEND_SECONDS, NodeState, Rider, Sample

S, T = SeatState, Trigger
DEMOTE_AFTER = 2
"""Failures in a row of a backend, after which the next one parks the seat; one in a rehearsal counts twice."""
FORGIVEN_AFTER = 20
"""Good activations by the backend that it was demoted to, after which its own is tried again."""
COLD_START = 5
"""A start of a seat that is parked by restart counts as so many good activations."""


@dataclass(slots=True)
class Halves:
    """What became of parks and activations of one seat."""

    failures: int = 0
    """In a row in which its backend failed."""
    good: int = 0
    """Good activations since it was demoted."""
    demoted: str = ""
    """Why ``Durable.backend`` parks it; empty: its pod's does."""
    unverified: str = ""
    """Why its engine's answers are not compared after a park, as of its last job."""


class Rehearsals(Rider):
    """Which engines rehearse, and which backends are demoted."""

    name, record = "rehearsal", Halves

    def metrics(self, node: NodeState, now: Now) -> Iterable[Sample]:
        """The seats that are demoted or not verified."""
        for seat in node.seats.values():
            mine, labels = halves(seat), {"seat": seat.id, "model": seat.model}
            text = "1 for a seat whose backend failed twice, with what parks it now"
            by, demoted = labels | {"backend": seat.backend}, 1 if mine.demoted else None
            yield Sample("kybernate_seat_demoted", text, demoted, by)
            text = "1 for a seat whose engine the checkpointer cannot reach: its answers are not compared after a park"
            yield Sample("kybernate_seat_unverified", text, 1 if mine.unverified and seat.model else None, labels)

    def why(self, node: NodeState, of: Group | ManagedSeat | None, now: Now) -> dict[str, Any] | None:
        """Why it was demoted, and why its answers are not compared."""
        mine = halves(of) if isinstance(of, ManagedSeat) else None
        return None if mine is None else {"demoted": mine.demoted, "unverified": mine.unverified}

    def reported(self, node: NodeState, seat: ManagedSeat, before: SeatState, half: SeatProgress) -> None:
        """Count what became of a half, and demote its backend; while it is parked it needs the one that parked it."""
        mine = halves(seat)
        if half.outcome in ("parked", "active"):
            mine.unverified = half.unverified
        if seat.durable.spilled:
            return  # a restart parks it
        if not (half.failed or half.refused):
            good = half.outcome in ("parked", "active") and not half.reason
            mine.failures = 0 if good else mine.failures
            if good and half.outcome == "active":
                _forgive(seat, mine)
            return
        mine.failures += 2 if seat.state is S.STARTING and before is not S.PARKING else 1
        below = next_backend(seat.backend, mig=seat.group.is_mig)
        if mine.failures >= DEMOTE_AFTER and half.outcome != "parked" and below:
            mine.demoted = f"{seat.backend} failed {mine.failures} times in a row: {half.reason}"
            seat.durable.backend, mine.failures, mine.good = below, 0, 0

    def before_serving(self, node: NodeState, seat: ManagedSeat, now: Now) -> bool:
        """True once the seat may serve; else its rehearsal is sent (again), one job that parks and activates it.

        The answer to a repeated job is its status, so that no report needs to arrive. A refused job is no reason not to
        serve; "busy" and "stale-epoch" are asked again."""
        known = seat.rehearsal if seat.rehearsal is not None and _same_container(seat, seat.rehearsal) else None
        mine = halves(seat)
        if seat.durable.backend == RESTART:
            _forgive(seat, mine, COLD_START)
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
        for before, half in [(S.STARTING, first), (S.ACTIVATING, progress)][: 1 + (progress is second)]:
            for rider in node.riders[Rider.reported]:
                rider.reported(node, seat, before, half)
        known, seat.rehearsal.done = seat.rehearsal, progress.outcome == "active"
        if not known.done:
            seat.rehearsal = None
        if progress.outcome == "quarantined" and seat.state is S.STARTING:
            node.transition(seat, T.QUARANTINE, now, reason=progress.reason)
        elif progress.outcome == "parked" and seat.state is S.STARTING and _same_container(seat, known):
            node.transition(seat, T.EVIDENCE, now, reason=progress.reason)


def halves(seat: ManagedSeat) -> Halves:
    """What became of them."""
    known = seat.records.get(Rehearsals.name)
    return known if isinstance(known, Halves) else Rehearsals.of(seat)


def _forgive(seat: ManagedSeat, mine: Halves, good: int = 1) -> None:
    """After enough of them it has its own backend again, which a single failure demotes."""
    mine.good += good
    if mine.good >= FORGIVEN_AFTER and seat.durable.backend:
        seat.durable.backend = mine.demoted = ""
        mine.failures, mine.good = DEMOTE_AFTER - 1, 0


def _same_container(seat: ManagedSeat, rehearsal: Rehearsal) -> bool:
    return rehearsal.container_id == seat.durable.container_id
